// Weights as conv2d_nhwc_wgmma's stages have them: [ceil(K / 64)][steps][64 filters][128 bytes],
// their pieces exchanged (wgmma.cuh), zeros beyond the last filter and channel; those of float32 as
// threads read them (conv2d_nhwc_wgmma_split.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/conv2d_nhwc_wgmma_product.h"
#include "cuda/conv2d_nhwc_wgmma_split.cuh"
#include "cuda/launch.cuh"
#include "cuda/stored.cuh"
#include "cuda/wgmma.cuh"

namespace cnn_engine::cuda::wgmma {

// One thread packs 16 bytes.
template <typename T>
__global__ void conv2d_nhwc_wgmma_pack_kernel(const float* __restrict__ weight,  // [K, C, R, S]
                                              T* __restrict__ packed, int filters, int channels,
                                              int taps, int chunks, int first_step, int all_steps,
                                              std::int64_t pieces) {
  const std::int64_t index = grid_thread();
  if (index >= pieces) return;
  const int piece = static_cast<int>(index % 8), row = static_cast<int>(index / 8 % kFilters);
  const std::int64_t block = index / 8 / kFilters;
  const int steps = taps * chunks, step = static_cast<int>(block % steps);
  const int unit = static_cast<int>(block / steps), first_filter = unit * kFilters;
  const int tap = step / chunks;
  constexpr int kWidth = 16 / sizeof(T);
  const int first_channel = (step - tap * chunks) * (8 * kWidth);
  T* const to = packed + ((std::int64_t{1} * unit * all_steps + first_step + step) * kFilters * 8 +
                          index % (kFilters * 8)) *
                             kWidth;
  for (int i = 0; i < kWidth; ++i) {
    int filter = first_filter + row, c = first_channel + exchanged(row, piece) * kWidth + i;
    if constexpr (std::is_same_v<T, float>) {  // as SplitWeights has it
      filter = first_filter + row_of_split(index % 512, i);
      c = first_channel + channel_of_split(index % 512, i);
    }
    const bool some = filter < filters && c < channels;
    const std::int64_t at = (std::int64_t{1} * filter * channels + c) * taps + tap;
    to[i] = narrowed<T>(some ? weight[at] : 0.0f);
  }
}

template <typename T>
void launch_pack(const float* weight, void* packed, const Conv2dShape& shape, int chunks,
                 int first_step, int steps, Stream stream) {
  const std::int64_t pieces = std::int64_t{8} * ((shape.k + kFilters - 1) / kFilters) * kFilters *
                              shape.r * shape.s * chunks;
  conv2d_nhwc_wgmma_pack_kernel<<<blocks_for(pieces), kBlockThreads, 0, stream>>>(
      weight, static_cast<T*>(packed), shape.k, shape.c, shape.r * shape.s, chunks, first_step,
      steps, pieces);
  CUDA_CHECK_LAUNCH("conv2d_nhwc_wgmma_pack_kernel");
}

}  // namespace cnn_engine::cuda::wgmma
