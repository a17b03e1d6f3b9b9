// launch: my_linear<<<dim3(n, ceil_div(m, 128)), 128>>>(x, weight, bias, y, shape);
#include "cnn_engine/kernel.h"

// A thread makes one output.
extern "C" __global__ void my_linear(const float* x, const float* weight, const float* bias,
                                     float* y, Linear shape) {
  const int m = blockIdx.y * blockDim.x + threadIdx.x, n = blockIdx.x;
  if (m >= shape.m) return;
  float sum = bias ? bias[m] : 0.0f;
  for (int f = 0; f < shape.f; ++f) sum += x[n * shape.f + f] * weight[m * shape.f + f];
  y[n * shape.m + m] = sum;
}
