// Weights as conv2d_nhwc multiplies them on tensor cores: [groups][ceil(K / 16)][units of 16
// terms][32 lanes][2 filters][4 terms]; lane 4 g + t has terms 4 t to 4 t + 3 of filters g and g
// + 8.
#pragma once

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/sm80/conv2d_nhwc_gemm.h"

namespace cnn_engine::cuda::nhwc {

// One thread packs a lane's weights of 16 terms and 16 filters.
template <typename Operand>
__global__ void conv2d_nhwc_pack_kernel(const float* __restrict__ weight,  // [K, C / groups, R, S]
                                        char* __restrict__ packed, const Conv2dShape shape,
                                        int channels, int units, std::int64_t lanes) {
  const std::int64_t index = grid_thread();
  if (index >= lanes) return;
  const int lane = static_cast<int>(index % 32), unit = static_cast<int>(index / 32 % units);
  const int blocks = (shape.group_filters() + 15) / 16;
  const int block = static_cast<int>(index / 32 / units % blocks);
  const int group = static_cast<int>(index / 32 / units / blocks);
  const int kernel_offsets = shape.r * shape.s;
  float terms[2][4];
  for (int f = 0; f < 2; ++f) {
    const int filter = block * 16 + f * 8 + lane / 4;
    for (int i = 0; i < 4; ++i) {
      const int term = unit * 16 + lane % 4 * 4 + i, c = term % channels,
                kernel_offset = term / channels;
      const bool some = filter < shape.group_filters() && c < shape.group_channels() &&
                        kernel_offset < kernel_offsets;
      const std::int64_t own = std::int64_t{group} * shape.group_filters() + filter;
      terms[f][i] =
          some ? weight[(own * shape.group_channels() + c) * kernel_offsets + kernel_offset] : 0.0f;
    }
  }
  Operand::pack(packed + index * Operand::kLaneBytes, terms);
}

template <typename Operand>
void launch_pack(const float* weight, void* packed, const Conv2dShape& shape, int channels,
                 int units, Stream stream) {
  const std::int64_t lanes =
      std::int64_t{32} * units * ((shape.group_filters() + 15) / 16) * shape.groups;
  conv2d_nhwc_pack_kernel<Operand><<<blocks_for(lanes), kBlockThreads, 0, stream>>>(
      weight, static_cast<char*>(packed), shape, channels, units, lanes);
  CUDA_CHECK_LAUNCH("conv2d_nhwc_pack_kernel");
}

}  // namespace cnn_engine::cuda::nhwc
