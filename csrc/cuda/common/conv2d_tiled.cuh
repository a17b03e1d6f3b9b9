// conv2d, variant `tiled`: sums in registers over tiles of the input in shared memory; relu and 2x2
// pooling of the result in registers when asked (ops/conv2d_step.h).
//
// Layouts: x [N,C,H,W], w [K,C,R,S], b [K] or null, y [N,K,OH,OW] (or pooled), float32. Outputs <
// 2^31.
//
// A thread makes a unit, 2 rows x 4 columns of outputs, of 4 filters: 32 sums. A block is `units`
// of a tile (whole maps of several images where they are small, so that few of a warp's lanes idle)
// by `groups` of 4 filters. A few channels at a time come to shared memory: the input with its
// border of zeros (the only position where bounds are tested) and the weights with their filters
// innermost, which stay there for several tiles where all channels fit. For each kernel row a
// thread then loads one input row's window as two vectors and, for each kernel offset, 4 filters as
// one vector that its whole warp shares: 160 multiply-adds for 7 loads with a 5x5 kernel, where the
// layered kernels need 2 loads for 1. Kernels of 1x1, 3x3, 5x5 and 7x7 with stride and dilation 1
// are compiled in; others load each value. One group only: a group's few filters would leave most
// of a block idle (conv2d_blocked.cuh is for groups). fits_conv2d_tiled says whether a tile fits
// into shared memory; one that does not is refused.
#pragma once

#include "cuda/common/conv2d_direct.cuh"
#include "ops/conv2d_step.h"
#include "ops/conv2d_tiles.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {

