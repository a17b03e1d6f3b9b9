// conv2d, variant `tiled`: sums in registers over tiles of the input in shared memory; relu and 2x2
// pooling of the result in registers when asked (ops/conv2d_step.h).
//
// Layouts: x [N,C,H,W], w [K,C,R,S], b [K] or null, y [N,K,OH,OW] (or pooled), float32. Outputs <
// 2^31.
//
// A block makes 4 * blockDim.y filters of a tile of 256 outputs: `columns` x `rows` of one map, of
// `images` images where a map is smaller. A warp is one y: thread x makes 2 rows x 4 columns of 4
// filters, 32 sums. A few channels at a time come to shared memory, the input with its border of
// zeros (the only place where bounds are tested) and the weights with their filters innermost. For
// each kernel row a thread then loads one input row's window as two vectors and, for each tap, 4
// filters as one vector that its whole warp shares: 160 multiply-adds for 7 loads with a 5-wide
// kernel, where the layered kernels need 2 loads for 1. Kernel widths 1, 3, 5 and 7 with stride 1
// are compiled in; other widths and strides load each value. fits_conv2d_tiled says whether a tile
// fits into shared memory; one that does not is refused.
#pragma once

#include "cuda/conv2d_direct.cuh"
#include "ops/conv2d_step.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {

constexpr int kTiledRows = 2, kTiledColumns = 4, kTiledFilters = 4;  // a thread's outputs
constexpr int kTiledSharedBytes = 48 * 1024;  // what every device grants unasked

// How the outputs are cut into tiles, and what of them is in shared memory at a time.
struct Conv2dTiles {
  int columns, rows, images;     // of a tile: outputs; columns/4 * rows/2 * images = 32 threads
  int tiles_across, tiles_down;  // of a map
  int groups;                    // of 4 filters, a block
  int in_rows, in_pitch;         // of one channel's input tile
  int channels;                  // at a time; 0: not even one fits

  explicit Conv2dTiles(const Conv2dShape& p) {
    const auto covering = [](int size, int most) {  // the power of two that covers size, up to most
      int power = 1;
      while (power < size && power < most) power *= 2;
      return power;
    };
    const int across = covering((p.out_w() + kTiledColumns - 1) / kTiledColumns, 8);
    const int down = covering((p.out_h() + kTiledRows - 1) / kTiledRows, 32 / across);
    columns = kTiledColumns * across;
    rows = kTiledRows * down;
    images = 32 / (across * down);
    tiles_across = (p.out_w() + columns - 1) / columns;
    tiles_down = (p.out_h() + rows - 1) / rows;
    const int all = (p.k + kTiledFilters - 1) / kTiledFilters;
    const int blocks = (all + 7) / 8;
    groups = (all + blocks - 1) / blocks;
    // Sizes as 64 bits: a huge kernel or stride must not wrap round to one that fits.
    const std::int64_t tall = std::int64_t{rows - 1} * p.stride_h + p.r;
    const std::int64_t wide = (std::int64_t{columns - 1} * p.stride_w + p.s + 7) / 4 * 4;
    const std::int64_t bytes = 4 * (images * tall * wide + std::int64_t{p.r} * p.s * filters());
    channels = 0;
    if (tall > kTiledSharedBytes || wide > kTiledSharedBytes || bytes > kTiledSharedBytes) return;
    in_rows = static_cast<int>(tall);
    in_pitch = static_cast<int>(wide);
    channels = static_cast<int>(kTiledSharedBytes / bytes);
    if (channels > p.c) channels = p.c;
  }
  CNN_ENGINE_INLINE int filters() const { return kTiledFilters * groups; }
  CNN_ENGINE_INLINE int input_size() const { return channels * images * in_rows * in_pitch; }
  int shared_bytes(const Conv2dShape& p) const {
    return 4 * (input_size() + channels * p.r * p.s * filters());
  }
};

