// Step 3, blocks in registers: 4 filters x 16 columns of sums stay in registers over all taps,
// where step 2 read and wrote a row of sums for every tap. An input vector that was read is used
// for four filters. The row is copied with its zeros first, so that no product tests a bound.
//
// operator: conv2d
// requires: stride_w == 1 && dilation_w == 1 && groups == 1 && s <= 64
// workspace: 4 * c * r * (out_w + 16 + 64)
// call: conv2d_blocked(x, weight, bias, y, workspace, shape);
#include <algorithm>
#include <cstring>

#include "cnn_engine/kernel.h"

constexpr int kFilters = 4;
constexpr int kColumns = 16;

typedef float Vector __attribute__((vector_size(4 * kColumns), aligned(4)));

extern "C" void conv2d_blocked(const float* x, const float* weight, const float* bias, float* y,
                               float* rows, Conv2d shape) {
  const int length =
      shape.out_w + kColumns + 64;  // of a row with its zeros, and what a last vector reads
  const int terms = shape.c * shape.r * shape.s;
  for (int n = 0; n < shape.n; ++n)
    for (int i = 0; i < shape.out_h; ++i) {
      for (int c = 0; c < shape.c; ++c)
        for (int r = 0; r < shape.r; ++r) {
          float* to = rows + (c * shape.r + r) * length;
          std::fill(to, to + length, 0.0f);
          const int row = i * shape.stride_h + r * shape.dilation_h - shape.pad_top;
          const int count = std::min(shape.w, length - shape.pad_left);
          if (row >= 0 && row < shape.h)
            std::memcpy(to + shape.pad_left, x + ((n * shape.c + c) * shape.h + row) * shape.w,
                        4 * count);
        }
      for (int f = 0; f < shape.k; f += kFilters)
        for (int j = 0; j < shape.out_w; j += kColumns) {
          Vector sum[kFilters];
          const float* w[kFilters];
          for (int q = 0; q < kFilters; ++q) {
            const int filter = std::min(f + q, shape.k - 1);
            sum[q] = Vector{} + (bias ? bias[filter] : 0.0f);
            w[q] = weight + filter * terms;
          }
          for (int t = 0; t < shape.c * shape.r; ++t)
            for (int s = 0; s < shape.s; ++s) {
              const Vector in = *reinterpret_cast<const Vector*>(rows + t * length + j + s);
              for (int q = 0; q < kFilters; ++q) sum[q] += in * w[q][t * shape.s + s];
            }
          const int columns = std::min(kColumns, shape.out_w - j);
          for (int q = 0; q < kFilters && f + q < shape.k; ++q)
            std::memcpy(y + ((n * shape.k + f + q) * shape.out_h + i) * shape.out_w + j, &sum[q],
                        4 * columns);
        }
    }
}
