// call: my_lrn(x, y, shape, threads);
#include <cmath>

#include "cnn_engine/kernel.h"

extern "C" void my_lrn(const float* x, float* y, Lrn shape, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int place = 0; place < shape.n * shape.c * shape.area; ++place) {
    const int c = place / shape.area % shape.c;
    float sum = 0.0f;
    for (int other = c - (shape.size - 1) / 2; other <= c + shape.size / 2; ++other)
      if (other >= 0 && other < shape.c) {
        const float value = x[place + (other - c) * shape.area];
        sum += value * value;
      }
    y[place] = x[place] / std::pow(shape.k + shape.alpha / shape.size * sum, shape.beta);
  }
}
