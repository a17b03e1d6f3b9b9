// Weights as conv2d_nhwc_wgmma's stages have them: [ceil(K / 64)][steps][64 filters][128 bytes],
// their pieces swizzled (wgmma.cuh), zeros beyond the last filter and channel. Those of float32
// are two parts (conv2d_nhwc_wgmma_split.cuh), and what products of each filter are multiplied by
// comes behind them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_split.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda::wgmma {

// A warp finds what a filter's sums are multiplied by, or, where it adds to the sums of weights
// that were looked at before, what both's are.
template <typename T>
__global__ void conv2d_nhwc_wgmma_scales_kernel(const T* __restrict__ weight,  // [K, C, R, S]
                                                float* __restrict__ scales, int filters,
                                                int filter_weights, int count, bool adds) {
  const int filter = static_cast<int>(grid_thread() / 32), lane = threadIdx.x % 32;
  if (filter >= count) return;
  unsigned largest = 0;
  if (filter < filters) {
    const T* const own = weight + std::int64_t{1} * filter * filter_weights;
    for (int i = lane; i < filter_weights; i += 32) {
      if (isfinite(own[i])) largest = max(largest, __float_as_uint(fabsf(own[i])));
    }
  }
  largest = __reduce_max_sync(0xffffffff, largest);
  const float scale = unscale_of(exponent_of(largest)) * kFilterUnit;
  if (lane == 0) scales[filter] = adds ? fmaxf(scales[filter], scale) : scale;
}

// One thread packs 16 bytes.
template <typename T>
__global__ void conv2d_nhwc_wgmma_pack_kernel(const float* __restrict__ weight,  // [K, C, R, S]
                                              const float* __restrict__ scales,  // of float32
                                              char* __restrict__ packed, int filters, int channels,
                                              int kernel_offsets, int chunks, int first_step,
                                              int all_steps, std::int64_t pieces) {
  constexpr bool kSplit = std::is_same_v<T, float>;
  using Packed = std::conditional_t<kSplit, __half, T>;
  constexpr int kWidth = 16 / sizeof(Packed), kStepChannels = kRowBytes / sizeof(T);
  const std::int64_t index = grid_thread();
  if (index >= pieces) return;
  const int row = static_cast<int>(index / 8 % kFilters);
  const int piece = swizzled(row, static_cast<int>(index % 8));
  const std::int64_t block = index / 8 / kFilters;
  const int steps = kernel_offsets * chunks, step = static_cast<int>(block % steps);
  const int unit = static_cast<int>(block / steps), filter = unit * kFilters + row;
  const int kernel_offset = step / chunks;
  const int first = (step - kernel_offset * chunks) * kStepChannels +
                    (kSplit ? eight_of_piece(piece) : piece) * kWidth;
  Packed* const to =
      reinterpret_cast<Packed*>(packed + (std::int64_t{1} * unit * all_steps + first_step + step) *
                                             kUnitBytes) +
      index % (kFilters * 8) * kWidth;
  for (int i = 0; i < kWidth; ++i) {
    const int c = first + i;
    const bool some = filter < filters && c < channels;
    const float value =
        some ? weight[(std::int64_t{1} * filter * channels + c) * kernel_offsets + kernel_offset]
             : 0.0f;
    if constexpr (kSplit) {
      to[i] = part_of_weight(value, scales[filter], is_small_piece(piece));
    } else {
      to[i] = narrowed<T>(value);
    }
  }
}

// `scales`: of float32, of as many filters as units have.
template <typename T>
void launch_scales(const float* weight, float* scales, const Conv2dShape& shape, bool adds,
                   Stream stream) {
  if constexpr (std::is_same_v<T, float>) {
    const int filters = padded_filters(shape);
    conv2d_nhwc_wgmma_scales_kernel<<<blocks_for(std::int64_t{32} * filters), kBlockThreads, 0,
                                      stream>>>(weight, scales, shape.k,
                                                shape.c * shape.r * shape.s, filters, adds);
    CUDA_CHECK_LAUNCH("conv2d_nhwc_wgmma_scales_kernel");
  }
}

template <typename T>
void launch_pack(const float* weight, void* packed, const float* scales, const Conv2dShape& shape,
                 int chunks, int first_step, int steps, Stream stream) {
  const std::int64_t pieces = std::int64_t{8} * padded_filters(shape) * shape.r * shape.s * chunks;
  conv2d_nhwc_wgmma_pack_kernel<T><<<blocks_for(pieces), kBlockThreads, 0, stream>>>(
      weight, scales, static_cast<char*>(packed), shape.k, shape.c, shape.r * shape.s, chunks,
      first_step, steps, pieces);
  CUDA_CHECK_LAUNCH("conv2d_nhwc_wgmma_pack_kernel");
}

}  // namespace cnn_engine::cuda::wgmma
