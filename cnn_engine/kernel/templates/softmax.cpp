// call: my_@OP@(x, y, shape, threads);
#include <cmath>

#include "cnn_engine/kernel.h"

extern "C" void my_@OP@(const float* x, float* y, Rows shape, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int n = 0; n < shape.n; ++n) {
    const float* row = x + n * shape.m;
    float* out = y + n * shape.m;
    float most = row[0], sum = 0.0f;
    for (int i = 1; i < shape.m; ++i)
      if (row[i] > most || row[i] != row[i]) most = row[i];  // NaN wins
    for (int i = 0; i < shape.m; ++i) sum += std::exp(row[i] - most);
    for (int i = 0; i < shape.m; ++i) out[i] = @FORMULA@;
  }
}
