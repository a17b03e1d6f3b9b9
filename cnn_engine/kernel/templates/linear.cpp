// call: my_linear(x, weight, bias, y, shape, threads);
#include "cnn_engine/kernel.h"

extern "C" void my_linear(const float* x, const float* weight, const float* bias, float* y,
                          Linear shape, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int n = 0; n < shape.n; ++n)
    for (int m = 0; m < shape.m; ++m) {
      float sum = bias ? bias[m] : 0.0f;
      for (int f = 0; f < shape.f; ++f) sum += x[n * shape.f + f] * weight[m * shape.f + f];
      y[n * shape.m + m] = sum;
    }
}
