// call: my_matmul(a, b, y, shape, threads);
#include "cnn_engine/kernel.h"

extern "C" void my_matmul(const float* a, const float* b, float* y, Matmul shape, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int batch = 0; batch < shape.batch; ++batch)
    for (int i = 0; i < shape.n; ++i)
      for (int j = 0; j < shape.m; ++j) {
        float sum = 0.0f;
        for (int f = 0; f < shape.f; ++f)
          sum += a[(batch * shape.n + i) * shape.f + f] * b[(batch * shape.f + f) * shape.m + j];
        y[(batch * shape.n + i) * shape.m + j] = sum;
      }
}
