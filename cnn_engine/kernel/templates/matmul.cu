// launch: my_matmul<<<dim3(ceil_div(m, 16), ceil_div(n, 16), batch), dim3(16, 16)>>>(a, b, y,
//         shape);
// requires: batch <= 65535
#include "cnn_engine/kernel.h"

// A thread makes one output.
extern "C" __global__ void my_matmul(const float* a, const float* b, float* y, Matmul shape) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  const int i = blockIdx.y * blockDim.y + threadIdx.y;
  if (i >= shape.n || j >= shape.m) return;
  a += (blockIdx.z * shape.n + i) * shape.f;
  b += blockIdx.z * shape.f * shape.m + j;
  float sum = 0.0f;
  for (int f = 0; f < shape.f; ++f) sum += a[f] * b[f * shape.m];
  y[(blockIdx.z * shape.n + i) * shape.m + j] = sum;
}