// Width: the kernel's, with stride 1; 0: any width and stride.
template <int Width>
__global__ void conv2d_tiled_kernel(const float* __restrict__ input,   // [N, C, H, W]
                                    const float* __restrict__ weight,  // [K, C, R, S]
                                    const float* __restrict__ bias,    // [K] or null
                                    float* __restrict__ output,        // [N, K, OH, OW] or pooled
                                    const Conv2dShape p, const Conv2dTiles tiles, bool relu,
                                    bool pool) {
  extern __shared__ __align__(16) float tiled_shared[];
  float* const x = tiled_shared;                       // [channels][images][in_rows][in_pitch]
  float* const w = tiled_shared + tiles.input_size();  // [channels][R][S][filters]
  const int threads = 32 * blockDim.y, thread = threadIdx.y * 32 + threadIdx.x;
  const int across = tiles.columns / kTiledColumns, down = tiles.rows / kTiledRows;
  const int column = threadIdx.x % across * kTiledColumns;   // in the tile
  const int row = threadIdx.x / across % down * kTiledRows;  // in the tile
  const int image = threadIdx.x / (across * down);           // in the tile
  int block = blockIdx.x;
  const int left = block % tiles.tiles_across * tiles.columns;
  block /= tiles.tiles_across;
  const int top = block % tiles.tiles_down * tiles.rows;
  const int first_image = block / tiles.tiles_down * tiles.images;
  const int first_filter = blockIdx.y * tiles.filters();
  const int filters = tiles.filters();
  const int stride_h = Width > 0 ? 1 : p.stride_h, stride_w = Width > 0 ? 1 : p.stride_w;
  const int taps = p.r * p.s;

  float sum[kTiledRows][kTiledColumns][kTiledFilters] = {};
  for (int c = 0; c < p.c; c += tiles.channels) {
    const int channels = min(tiles.channels, p.c - c);
    __syncthreads();  // the tile before this one has been read
    const int plane = tiles.in_rows * tiles.in_pitch;
    for (int i = thread; i < channels * tiles.images * plane; i += threads) {
      const int map = i / plane, at = i - map * plane;
      const int y_in = top * p.stride_h - p.pad_h + at / tiles.in_pitch;
      const int x_in = left * p.stride_w - p.pad_w + at % tiles.in_pitch;
      const int n = first_image + map % tiles.images, channel = c + map / tiles.images;
      const bool inside = n < p.n && y_in >= 0 && y_in < p.h && x_in >= 0 && x_in < p.w;
      x[i] = inside ? input[((std::int64_t{n} * p.c + channel) * p.h + y_in) * p.w + x_in] : 0.0f;
    }
    for (int i = thread; i < channels * taps * filters; i += threads) {
      const int filter = first_filter + i % filters, tap = i / filters;
      w[i] = filter < p.k ? weight[(std::int64_t{filter} * p.c + c) * taps + tap] : 0.0f;
    }
    __syncthreads();
    for (int channel = 0; channel < channels; ++channel) {
      const float* from = x + (channel * tiles.images + image) * plane +
                          row * stride_h * tiles.in_pitch + column * stride_w;
      const float* filter = w + channel * taps * filters + threadIdx.y * kTiledFilters;
      const auto multiply = [&](float value, const float4& f, float (&to)[kTiledFilters]) {
        to[0] = fmaf(value, f.x, to[0]);
        to[1] = fmaf(value, f.y, to[1]);
        to[2] = fmaf(value, f.z, to[2]);
        to[3] = fmaf(value, f.w, to[3]);
      };
      if constexpr (Width > 0) {
        constexpr int kVectors = (kTiledColumns + Width - 1 + 3) / 4;
        float window[2][4 * kVectors];  // this kernel row's input row, and the next
        const auto load = [&](float (&to)[4 * kVectors], int y) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            const float4 four = *reinterpret_cast<const float4*>(from + y * tiles.in_pitch + 4 * v);
            to[4 * v] = four.x, to[4 * v + 1] = four.y, to[4 * v + 2] = four.z,
                   to[4 * v + 3] = four.w;
          }
        };
        load(window[0], 0);
        for (int r = 0; r < p.r; ++r, filter += Width * filters) {
          load(window[1], r + 1);
#pragma unroll
          for (int s = 0; s < Width; ++s) {
            const float4 f = *reinterpret_cast<const float4*>(filter + s * filters);
#pragma unroll
            for (int i = 0; i < kTiledRows; ++i) {
#pragma unroll
              for (int j = 0; j < kTiledColumns; ++j) multiply(window[i][j + s], f, sum[i][j]);
            }
          }
#pragma unroll
          for (int v = 0; v < 4 * kVectors; ++v) window[0][v] = window[1][v];
        }
      } else {
        for (int r = 0; r < p.r; ++r) {
          for (int s = 0; s < p.s; ++s, filter += filters) {
            const float4 f = *reinterpret_cast<const float4*>(filter);
#pragma unroll
            for (int i = 0; i < kTiledRows; ++i) {
#pragma unroll
              for (int j = 0; j < kTiledColumns; ++j) {
                multiply(from[(i * stride_h + r) * tiles.in_pitch + j * stride_w + s], f,
                         sum[i][j]);
              }
            }
          }
        }
      }
    }
  }

  const int n = first_image + image;
  if (n >= p.n) return;
  const int out_h = p.out_h(), out_w = p.out_w();
  const int rows = pool ? out_h / 2 : out_h, columns = pool ? out_w / 2 : out_w;
#pragma unroll
  for (int f = 0; f < kTiledFilters; ++f) {
    const int k = first_filter + threadIdx.y * kTiledFilters + f;
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
        const int y_out = (top + row) / 2, x_out = (left + column + j) / 2;
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
          const int y_out = top + row + i, x_out = left + column + j;
          if (y_out < rows && x_out < columns) map[y_out * columns + x_out] = value[i][j];
        }
      }
    }
  }
}

// Whether a shape's tile fits into shared memory.
inline bool fits_conv2d_tiled(const Conv2dShape& shape) { return Conv2dTiles(shape).channels > 0; }

inline void launch_conv2d_tiled_step(const float* input, const float* weight, const float* bias,
                                     float* output, const Conv2dShape& shape, bool relu, bool pool,
                                     Stream stream) {
  if (shape.n == 0) return;
  const Conv2dTiles tiles(shape);
  const std::int64_t blocks = std::int64_t{(shape.n + tiles.images - 1) / tiles.images} *
                              tiles.tiles_across * tiles.tiles_down;
  const dim3 grid(static_cast<unsigned>(blocks), (shape.k + tiles.filters() - 1) / tiles.filters());
  const dim3 block(32, tiles.groups);
  const auto launch = [&](auto kernel) {
    kernel<<<grid, block, tiles.shared_bytes(shape), stream>>>(input, weight, bias, output, shape,
                                                               tiles, relu, pool);
    CUDA_CHECK_LAUNCH("conv2d_tiled_kernel");
  };
  const bool unit_stride = shape.stride_h == 1 && shape.stride_w == 1;
  switch (unit_stride ? shape.s : 0) {
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
