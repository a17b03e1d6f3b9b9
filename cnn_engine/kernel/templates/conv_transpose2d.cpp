// call: my_conv_transpose2d(x, weight, bias, y, shape, threads);
#include "cnn_engine/kernel.h"

// Every output looks for the inputs whose filters reach it.
extern "C" void my_conv_transpose2d(const float* x, const float* weight, const float* bias,
                                    float* y, ConvTranspose2d shape, int threads) {
  const int filters = shape.k / shape.groups, channels = shape.c / shape.groups;
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int n = 0; n < shape.n; ++n)
    for (int f = 0; f < shape.k; ++f) {
      const int first = f / filters * channels;
      for (int i = 0; i < shape.out_h; ++i)
        for (int j = 0; j < shape.out_w; ++j) {
          float sum = bias ? bias[f] : 0.0f;
          for (int c = first; c < first + channels; ++c)
            for (int r = 0; r < shape.r; ++r)
              for (int s = 0; s < shape.s; ++s) {
                const int row = i + shape.pad_top - r * shape.dilation_h;
                const int column = j + shape.pad_left - s * shape.dilation_w;
                if (row < 0 || column < 0 || row % shape.stride_h || column % shape.stride_w)
                  continue;
                const int from = row / shape.stride_h, at = column / shape.stride_w;
                if (from >= shape.h || at >= shape.w) continue;
                sum += x[((n * shape.c + c) * shape.h + from) * shape.w + at] *
                       weight[((c * filters + f % filters) * shape.r + r) * shape.s + s];
              }
          y[((n * shape.k + f) * shape.out_h + i) * shape.out_w + j] = sum;
        }
    }
}
