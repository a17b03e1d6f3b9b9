// The larger and the smaller of two values; NaN if either is, as PyTorch has it. One instruction
// from compute capability 8.0 on.
#pragma once

namespace cnn_engine::cuda {

__device__ inline float max_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return isnan(a) || isnan(b) ? a + b : fmaxf(a, b);
#endif
}

__device__ inline float min_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return isnan(a) || isnan(b) ? a + b : fminf(a, b);
#endif
}

}  // namespace cnn_engine::cuda
