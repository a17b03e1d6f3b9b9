// call: my_average_pool2d(x, y, shape, threads);
#include "cnn_engine/kernel.h"

extern "C" void my_average_pool2d(const float* x, float* y, Pool2d shape, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int plane = 0; plane < shape.n * shape.c; ++plane)
    for (int i = 0; i < shape.out_h; ++i)
      for (int j = 0; j < shape.out_w; ++j) {
        float sum = 0.0f;
        int count = 0;
        for (int r = 0; r < shape.r; ++r)
          for (int s = 0; s < shape.s; ++s) {
            const int row = i * shape.stride_h + r * shape.dilation_h - shape.pad_top;
            const int column = j * shape.stride_w + s * shape.dilation_w - shape.pad_left;
            if (row < 0 || row >= shape.h || column < 0 || column >= shape.w) continue;
            sum += x[(plane * shape.h + row) * shape.w + column];
            ++count;
          }
        const int divisor = shape.count_padding ? shape.r * shape.s : count;
        y[(plane * shape.out_h + i) * shape.out_w + j] = sum / divisor;
      }
}
