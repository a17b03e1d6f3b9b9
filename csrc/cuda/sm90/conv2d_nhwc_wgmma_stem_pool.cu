// stem_pool: the first layer's products of conv2d_nhwc_wgmma_planar.cu, whose results a block pools
// before it stores them.
//
// D [64 filters, positions of the convolution]: of a tile's 32 columns a warpgroup has eight, of
// all rows that its rows of y reach: five for two, seven for three. Rows are pooled where products
// are held, then bias, clamp and rounding follow, which change no order; columns by way of shared
// memory, which they leave with channels side by side. A warp reads a row of the image. Weights are
// copied once for all tiles of a block, two rows of the filters after two, each with a barrier.
//
// An infinity or NaN times the weights of 0 would be NaN in windows that it is not in: of a tile
// that reads one, sums are added up again, one product after another.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/rounded.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_epilogue.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_planar.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_split.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "ops/conv2d_nhwc_wgmma.h"
#include "ops/stem_pool.h"

namespace cnn_engine::cuda {

#define CNN_ENGINE_N20 CNN_ENGINE_N16 ", %16, %17, %18, %19"
CNN_ENGINE_WGMMA(__half, 40, "k16.f32.f16.f16", ", 0, 0", CNN_ENGINE_N20, 20, 21, CNN_ENGINE_D16(0),
                 CNN_ENGINE_D4(16))
CNN_ENGINE_WGMMA(__nv_bfloat16, 40, "k16.f32.bf16.bf16", ", 0, 0", CNN_ENGINE_N20, 20, 21,
                 CNN_ENGINE_D16(0), CNN_ENGINE_D4(16))

namespace wgmma {
namespace stem {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 2;                 // of a multiprocessor
constexpr int kStride = 2;                 // columns from a window of the convolution to the next
constexpr int kWindow = 3, kPoolStep = 2;  // of the pool, either way
constexpr int kPositions = 32;    // columns of the convolution, pieces of a row of the image
constexpr int kMostColumns = 14;  // of y, whose windows are within these pieces
constexpr int kLineBytes = kPositions * 16;
constexpr int kMadePitch = 64 * 2 + 16;   // bytes of a position of what was made
constexpr int kSharedBytes = 200 * 1024;  // at most

__host__ __device__ constexpr int rows_of(int pooled_rows) {
  return kPoolStep * (pooled_rows - 1) + kWindow;
}

struct Stem {
  const float* x;
  const char* packed;
  const float* bias;
  void* y;
  Conv2dShape shape;
  int y_pitch, rows, columns;           // rows and columns of what is pooled
  int out_h, out_w, pad_top, pad_left;  // of the pool
  int tile_columns;                     // of y
  int rows_in;                          // of the image, that a block reads
  int made_at, barriers_at;             // in shared memory
  unsigned tiles;                       // of 64 filters
  Divisor by_row, by_column;            // tiles of a row; of a column
  bool in_pieces;
  float low, high;
  Overflow overflow;
};

[[maybe_unused]] __device__ uint4 maximum(const uint4& a, const uint4& b, __half) {
  uint4 result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reinterpret_cast<__half2*>(&result)[i] = __hmax2_nan(reinterpret_cast<const __half2*>(&a)[i],
                                                         reinterpret_cast<const __half2*>(&b)[i]);
  }
  return result;
}
[[maybe_unused]] __device__ uint4 maximum(const uint4& a, const uint4& b, __nv_bfloat16) {
  uint4 result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reinterpret_cast<__nv_bfloat162*>(&result)[i] =
        __hmax2_nan(reinterpret_cast<const __nv_bfloat162*>(&a)[i],
                    reinterpret_cast<const __nv_bfloat162*>(&b)[i]);
  }
  return result;
}

// Sums as a warpgroup's thread has them of its eight columns, but of products of the shape's own
// windows alone. `pieces`: of the tile's first row and the warpgroup's first column.
template <typename T, int n>
__device__ inline void sum_plainly(const Conv2dShape& shape, const char* weights,
                                   const char* pieces, float (&accumulators)[n]) {
  const int thread = threadIdx.x % 128, lane = thread % 32, first = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (float& sum : accumulators) sum = 0.0f;
#pragma unroll 1
  for (int kernel_offset = 0; kernel_offset < shape.r * shape.s * shape.c; ++kernel_offset) {
    const int c = kernel_offset % shape.c, s = kernel_offset / shape.c % shape.s,
              r = kernel_offset / shape.c / shape.s;
    const int in_piece = s % kStride * kPlanes + c;
    float weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + 8 * i, piece = r % 2 * (kFilterRowBytes / 16) + s / kStride;
      const char* const from =
          weights + r / 2 * kUnitBytes + row * kRowBytes + swizzled(row, piece) * 16;
      weight[i] = widened(reinterpret_cast<const T*>(from)[in_piece]);
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int row = i / 4, column = lane % 4 * 2 + i % 2;
      const char* const from =
          pieces + (row * shape.stride_h + r) * kLineBytes + (column + s / kStride) * 16;
      accumulators[i] = fmaf(widened(reinterpret_cast<const T*>(from)[in_piece]), weight[i / 2 % 2],
                             accumulators[i]);
    }
  }
}

