// Reductions over the lanes of one warp by shuffles; every lane ends with the result.
#pragma once

#include "cuda/common/warp.cuh"

namespace cnn_engine::cuda {

__device__ inline float warp_sum(float value) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  return value;
}

// The largest of the lanes' values that is not NaN.
__device__ inline float warp_max(float value) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

}  // namespace cnn_engine::cuda