// Writes the sums of a unit: outputs (y, x) and on, of image n and filters first_k and on.
__device__ inline void store_tiled_unit(
    const float (&sum)[kTiledRows][kTiledColumns][kTiledFilters], const float* bias, float* output,
    const Conv2dShape& p, int n, int y, int x, int first_k, bool relu, bool pool) {
  if (n >= p.n) return;
  const int out_h = p.out_h(), out_w = p.out_w();
  const int rows = pool ? out_h / 2 : out_h, columns = pool ? out_w / 2 : out_w;
#pragma unroll
  for (int f = 0; f < kTiledFilters; ++f) {
    const int k = first_k + f;
    if (k >= p.k) break;
    const float b = bias ? bias[k] : 0.0f;
    float* map = output + (std::int64_t{n} * p.k + k) * rows * columns;
    float value[kTiledRows][kTiledColumns];
#pragma unroll
    for (int i = 0; i < kTiledRows; ++i) {
#pragma unroll
      for (int j = 0; j < kTiledColumns; ++j) {
        value[i][j] = sum[i][j][f] + b;
        if (relu && value[i][j] < 0.0f) value[i][j] = 0.0f;  // NaN stays NaN
      }
    }
    if (pool) {
      const auto larger = [](float a, float c) {
        return a > c || isnan(a) ? a : c;
      };
#pragma unroll
      for (int j = 0; j < kTiledColumns; j += 2) {
        const int y_out = y / 2, x_out = (x + j) / 2;
        if (y_out < rows && x_out < columns) {
          map[y_out * columns + x_out] =
              larger(larger(value[0][j], value[0][j + 1]), larger(value[1][j], value[1][j + 1]));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTiledRows; ++i) {
#pragma unroll
        for (int j = 0; j < kTiledColumns; ++j) {
          const int y_out = y + i, x_out = x + j;
          if (y_out < rows && x_out < columns) map[y_out * columns + x_out] = value[i][j];
        }
      }
    }
  }
}

// Side: of the square kernel, with stride 1; 0: any kernel and stride.
template <int Side>
__global__ void __launch_bounds__(32 * kTiledMostWarps, 2)
    conv2d_tiled_kernel(const float* __restrict__ input,   // [N, C, H, W]
                        const float* __restrict__ weight,  // [K, C, R, S]
                        const float* __restrict__ bias,    // [K] or null
                        float* __restrict__ output,        // [N, K, OH, OW] or pooled
                        const Conv2dShape p, const Conv2dTiles tiles, bool relu, bool pool) {
  extern __shared__ __align__(16) float tiled_shared[];
  float* const x = tiled_shared;                       // [images][channels][in_rows][in_pitch]
  float* const w = tiled_shared + tiles.input_size();  // [channels][R][S][filters]
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int plane = tiles.plane(), filters = tiles.filters(), kernel_offsets = p.r * p.s;
  const int a_map = tiles.across * tiles.down;
  const bool idle = threadIdx.x >= a_map * tiles.images;  // it makes the first unit once more
  const int unit = idle ? 0 : threadIdx.x;
  const int image = unit / a_map;                                            // in the tile
  const int row = (unit - image * a_map) / tiles.across * kTiledRows;        // in the tile
  const int column = (unit - image * a_map) % tiles.across * kTiledColumns;  // in the tile
  const int first_filter = blockIdx.y * filters;
  const TileWalk start = {thread / plane, thread % plane / tiles.in_pitch, thread % tiles.in_pitch};

  const auto load_weights = [&](int c, int channels) {
    const int of_filter =
        channels * kernel_offsets;  // neighbouring threads read neighbouring kernel offsets
    for (int i = thread; i < of_filter * filters; i += threads) {
      const int filter = i / of_filter, at = i - filter * of_filter, k = first_filter + filter;
      w[at * filters + filter] =
          k < p.k ? weight[(std::int64_t{k} * p.c + c) * kernel_offsets + at] : 0.0f;
    }
  };
  const bool weights_resident = tiles.channels == p.c;
  if (weights_resident) load_weights(0, p.c);

  const int first_tile = blockIdx.x * tiles.tiles_a_block;
  const int epilogue_tile = min(first_tile + tiles.tiles_a_block, tiles.tiles);
  for (int tile = first_tile; tile < epilogue_tile; ++tile) {
    const int left = tile % tiles.tiles_across * tiles.across * kTiledColumns;
    const int top = tile / tiles.tiles_across % tiles.tiles_down * tiles.down * kTiledRows;
    const int first_image = tile / tiles.tiles_across / tiles.tiles_down * tiles.images;

    float sum[kTiledRows][kTiledColumns][kTiledFilters] = {};
    for (int c = 0; c < p.c; c += tiles.channels) {
      const int channels = min(tiles.channels, p.c - c);
      __syncthreads();  // what was in shared memory has been read
      TileWalk at = start;
      const int top_in = top * p.stride_h - p.pad_top, left_in = left * p.stride_w - p.pad_left;
#pragma unroll 4
      for (int i = thread; i < tiles.input_size(); i += threads) {
        const int of_image = at.map / tiles.channels, channel = at.map - of_image * tiles.channels;
        const int n = first_image + of_image, y_in = top_in + at.row, x_in = left_in + at.column;
        const bool inside =
            n < p.n && channel < channels && y_in >= 0 && y_in < p.h && x_in >= 0 && x_in < p.w;
        x[i] = inside ? input[((std::int64_t{n} * p.c + c + channel) * p.h + y_in) * p.w + x_in]
                      : 0.0f;
        at.column += tiles.step.column;
        at.row += tiles.step.row;
        at.map += tiles.step.map;
        if (at.column >= tiles.in_pitch) at.column -= tiles.in_pitch, ++at.row;
        if (at.row >= tiles.in_rows) at.row -= tiles.in_rows, ++at.map;
      }
      if (!weights_resident) load_weights(c, channels);
      __syncthreads();
      for (int channel = 0; channel < channels; ++channel) {
        const float* from = x + (image * tiles.channels + channel) * plane;
        const float* filter = w + channel * kernel_offsets * filters + threadIdx.y * kTiledFilters;
        const auto multiply = [&](float value, const float4& f, float (&to)[kTiledFilters]) {
          to[0] = fmaf(value, f.x, to[0]);
          to[1] = fmaf(value, f.y, to[1]);
          to[2] = fmaf(value, f.z, to[2]);
          to[3] = fmaf(value, f.w, to[3]);
        };
        if constexpr (Side > 0) {
          from += row * tiles.in_pitch + column;
          constexpr int kVectors = (kTiledColumns + Side - 1 + 3) / 4;
          float window[2][4 * kVectors];  // this kernel row's input row, and the next
          const auto load = [&](float (&to)[4 * kVectors], int y) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
              const float4 four =
                  *reinterpret_cast<const float4*>(from + y * tiles.in_pitch + 4 * v);
              to[4 * v] = four.x, to[4 * v + 1] = four.y, to[4 * v + 2] = four.z,
                     to[4 * v + 3] = four.w;
            }
          };
          load(window[0], 0);
#pragma unroll
          for (int r = 0; r < Side; ++r, filter += Side * filters) {
            load(window[(r + 1) % 2], r + 1);
#pragma unroll
            for (int s = 0; s < Side; ++s) {
              const float4 f = *reinterpret_cast<const float4*>(filter + s * filters);
#pragma unroll
              for (int i = 0; i < kTiledRows; ++i) {
#pragma unroll
                for (int j = 0; j < kTiledColumns; ++j) {
                  multiply(window[(r + i) % 2][j + s], f, sum[i][j]);
                }
              }
            }
          }
        } else {
          from += row * p.stride_h * tiles.in_pitch + column * p.stride_w;
          for (int r = 0; r < p.r; ++r) {
            for (int s = 0; s < p.s; ++s, filter += filters) {
              const float4 f = *reinterpret_cast<const float4*>(filter);
#pragma unroll
              for (int i = 0; i < kTiledRows; ++i) {
#pragma unroll
                for (int j = 0; j < kTiledColumns; ++j) {
                  multiply(from[(i * p.stride_h + r * p.dilation_h) * tiles.in_pitch +
                                j * p.stride_w + s * p.dilation_w],
                           f, sum[i][j]);
                }
              }
            }
          }
        }
      }
    }
    if (!idle) {
      store_tiled_unit(sum, bias, output, p, first_image + image, top + row, left + column,
                       first_filter + threadIdx.y * kTiledFilters, relu, pool);
    }
  }
}