// Of windows of at most FilterColumns columns.
template <typename T, int FilterColumns, int PooledRows>
__global__ void __launch_bounds__(kThreads, kBlocks)
    stem_pool_kernel(const __grid_constant__ Stem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kRows = rows_of(PooledRows), kWidth = 8, kWarps = kThreads / 32;
  constexpr int kInstructions = FilterColumns * kPlanes * 2 / kInstructionBytes;
  extern __shared__ __align__(1024) char memory[];
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32), lane = thread % 32;
  const int group = warp / 4;
  const int units = weight_units(p.shape.r), weight_bytes = units * kUnitBytes;
  char* const image = memory + weight_bytes;
  const std::uint32_t weights = shared_address(memory), barriers = weights + p.barriers_at;
  const std::uint32_t made = weights + p.made_at;

  let_successors_start();
  if (warp == kWarps - 1 && leads_warp()) {
    const char* const from = p.packed + std::int64_t{1} * blockIdx.y * weight_bytes;
#pragma unroll 1
    for (int i = 0; i < units; ++i) init_mbarrier(barriers + i * 8, 1);
    fence_async_proxy();
#pragma unroll 1
    for (int i = 0; i < units; ++i) {
      expect_tx(barriers + i * 8, kUnitBytes);
      copy_bulk(weights + i * kUnitBytes, from + i * kUnitBytes, kUnitBytes, barriers + i * 8);
    }
  }
  const int first_filter = static_cast<int>(blockIdx.y) * 64;
  float bias[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int filter = first_filter + warp % 4 * 16 + lane / 4 + 8 * i;
    bias[i] = p.bias && filter < p.shape.k ? p.bias[filter] : 0.0f;
  }
  wait_for_inputs();

