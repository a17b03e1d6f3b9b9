// copy_nd on CUDA: one thread copies one item, which is as wide as the elements that lie side by
// side allow (16 bytes at most); where input and output have their neighbours in different
// dimensions, a block transposes tiles through shared memory, so that both are read and written in
// whole lines.
#include "cuda/common/strided.cuh"
#include "ops/copy_nd.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kTile = 32;     // items a side
constexpr int kTileRows = 8;  // of threads: each copies kTile / kTileRows items
constexpr int kShortest = 8;  // dimensions below it leave too much of a tile empty

template <typename Item, typename Index>
__global__ void copy_kernel(const Item* input, Item* output, const Walk<2> walk) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = grid_thread(); i < walk.size; i += threads) {
    std::int64_t at[2];
    walk.position(static_cast<Index>(i), at);
    output[at[0]] = input[at[1]];
  }
}

// A matrix [columns, rows] in the input, [rows, columns] in the output, for every index of `outer`.
struct Transpose {
  unsigned rows, columns;
  unsigned row_tiles, column_tiles;
  std::int64_t input_step;   // between columns
  std::int64_t output_step;  // between rows
  unsigned tiles;
};

template <typename Item>
__global__ void transpose_kernel(const Item* input, Item* output, const Transpose p,
                                 const Walk<2> outer) {
  __shared__ Item tile[kTile][kTile + 1];  // one more: columns fall into different banks
  wait_for_inputs();
  let_successors_start();
  for (unsigned index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const unsigned above = index / p.column_tiles;
    const unsigned column = (index - above * p.column_tiles) * kTile;
    const unsigned outer_index = above / p.row_tiles;
    const unsigned row = (above - outer_index * p.row_tiles) * kTile;
    std::int64_t at[2];
    outer.position(outer_index, at);
    const Item* from = input + at[1];
    Item* to = output + at[0];
    for (unsigned i = threadIdx.y; i < kTile; i += kTileRows) {
      if (column + i < p.columns && row + threadIdx.x < p.rows) {
        tile[i][threadIdx.x] = from[(column + i) * p.input_step + row + threadIdx.x];
      }
    }
    __syncthreads();
    for (unsigned i = threadIdx.y; i < kTile; i += kTileRows) {
      if (row + i < p.rows && column + threadIdx.x < p.columns) {
        to[(row + i) * p.output_step + column + threadIdx.x] = tile[threadIdx.x][i];
      }
    }
    __syncthreads();  // before the next tile is written over this one
  }
}

// The dimension in which the input's items lie side by side, where the output's do in the last; -1
// where that is no transpose that tiles are worth it for.
int transposed_dimension(const Strided<2>& walk) {
  const int last = walk.rank - 1;
  if (walk.rank < 2 || walk.strides[0][last] != 1 || walk.strides[1][last] == 1) return -1;
  for (int d = 0; d < last; ++d) {
    if (walk.strides[1][d] == 1 && walk.dims[d] >= kShortest && walk.dims[last] >= kShortest) {
      return d;
    }
  }
  return -1;
}

template <typename Item>
bool launch_transpose(const void* input, void* output, const Strided<2>& walk, Stream stream) {
  const int other = transposed_dimension(walk);
  if (other < 0) return false;
  const int last = walk.rank - 1;
  if (!is_narrow(walk.dims[other]) || !is_narrow(walk.dims[last])) return false;
  Strided<2> outer{};
  outer.size = walk.size / walk.dims[other] / walk.dims[last];
  for (int d = 0; d < last; ++d) {
    if (d == other) continue;
    outer.dims[outer.rank] = walk.dims[d];
    for (int k = 0; k < 2; ++k) outer.strides[k][outer.rank] = walk.strides[k][d];
    outer.rank += 1;
  }
  Transpose p;
  p.rows = static_cast<unsigned>(walk.dims[other]);
  p.columns = static_cast<unsigned>(walk.dims[last]);
  p.row_tiles = (p.rows + kTile - 1) / kTile;
  p.column_tiles = (p.columns + kTile - 1) / kTile;
  p.input_step = walk.strides[1][last];
  p.output_step = walk.strides[0][other];
  const std::int64_t tiles = outer.size * p.row_tiles * p.column_tiles;
  if (!is_narrow(tiles)) return false;
  p.tiles = static_cast<unsigned>(tiles);
  launch("launch of transpose_kernel", transpose_kernel<Item>, p.tiles, dim3(kTile, kTileRows), 0,
         stream, 1, static_cast<const Item*>(input), static_cast<Item*>(output), p, Walk<2>(outer));
  return true;
}

template <typename Item>
void launch_copy(const void* input, void* output, const Strided<2>& walk, Stream stream) {
  with_index(walk.size, [&](auto index) {
    launch("launch of copy_kernel", copy_kernel<Item, decltype(index)>, blocks_for(walk.size),
           kBlockThreads, 0, stream, 1, static_cast<const Item*>(input), static_cast<Item*>(output),
           Walk<2>(walk));
  });
}

// Takes `ratio` elements side by side as one, where every run of them starts and ends at whole
// ones.
bool widen(const void* input, const void* output, Strided<2>& walk, int itemsize, int ratio) {
  const int last = walk.rank - 1;
  if (walk.rank == 0 || walk.strides[0][last] != 1 || walk.strides[1][last] != 1) return false;
  bool fits = walk.dims[last] % ratio == 0 && is_aligned(input, itemsize * ratio) &&
              is_aligned(output, itemsize * ratio);
  for (int d = 0; d < last; ++d) {
    fits = fits && walk.strides[0][d] % ratio == 0 && walk.strides[1][d] % ratio == 0;
  }
  if (!fits) return false;
  for (int d = 0; d < last; ++d) {
    for (int k = 0; k < 2; ++k) walk.strides[k][d] /= ratio;
  }
  walk.dims[last] /= ratio;
  walk.size /= ratio;
  return true;
}

}  // namespace

void copy_nd(const void* input, void* output, const CopyShape& shape, Stream stream) {
  std::int64_t strides[2][kMaxDims];
  for (int d = 0; d < kMaxDims; ++d) {
    strides[0][d] = shape.output_strides[d];
    strides[1][d] = shape.input_strides[d];
  }
  Strided<2> walk = collapse<2>(shape.dims, strides);
  if (walk.size == 0) return;
  input = static_cast<const char*>(input) + shape.input_offset * shape.itemsize;
  output = static_cast<char*>(output) + shape.output_offset * shape.itemsize;
  int itemsize = shape.itemsize;
  for (int wide = 16; wide > shape.itemsize; wide /= 2) {
    if (widen(input, output, walk, shape.itemsize, wide / shape.itemsize)) {
      itemsize = wide;
      break;
    }
  }
  switch (itemsize) {
    case 16:
      return launch_copy<uint4>(input, output, walk, stream);
    case 8:
      if (launch_transpose<std::uint64_t>(input, output, walk, stream)) return;
      return launch_copy<std::uint64_t>(input, output, walk, stream);
    case 4:
      if (launch_transpose<std::uint32_t>(input, output, walk, stream)) return;
      return launch_copy<std::uint32_t>(input, output, walk, stream);
    case 2:
      if (launch_transpose<std::uint16_t>(input, output, walk, stream)) return;
      return launch_copy<std::uint16_t>(input, output, walk, stream);
    default:
      if (launch_transpose<std::uint8_t>(input, output, walk, stream)) return;
      return launch_copy<std::uint8_t>(input, output, walk, stream);
  }
}

}  // namespace cnn_engine::cuda
