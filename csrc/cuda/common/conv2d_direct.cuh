// conv2d, variant `if`: the formula of ops/conv2d.h, as it stands there.
//
// Layouts: x [N,C,H,W], w [K,C/G,R,S], b [K] or null, y [N,K,OH,OW], float32. Outputs < 2^31 a
// launch. The bounds of the image are tested in the innermost loop: the way most first write it,
// and what the `pad` variant is measured against. No shared memory; threads of a warp read one
// filter (a broadcast) and neighbouring pixels (coalesced but for the window's shift).
//
//   conv2d_direct_kernel       one thread makes one output and sums over C/G*R*S in order
//   conv2d_direct_warp_kernel  one warp makes one output: lanes sum every 32nd kernel offset, then
//   shuffle
#pragma once

#include "cuda/common/conv2d_output.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "runtime/check.h"

namespace cnn_engine::cuda {

__global__ void conv2d_direct_kernel(const float* __restrict__ input,
                                     const float* __restrict__ weight,
                                     const float* __restrict__ bias, float* __restrict__ output,
                                     const Conv2dShape p) {
  const std::int64_t index = grid_thread();
  if (index >= p.output_size()) return;
  const Conv2dOutput at(input, weight, p, static_cast<unsigned>(index));
  float sum = 0.0f;
  const int channels = p.group_channels();
  for (int c = 0; c < channels; ++c) {
    for (int r = 0; r < p.r; ++r) {
      for (int s = 0; s < p.s; ++s) {
        const int y = at.top + r * p.dilation_h;
        const int x = at.left + s * p.dilation_w;
        if (y >= 0 && y < p.h && x >= 0 && x < p.w) {
          sum += at.image[(c * p.h + y) * p.w + x] * at.filter[(c * p.r + r) * p.s + s];
        }
      }
    }
  }
  output[index] = bias ? sum + bias[at.k] : sum;
}

__global__ void conv2d_direct_warp_kernel(const float* __restrict__ input,
                                          const float* __restrict__ weight,
                                          const float* __restrict__ bias,
                                          float* __restrict__ output, const Conv2dShape p) {
  const std::int64_t index = grid_thread() / kWarpThreads;
  if (index >= p.output_size()) return;  // the whole warp leaves: the shuffles below stay complete
  const int lane = threadIdx.x % kWarpThreads;
  const Conv2dOutput at(input, weight, p, static_cast<unsigned>(index));
  const int kernel_offsets = p.filter_size();
  WarpKernelOffsets kernel_offset(p, lane);
  float sum = 0.0f;
  for (int t = lane; t < kernel_offsets; t += kWarpThreads, kernel_offset.advance(p)) {
    const int y = at.top + kernel_offset.r * p.dilation_h;
    const int x = at.left + kernel_offset.s * p.dilation_w;
    if (y >= 0 && y < p.h && x >= 0 && x < p.w) {
      sum += at.image[(kernel_offset.c * p.h + y) * p.w + x] * at.filter[t];
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) output[index] = bias ? sum + bias[at.k] : sum;
}

inline void launch_conv2d_direct(const float* input, const float* weight, const float* bias,
                                 float* output, const Conv2dShape& shape, bool reduction,
                                 Stream stream) {
  const std::int64_t outputs = shape.output_size();
  if (reduction) {
    conv2d_direct_warp_kernel<<<blocks_for(outputs * kWarpThreads), kBlockThreads, 0, stream>>>(
        input, weight, bias, output, shape);
    CUDA_CHECK_LAUNCH("conv2d_direct_warp_kernel");
  } else {
    conv2d_direct_kernel<<<blocks_for(outputs), kBlockThreads, 0, stream>>>(input, weight, bias,
                                                                            output, shape);
    CUDA_CHECK_LAUNCH("conv2d_direct_kernel");
  }
}

}  // namespace cnn_engine::cuda