#pragma unroll 1
  for (unsigned tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int line = p.by_row.quotient(tile);
    const int first_column = static_cast<int>(tile - line * p.by_row.value) * p.tile_columns;
    const int n = p.by_column.quotient(line);
    const int first_row = (line - n * p.by_column.value) * PooledRows;
    // What is pooled first, which may be outside, as what the first window reads of the image.
    const int row_from = kPoolStep * first_row - p.pad_top;
    const int column_from = kPoolStep * first_column - p.pad_left;
    const int top = row_from * p.shape.stride_h - p.shape.pad_top;
    const int w = column_from * kStride - p.shape.pad_left + lane * kStride;
    const int plane = p.shape.h * p.shape.w;
    const int from_image = n * p.shape.c * plane + w;
    const bool inside[kStride] = {w >= 0 && w < p.shape.w, w + 1 >= 0 && w + 1 < p.shape.w};
    float probe = 0.0f;  // NaN once an infinity or NaN was read

#pragma unroll 1
    for (int row = warp; row < p.rows_in; row += kWarps) {
      const int h = top + row;
      float values[kStride * kPlanes] = {};
      if (h >= 0 && h < p.shape.h) {
        const int from = from_image + h * p.shape.w;
#pragma unroll
        for (int c = 0; c < kPlanes; ++c) {
#pragma unroll
          for (int i = 0; i < kStride; ++i) {
            if (inside[i] && c < p.shape.c) values[i * kPlanes + c] = p.x[from + c * plane + i];
          }
        }
      }
#pragma unroll
      for (const float value : values) probe = fmaf(value, 0.0f, probe);
      store_rounded(reinterpret_cast<T*>(image + row * kLineBytes + lane * 16), values,
                    largest(values), p.overflow);
    }
    fence_async_proxy();
    const bool plain = __syncthreads_or(probe != 0.0f);

    float accumulators[kRows * 4] = {};
    const std::uint32_t pieces = weights + weight_bytes + group * 8 * 16;
    // A position's next two columns are the next piece; the next eight positions are of the next
    // row.
    const std::uint64_t next_row = std::uint64_t(p.shape.stride_h * kLineBytes >> 4) << 32;
#pragma unroll 1
    for (int r = 0; r < p.shape.r; ++r) {
      if (r % 2 == 0) wait_mbarrier(barriers + r / 2 * 8, 0);
      const std::uint64_t a = matrix_descriptor(weights + filter_row_at(r));
      const std::uint64_t b = next_row | std::uint64_t{1} << 16 | (pieces + r * kLineBytes) >> 4;
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kInstructions; ++i) {
        Wgmma<T, kRows * 8>::multiply(accumulators, a + i * (kInstructionBytes >> 4),
                                      b + i * (kInstructionBytes / 16));
      }
      wgmma_commit();
      wgmma_wait<1>();
    }
    wgmma_wait<0>();
    take(accumulators);
    if (plain) sum_plainly<T>(p.shape, memory, image + group * 8 * 16, accumulators);

    if (row_from < 0 || row_from + kRows > p.rows) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row_from + row >= 0 && row_from + row < p.rows) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) accumulators[row * 4 + i] = -INFINITY;
      }
    }
    // Of the columns of what is pooled, those inside the image.
    const int lowest = max(0, -column_from), highest = p.columns - 1 - column_from;
    float value[PooledRows][4], most = 0.0f;
#pragma unroll
    for (int row = 0; row < PooledRows; ++row) {
      alignas(8) T rounded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const from = accumulators + row * kPoolStep * 4 + i;
        const float sum = max_nan(max_nan(from[0], from[4]), from[8]) + bias[i / 2];
        value[row][i] = clamp(sum, p.low, p.high);
        rounded[i] = narrowed<T>(value[row][i]);
      }
      most = fmaxf(most, largest(value[row]));
      store_two_tiles(made + (row * kPositions + group * 8 + row_of_tiles(lane)) * kMadePitch +
                          (warp % 4 * 16 + piece_of_tiles(lane) * 8) * 2,
                      reinterpret_cast<const std::uint32_t*>(rounded)[0],
                      reinterpret_cast<const std::uint32_t*>(rounded)[1]);
    }
    if (std::is_same_v<T, __half> && __builtin_expect(most >= 65520.0f, false)) {
      bool past = false;
#pragma unroll
      for (int i = 0; i < PooledRows * 4; ++i) {
        const int column = group * 8 + lane % 4 * 2 + i % 2;
        const int filter = first_filter + warp % 4 * 16 + lane / 4 + i / 2 % 2 * 8;
        past |= column >= lowest && column <= min(highest, kPoolStep * p.tile_columns) &&
                first_row + i / 4 < p.out_h && filter < p.shape.k &&
                is_past_float16(value[i / 4][i % 4]);
      }
      if (past) tell(p.overflow);
    }
    __syncthreads();

    const int piece = thread % 8, filter = first_filter + piece * kWidth;
    const int left = p.shape.k - filter;
