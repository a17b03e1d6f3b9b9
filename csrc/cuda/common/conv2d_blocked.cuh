// conv2d_blocked as a product that is never written out: y[k, q] = sum over kernel offsets t of
// w[t, k] * x[t, q], where q counts the outputs of one group of all images, and x[t, q] is read
// from the image where kernel offset t of output q lies (zero outside). See blocked.cuh for the
// tiles.
#pragma once

#include "cuda/common/blocked.cuh"
#include "ops/conv2d.h"

namespace cnn_engine::cuda {

// Any convolution: a thread copies some kernel offsets of some columns, each tested against the
// image's bounds. Where the kernel offsets of a part lie is worked out by the block's first
// threads, a part ahead.
template <typename Tile>
class ImageWindows {
 public:
  struct alignas(16) KernelOffset {
    int offset, row, column;  // from the window's first place
  };
  // Shared memory: the kernel offsets of some parts, and what only the threads that place them
  // need.
  struct KernelOffsets {
    KernelOffset parts[kBlockStages][kBlockDepth];
    int c[kBlockDepth], r[kBlockDepth], s[kBlockDepth];  // of the part that is placed next
    int step_c, step_r, step_s;
  };

  __device__ ImageWindows(KernelOffsets& kernel_offsets, const float* input, const Conv2dShape& p,
                          int group, unsigned first_column, unsigned columns,
                          int first_kernel_offset)
      : kernel_offsets_(kernel_offsets), input_(input), p_(p) {
    const unsigned out_w = p.out_w(), area = p.out_h() * out_w;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const unsigned q = first_column + threadIdx.x % Tile::N + i * Tile::threads;
      const unsigned n = q / area, output = q - n * area;
      const unsigned y = output / out_w, x = output - y * out_w;
      top_[i] = q < columns ? static_cast<int>(y) * p.stride_h - p.pad_top : -(1 << 30);
      left_[i] = static_cast<int>(x) * p.stride_w - p.pad_left;
      const std::int64_t plane = static_cast<std::int64_t>(n) * p.c + group * p.group_channels();
      window_[i] = input + (plane * p.h + top_[i]) * p.w + left_[i];
    }
    if (threadIdx.x < kBlockDepth) {
      const int kernel_offset = first_kernel_offset + threadIdx.x;
      kernel_offsets.s[threadIdx.x] = kernel_offset % p.s;
      kernel_offsets.r[threadIdx.x] = kernel_offset / p.s % p.r;
      kernel_offsets.c[threadIdx.x] = kernel_offset / p.s / p.r;
      if (threadIdx.x == 0) {
        kernel_offsets.step_s = kBlockDepth % p.s;
        kernel_offsets.step_r = kBlockDepth / p.s % p.r;
        kernel_offsets.step_c = kBlockDepth / p.s / p.r;
      }
      __syncwarp((1u << kBlockDepth) - 1);
    }
    for (int part = 0; part < kBlockStages; ++part) position(part);
    __syncthreads();
  }

  __device__ void load(float* to, int first, int end) {
    const KernelOffset* kernel_offsets = kernel_offsets_.parts[part_ % kBlockStages];
    const int own = threadIdx.x % Tile::N;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
#pragma unroll
      for (int j = 0; j < kKernelOffsets; ++j) {
        const int t = threadIdx.x / Tile::N + j * (kBlockDepth / kKernelOffsets);
        const KernelOffset kernel_offset = kernel_offsets[t];
        const unsigned y = top_[i] + kernel_offset.row, x = left_[i] + kernel_offset.column;
        const bool valid =
            y < static_cast<unsigned>(p_.h) && x < static_cast<unsigned>(p_.w) && first + t < end;
        copy_async<4>(to + t * Tile::N + own + i * Tile::threads,
                      valid ? window_[i] + kernel_offset.offset : input_, valid);
      }
    }
    // The first parts' kernel offsets are there; the slot written now was read before the block
    // last met.
    if (part_ >= kBlockStages - 1) position(part_ + 1);
    ++part_;
  }

 private:
  static_assert(Tile::threads % Tile::N == 0 || Tile::N % Tile::threads == 0);
  static constexpr int kColumns = Tile::N > Tile::threads ? Tile::N / Tile::threads : 1;
  static constexpr int kKernelOffsets =  // of a column
      Tile::N > Tile::threads ? kBlockDepth : kBlockDepth / (Tile::threads / Tile::N);

  __device__ void position(int part) {
    if (threadIdx.x >= kBlockDepth) return;
    int c = kernel_offsets_.c[threadIdx.x], r = kernel_offsets_.r[threadIdx.x],
        s = kernel_offsets_.s[threadIdx.x];
    const int row = r * p_.dilation_h, column = s * p_.dilation_w;
    kernel_offsets_.parts[part % kBlockStages][threadIdx.x] = {(c * p_.h + row) * p_.w + column,
                                                               row, column};
    s += kernel_offsets_.step_s, r += kernel_offsets_.step_r, c += kernel_offsets_.step_c;
    if (s >= p_.s) s -= p_.s, ++r;
    if (r >= p_.r) r -= p_.r, ++c;
    kernel_offsets_.c[threadIdx.x] = c, kernel_offsets_.r[threadIdx.x] = r,
    kernel_offsets_.s[threadIdx.x] = s;
  }

  KernelOffsets& kernel_offsets_;
  const float* input_;
  const Conv2dShape& p_;
  const float* window_[kColumns];
  int top_[kColumns], left_[kColumns];
  int part_ = 0;
};

