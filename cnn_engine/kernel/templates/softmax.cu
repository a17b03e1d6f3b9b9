// launch: my_@OP@<<<n, 128, 128 * sizeof(float)>>>(x, y, shape);
#include "cnn_engine/kernel.h"

extern __shared__ float shared[];  // a number per thread

// What a block's threads hold, added up, or the largest of it.
__device__ float total(float value, bool largest) {
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      const float a = shared[threadIdx.x], b = shared[threadIdx.x + half];
      shared[threadIdx.x] = !largest ? a + b : b > a || b != b ? b : a;  // NaN wins
    }
    __syncthreads();
  }
  const float found = shared[0];
  __syncthreads();
  return found;
}

// A block makes one row; its threads take every 128th element.
extern "C" __global__ void my_@OP@(const float* x, float* y, Rows shape) {
  x += blockIdx.x * shape.m;
  y += blockIdx.x * shape.m;
  float most = x[0];
  for (int i = threadIdx.x; i < shape.m; i += blockDim.x)
    if (x[i] > most || x[i] != x[i]) most = x[i];
  most = total(most, true);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < shape.m; i += blockDim.x) sum += expf(x[i] - most);
  sum = total(sum, false);
  for (int i = threadIdx.x; i < shape.m; i += blockDim.x) y[i] = @FORMULA@;
}