#pragma unroll
    for (int i = 0; i < (PooledRows * 16 * 8 + kThreads - 1) / kThreads; ++i) {
      const int row = thread / 128 + i * (kThreads / 128), column = thread / 8 % 16;
      const int y_row = first_row + row, y_column = first_column + column;
      if (row >= PooledRows || column >= p.tile_columns || y_row >= p.out_h ||
          y_column >= p.out_w || left <= 0) {
        continue;
      }
      // A position outside is as the nearest inside, which is in the window, too.
      uint4 read[kWindow];
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const int at = min(max(column * kPoolStep + j, lowest), highest);
        read[j] = *reinterpret_cast<const uint4*>(
            memory + p.made_at + (row * kPositions + at) * kMadePitch + piece * 16);
      }
      const uint4 best = maximum(maximum(read[0], read[1], T()), read[2], T());
      T* const to =
          static_cast<T*>(p.y) + ((n * p.out_h + y_row) * p.out_w + y_column) * p.y_pitch + filter;
      if (p.in_pieces && left >= kWidth) {
        *reinterpret_cast<uint4*>(to) = best;
      } else {
#pragma unroll
        for (int c = 0; c < kWidth; ++c) {
          if (c < left) to[c] = reinterpret_cast<const T*>(&best)[c];
        }
      }
    }
  }
#endif
}

template <int PooledRows>
int shared_bytes(Stem& p) {
  const Conv2dShape& shape = p.shape;
  const int units = weight_units(shape.r);
  p.rows_in = shape.r + (rows_of(PooledRows) - 1) * shape.stride_h;
  p.made_at = units * kUnitBytes + p.rows_in * kLineBytes + beyond(16);
  p.barriers_at = p.made_at + PooledRows * kPositions * kMadePitch;
  return p.barriers_at + units * 8;
}

template <typename T, int FilterColumns, int PooledRows>
void launch_rows(Stem p, unsigned blocks, Stream stream) {
  const auto kernel = stem_pool_kernel<T, FilterColumns, PooledRows>;
  const int bytes = shared_bytes<PooledRows>(p);
  make_ready(kernel, bytes);
  const dim3 grid(blocks, (p.shape.k + 63) / 64);
  launch("stem_pool_kernel", kernel, grid, dim3(kThreads), bytes, stream, 1, p);
}

// Parts the result into tiles.
void part(Stem& p, int pooled_rows) {
  const int tiles = (p.out_w + kMostColumns - 1) / kMostColumns;
  p.tile_columns = (p.out_w + tiles - 1) / tiles;
  const int tiles_a_row = (p.out_w + p.tile_columns - 1) / p.tile_columns;
  const int tiles_a_column = (p.out_h + pooled_rows - 1) / pooled_rows;
  p.tiles = static_cast<unsigned>(p.shape.n * tiles_a_column * tiles_a_row);
  p.by_row = Divisor(tiles_a_row);
  p.by_column = Divisor(tiles_a_column);
}

// Fewer rows a tile where all tiles run at once so: of more, fewer are made twice. Blocks are
// persistent, and take one tile after another, where each has some.
template <typename T, int FilterColumns>
void launch_columns(Stem p, int multiprocessors, Stream stream) {
  constexpr int kFew = 2, kMany = 3, kSome = 4;
  const unsigned at_once = kBlocks * multiprocessors;
  part(p, kFew);
  if (p.tiles <= at_once) return launch_rows<T, FilterColumns, kFew>(p, p.tiles, stream);
  part(p, kMany);
  const unsigned blocks = p.tiles > kSome * at_once ? at_once : p.tiles;
  launch_rows<T, FilterColumns, kMany>(p, blocks, stream);
}

