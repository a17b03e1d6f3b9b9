// Step 2, the loops in another order: columns of the output innermost. Neighbouring outputs do
// not wait for each other, so that the compiler makes vectors of them (8 or 16 at a time); where
// a row of the output lies over the image is worked out once a tap, not tested for every
// product.
//
// operator: conv2d
// requires: stride_w == 1
// call: conv2d_reordered(x, weight, bias, y, shape);
#include <algorithm>

#include "cnn_engine/kernel.h"

extern "C" void conv2d_reordered(const float* __restrict x, const float* __restrict weight,
                                 const float* bias, float* __restrict y, Conv2d shape) {
  const int channels = shape.c / shape.groups;
  for (int n = 0; n < shape.n; ++n)
    for (int f = 0; f < shape.k; ++f) {
      const int first = f / (shape.k / shape.groups) * channels;
      for (int i = 0; i < shape.out_h; ++i) {
        float* out = y + ((n * shape.k + f) * shape.out_h + i) * shape.out_w;
        std::fill(out, out + shape.out_w, bias ? bias[f] : 0.0f);
        for (int c = 0; c < channels; ++c)
          for (int r = 0; r < shape.r; ++r) {
            const int row = i * shape.stride_h + r * shape.dilation_h - shape.pad_top;
            if (row < 0 || row >= shape.h) continue;
            const float* in = x + ((n * shape.c + first + c) * shape.h + row) * shape.w;
            for (int s = 0; s < shape.s; ++s) {
              const float w = weight[((f * channels + c) * shape.r + r) * shape.s + s];
              const int offset = s * shape.dilation_w - shape.pad_left;
              const int begin = std::max(0, -offset), end = std::min(shape.out_w, shape.w - offset);
              for (int j = begin; j < end; ++j) out[j] += in[j + offset] * w;
            }
          }
      }
    }
}
