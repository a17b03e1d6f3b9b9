// Step 1, the plain loop, on one thread: the bounds are tested for every product, and the sum
// waits for each addition before the next.
//
// operator: conv2d
// call: conv2d_naive(x, weight, bias, y, shape);
#include "cnn_engine/kernel.h"

extern "C" void conv2d_naive(const float* x, const float* weight, const float* bias, float* y,
                             Conv2d shape) {
  const int channels = shape.c / shape.groups;
  for (int n = 0; n < shape.n; ++n)
    for (int f = 0; f < shape.k; ++f) {
      const int first = f / (shape.k / shape.groups) * channels;
      for (int i = 0; i < shape.out_h; ++i)
        for (int j = 0; j < shape.out_w; ++j) {
          float sum = bias ? bias[f] : 0.0f;
          for (int c = 0; c < channels; ++c)
            for (int r = 0; r < shape.r; ++r)
              for (int s = 0; s < shape.s; ++s) {
                const int row = i * shape.stride_h + r * shape.dilation_h - shape.pad_top;
                const int column = j * shape.stride_w + s * shape.dilation_w - shape.pad_left;
                if (row >= 0 && row < shape.h && column >= 0 && column < shape.w)
                  sum += x[((n * shape.c + first + c) * shape.h + row) * shape.w + column] *
                         weight[((f * channels + c) * shape.r + r) * shape.s + s];
              }
          y[((n * shape.k + f) * shape.out_h + i) * shape.out_w + j] = sum;
        }
    }
}