inline void launch_conv2d_tiled_step(const float* input, const float* weight, const float* bias,
                                     float* output, const Conv2dShape& shape, bool relu, bool pool,
                                     Stream stream) {
  if (shape.n == 0) return;
  const Conv2dTiles tiles(shape);
  const unsigned blocks = (tiles.tiles + tiles.tiles_a_block - 1) / tiles.tiles_a_block;
  const dim3 grid(blocks, (shape.k + tiles.filters() - 1) / tiles.filters());
  const dim3 block(32 * tiles.warps, tiles.groups);
  const auto launch = [&](auto kernel) {
    kernel<<<grid, block, tiles.shared_bytes(shape), stream>>>(input, weight, bias, output, shape,
                                                               tiles, relu, pool);
    CUDA_CHECK_LAUNCH("conv2d_tiled_kernel");
  };
  const bool compiled = shape.r == shape.s && shape.stride_h == 1 && shape.stride_w == 1 &&
                        shape.dilation_h == 1 && shape.dilation_w == 1;
  switch (compiled ? shape.s : 0) {
    case 1:
      return launch(conv2d_tiled_kernel<1>);
    case 3:
      return launch(conv2d_tiled_kernel<3>);
    case 5:
      return launch(conv2d_tiled_kernel<5>);
    case 7:
      return launch(conv2d_tiled_kernel<7>);
    default:
      return launch(conv2d_tiled_kernel<0>);
  }
}

inline void launch_conv2d_tiled(const float* input, const float* weight, const float* bias,
                                float* output, const Conv2dShape& shape, Stream stream) {
  launch_conv2d_tiled_step(input, weight, bias, output, shape, false, false, stream);
}

}  // namespace cnn_engine::cuda