// 1x1, stride 1, no padding, maps of a multiple of 4 positions: 16 bytes at a time.
template <typename Tile>
class ImagePositions {
 public:
  __device__ ImagePositions(const float* input, const Conv2dShape& p, int group,
                            unsigned first_column, unsigned columns)
      : input_(input), area_(p.h * p.w) {
    const unsigned q = first_column + threadIdx.x % kVectors * 4;
    const unsigned n = q / area_;
    inside_ = q < columns;
    const std::int64_t plane = static_cast<std::int64_t>(n) * p.c + group * p.group_channels();
    position_ = input + plane * area_ + (q - n * area_);
  }

  __device__ void load(float* to, int first, int end) const {
#pragma unroll
    for (int i = threadIdx.x; i < kBlockDepth * kVectors; i += Tile::threads) {
      const int t = i / kVectors;
      const bool valid = inside_ && first + t < end;
      const float* from = position_ + static_cast<std::int64_t>(first + t) * area_;
      copy_async<16>(to + i * 4, valid ? from : input_, valid);
    }
  }

 private:
  static constexpr int kVectors = Tile::N / 4;
  static_assert(Tile::threads % kVectors == 0);
  const float* input_;
  const float* position_;
  unsigned area_;
  bool inside_;
};

// A tile's sums, finished into y or, where the depth is split, as they are into the workspace.
struct ConvOutput {
  float* to;
  Epilogue epilogue;
  bool last;                   // not split
  bool aligned;                // four columns are 16 bytes at a multiple of 16, of one image
  int filters, first_k, rows;  // of all; of the tile: its first in y, and how many exist
  unsigned area, first_column, columns;

  __device__ void write(int m, int column, float4 accumulators) const {
    if (m >= rows) return;
    const int k = first_k + m;
    const unsigned q = first_column + column;
    const float value[4] = {accumulators.x, accumulators.y, accumulators.z, accumulators.w};
    if (aligned) {
      if (q >= columns) return;
      const unsigned n = q / area;
      const std::int64_t at = (static_cast<std::int64_t>(n) * filters + k) * area + (q - n * area);
      if (last) {
        accumulators = make_float4(epilogue(value[0], k, at), epilogue(value[1], k, at + 1),
                                   epilogue(value[2], k, at + 2), epilogue(value[3], k, at + 3));
      }
      *reinterpret_cast<float4*>(to + at) = accumulators;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (q + i >= columns) return;
      const unsigned n = (q + i) / area;
      const std::int64_t at =
          (static_cast<std::int64_t>(n) * filters + k) * area + (q + i - n * area);
      to[at] = last ? epilogue(value[i], k, at) : value[i];
    }
  }
};

struct ConvGrid {
  int splits;        // of the depth
  int row_tiles;     // of a group's filters
  unsigned columns;  // outputs of one map of all images
  bool aligned;
  std::int64_t part_size;  // floats of a split's sums
};

// Blocks: row tiles, then splits, then groups, then column tiles, so that neighbours read the same
// part of the image. `Positions`: by ImagePositions, else by ImageWindows.
template <typename Tile, bool Positions>
__global__ void __launch_bounds__(Tile::threads, 384 / Tile::threads + (Tile::threads == 256))
    conv2d_blocked_kernel(const float* __restrict__ input,   // [N, C, H, W]
                          const float* __restrict__ packed,  // [groups][panels][depth][rows]
                          float* __restrict__ output,        // [N, K, OH, OW], or so many a split
                          const Epilogue epilogue, const __grid_constant__ Conv2dShape p,
                          const ConvGrid grid) {
  __shared__ __align__(16) float shared[kBlockStages * Tile::stage];
  unsigned block = blockIdx.x;
  const int row_tile = block % grid.row_tiles;
  block /= grid.row_tiles;
  const int split = block % grid.splits;
  block /= grid.splits;
  const int group = block % p.groups;
  const unsigned first_column = block / p.groups * Tile::N;

  const Panels panels = p.panels();
  const int first = split_begin(panels.depth, grid.splits, split);
  const int end = split_begin(panels.depth, grid.splits, split + 1);
  const int first_row = row_tile * Tile::M;
  constexpr int kRows = PackedRows<Tile>::kRows;
  const PackedRows<Tile> a(packed + group * panels.size() + first_row / kRows * panels.panel_size(),
                           panels.panels - first_row / kRows, panels.depth);
  ConvOutput out;
  out.to = output + split * grid.part_size;
  out.epilogue = epilogue;
  out.last = grid.splits == 1;
  out.aligned = grid.aligned;
  out.filters = p.k;
  out.first_k = group * p.group_filters() + first_row;
  out.rows = p.group_filters() - first_row;
  out.area = p.out_h() * p.out_w();
  out.first_column = first_column;
  out.columns = grid.columns;
  if constexpr (Positions) {
    const ImagePositions<Tile> b(input, p, group, first_column, grid.columns);
    blocked_gemm<Tile>(shared, a, b, first, end, out);
  } else {
    __shared__ typename ImageWindows<Tile>::KernelOffsets kernel_offsets;
    ImageWindows<Tile> b(kernel_offsets, input, p, group, first_column, grid.columns, first);
    blocked_gemm<Tile>(shared, a, b, first, end, out);
  }
}