// What shapes are expected to be and are not, or null.
const char* why_not(const Conv2dShape& shape, const MaxPool2dShape& pool) {
  if (shape.groups != 1 || shape.c > kPlanes) return "one group of at most 4 channels";
  if (shape.s > kColumnsOfFilter || shape.stride_w != kStride || shape.dilation_h != 1 ||
      shape.dilation_w != 1) {
    return "at most 8 columns, 2 columns apart, without dilation";
  }
  if (pool.n != shape.n || pool.c != shape.k || pool.h != shape.out_h() ||
      pool.w != shape.out_w()) {
    return "a pool over what the convolution makes";
  }
  if (pool.r != kWindow || pool.s != kWindow || pool.stride_h != kPoolStep ||
      pool.stride_w != kPoolStep || pool.dilation_h != 1 || pool.dilation_w != 1 ||
      pool.pad_top > 1 || pool.pad_left > 1) {
    return "a pool of 3x3, two places apart, with at most one place around";
  }
  Stem p = {};
  p.shape = shape;
  if (shared_bytes<3>(p) > kSharedBytes) return "rows that fit into shared memory";
  return nullptr;
}

}  // namespace
}  // namespace stem
}  // namespace wgmma

std::int64_t stem_pool_takes(const Conv2dShape& shape, const MaxPool2dShape& pool,
                             ElementType compute_type, const Target&) {
  return wgmma::has_16_bits(compute_type) && wgmma::stem::why_not(shape, pool) == nullptr;
}

void stem_pool(const float* input, const void* packed, const Images& output,
               const Conv2dShape& shape, const MaxPool2dShape& pool, ElementType compute_type,
               const Epilogue& epilogue, Stream stream) {
  const auto refuse = [](const char* expected) {
    throw std::invalid_argument(std::string("stem_pool: expected ") + expected);
  };
  if (const char* expected = wgmma::stem::why_not(shape, pool)) refuse(expected);
  if (!wgmma::has_16_bits(compute_type)) refuse("float16 or bfloat16");
  if (output.storage != compute_type || epilogue.residual.data) {
    refuse("y as what is multiplied, and no residual");
  }
  if (!is_aligned(packed, 16)) refuse("packed weights at a multiple of 16");
  const Activation clamp = clamps_of(epilogue.activation);
  if (known_activation_of(clamp) != KnownActivation::clamps) refuse("relu, clip or no function");
  if (shape.n == 0) return;
  const int multiprocessors = target_here().multiprocessors;
  const std::int64_t positions = std::int64_t{pool.out_h()} * pool.out_w();
  const std::int64_t image = std::int64_t{shape.c} * shape.h * shape.w;
  for_each_part_of_batch(
      shape.n, std::max(image, positions * output.pitch), [&](std::int64_t first, int images) {
        wgmma::stem::Stem p = {};
        p.x = input + first * image;
        p.packed = static_cast<const char*>(packed);
        p.bias = epilogue.bias;
        p.y = element(output.data, output.storage, first * positions * output.pitch);
        p.shape = shape;
        p.shape.n = images;
        p.y_pitch = output.pitch;
        p.rows = shape.out_h();
        p.columns = shape.out_w();
        p.out_h = pool.out_h();
        p.out_w = pool.out_w();
        p.pad_top = pool.pad_top;
        p.pad_left = pool.pad_left;
        p.in_pieces = is_aligned(p.y, 16) && output.pitch % 8 == 0;
        p.low = clamp.alpha;
        p.high = clamp.beta;
        p.overflow = epilogue.overflow;
        wgmma::with_type(compute_type, [&](auto* type) {
          using T = std::remove_pointer_t<decltype(type)>;
          if constexpr (sizeof(T) == 2) {
            constexpr int kFew = wgmma::kColumnsOfFilter / 2;
            if (shape.s <= kFew)
              return wgmma::stem::launch_columns<T, kFew>(p, multiprocessors, stream);
            wgmma::stem::launch_columns<T, 2 * kFew>(p, multiprocessors, stream);
          }
        });
      });
}

}  // namespace cnn_engine::cuda
