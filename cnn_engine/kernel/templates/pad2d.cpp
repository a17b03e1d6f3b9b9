// call: my_pad2d(x, y, shape, threads);
#include "cnn_engine/kernel.h"

extern "C" void my_pad2d(const float* x, float* y, Pad2d shape, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int plane = 0; plane < shape.n * shape.c; ++plane)
    for (int i = 0; i < shape.out_h; ++i)
      for (int j = 0; j < shape.out_w; ++j) {
        const int row = i - shape.pad_top, column = j - shape.pad_left;
        const bool inside = row >= 0 && row < shape.h && column >= 0 && column < shape.w;
        y[(plane * shape.out_h + i) * shape.out_w + j] =
            inside ? x[(plane * shape.h + row) * shape.w + column] : 0.0f;
      }
}