// How a shape's product is cut for a GPU.
struct ConvPlan {
  enum Size { filters4, filters8, filters32, filters64, small, large } size;
  int rows, columns;  // of a tile
  std::int64_t row_tiles, column_tiles;
  int splits;

  ConvPlan(const Conv2dShape& p, const Target& target) {
    const std::int64_t all = std::int64_t{p.n} * p.out_h() * p.out_w();
    const int filters = p.group_filters();
    const auto tiles = [&](int m, int n) {
      return std::int64_t{(filters + m - 1) / m} * ((all + n - 1) / n) * p.groups;
    };
    const int enough = target.multiprocessors;  // blocks that keep it busy
    if (filters <= 4) {
      size = filters4, rows = 4, columns = 256;
    } else if (filters <= 8) {
      size = filters8, rows = 8, columns = 256;
    } else if (filters <= 32) {
      size = filters32, rows = 32, columns = 128;
    } else if (filters > 64 && tiles(128, 128) >= enough) {
      size = large, rows = 128, columns = 128;
    } else if (tiles(64, 128) >= enough) {
      size = filters64, rows = 64, columns = 128;
    } else {
      size = small, rows = 64, columns = 64;
    }
    row_tiles = (filters + rows - 1) / rows;
    column_tiles = (all + columns - 1) / columns;
    splits = depth_splits(tiles(rows, columns), p.filter_size(), target);
  }
  std::int64_t workspace_floats(const Conv2dShape& p) const {
    return splits == 1 ? 0 : splits * p.output_size();
  }
};

inline void launch_conv2d_blocked(const float* input, const float* packed, const Epilogue& epilogue,
                                  float* output, float* workspace, const Conv2dShape& shape,
                                  Stream stream) {
  const ConvPlan plan(shape, target_here());
  const unsigned area = shape.out_h() * shape.out_w();
  const bool split = plan.splits > 1;
  ConvGrid grid;
  grid.splits = plan.splits;
  grid.row_tiles = static_cast<int>(plan.row_tiles);
  grid.columns = shape.n * area;
  grid.aligned = area % 4 == 0 && at_16_bytes(split ? workspace : output);
  grid.part_size = shape.output_size();
  const bool positions = shape.r == 1 && shape.s == 1 && shape.stride_h == 1 &&
                         shape.stride_w == 1 && shape.pad_top == 0 && shape.pad_left == 0 &&
                         shape.pad_bottom == 0 && shape.pad_right == 0 && area % 4 == 0 &&
                         at_16_bytes(input);
  const std::int64_t blocks = plan.row_tiles * plan.column_tiles * shape.groups * plan.splits;
  const auto launch = [&](auto tile) {
    using Tile = decltype(tile);
    const auto kernel =
        positions ? conv2d_blocked_kernel<Tile, true> : conv2d_blocked_kernel<Tile, false>;
    kernel<<<static_cast<unsigned>(blocks), Tile::threads, 0, stream>>>(
        input, packed, split ? workspace : output, epilogue, shape, grid);
    CUDA_CHECK_LAUNCH("conv2d_blocked_kernel");
  };
  switch (plan.size) {
    case ConvPlan::filters4:
      launch(BlockTile<4, 256, 4, 4>());
      break;
    case ConvPlan::filters8:
      launch(BlockTile<8, 256, 8, 4>());
      break;
    case ConvPlan::filters32:
      launch(BlockTile<32, 128, 8, 4>());
      break;
    case ConvPlan::filters64:
      launch(BlockTile<64, 128, 8, 8>());
      break;
    case ConvPlan::small:
      launch(BlockTile<64, 64, 8, 4>());
      break;
    case ConvPlan::large:
      launch(BlockTile<128, 128, 8, 8>());
      break;
  }
  if (split) {
    launch_blocked_sum(workspace, output, epilogue, plan.splits, grid.part_size, area, shape.k,
                       stream);
  }
}

}  // namespace cnn_engine::cuda
