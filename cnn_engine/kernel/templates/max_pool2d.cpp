// call: my_max_pool2d(x, y, shape, threads);
#include <limits>

#include "cnn_engine/kernel.h"

extern "C" void my_max_pool2d(const float* x, float* y, Pool2d shape, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int plane = 0; plane < shape.n * shape.c; ++plane)
    for (int i = 0; i < shape.out_h; ++i)
      for (int j = 0; j < shape.out_w; ++j) {
        float most = -std::numeric_limits<float>::infinity();
        for (int r = 0; r < shape.r; ++r)
          for (int s = 0; s < shape.s; ++s) {
            const int row = i * shape.stride_h + r * shape.dilation_h - shape.pad_top;
            const int column = j * shape.stride_w + s * shape.dilation_w - shape.pad_left;
            if (row < 0 || row >= shape.h || column < 0 || column >= shape.w) continue;
            const float value = x[(plane * shape.h + row) * shape.w + column];
            if (value > most || value != value) most = value;  // NaN wins, and nothing is above it
          }
        y[(plane * shape.out_h + i) * shape.out_w + j] = most;
      }
}
