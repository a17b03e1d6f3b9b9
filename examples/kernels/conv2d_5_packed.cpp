// Step 5, packed weights: step 3 read its weights from as many places as it has filters, a page
// apart. Here they are copied first, so that the weights of 12 filters for one term lie side by
// side: one stream, in the order in which it is read. With so many filters each vector of inputs
// that was read is used 12 times. Threads share the rows of all images as in step 4.
//
// operator: conv2d
// requires: stride_w == 1 && dilation_w == 1 && groups == 1 && s <= 64
// workspace: 4 * (c * r * s * ceil_div(k, kFilters) * kFilters +
//            c * r * (out_w + kColumns + 64) * threads)
// call: conv2d_packed(x, weight, bias, y, workspace, shape, threads);
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "cnn_engine/kernel.h"

constexpr int kFilters = 12;
constexpr int kColumns = 16;

typedef float Vector __attribute__((vector_size(4 * kColumns), aligned(4)));

// Copies the rows of all channels that output row `i` of image `n` reads, with zeros around them.
static void copy_rows(const float* x, float* rows, int length, const Conv2d& shape, int n, int i) {
  for (int c = 0; c < shape.c; ++c)
    for (int r = 0; r < shape.r; ++r) {
      float* to = rows + (c * shape.r + r) * length;
      std::fill(to, to + length, 0.0f);
      const int row = i * shape.stride_h + r * shape.dilation_h - shape.pad_top;
      const int count = std::min(shape.w, length - shape.pad_left);
      if (row >= 0 && row < shape.h && count > 0)
        std::memcpy(to + shape.pad_left, x + ((n * shape.c + c) * shape.h + row) * shape.w,
                    4 * count);
    }
}

extern "C" void conv2d_packed(const float* x, const float* weight, const float* bias, float* y,
                              float* workspace, Conv2d shape, int threads) {
  const int length =
      shape.out_w + kColumns + 64;  // of a row with its zeros, and what a last vector reads
  const int terms = shape.c * shape.r * shape.s;
  const int blocks = (shape.k + kFilters - 1) / kFilters;
  float* packed = workspace;  // [blocks][terms][kFilters]
  float* all = workspace + terms * blocks * kFilters;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int f = 0; f < blocks * kFilters; ++f)
      for (int t = 0; t < terms; ++t)
        packed[(f / kFilters * terms + t) * kFilters + f % kFilters] =
            f < shape.k ? weight[f * terms + t] : 0.0f;
    float* rows = all + omp_get_thread_num() * shape.c * shape.r * length;
#pragma omp for collapse(2)
    for (int n = 0; n < shape.n; ++n)
      for (int i = 0; i < shape.out_h; ++i) {
        copy_rows(x, rows, length, shape, n, i);
        for (int block = 0; block < blocks; ++block)
          for (int j = 0; j < shape.out_w; j += kColumns) {
            const int first = block * kFilters;
            Vector sum[kFilters];
            for (int q = 0; q < kFilters; ++q)
              sum[q] = Vector{} + (bias && first + q < shape.k ? bias[first + q] : 0.0f);
            const float* w = packed + block * terms * kFilters;
            for (int t = 0; t < shape.c * shape.r; ++t)
              for (int s = 0; s < shape.s; ++s, w += kFilters) {
                const Vector in = *reinterpret_cast<const Vector*>(rows + t * length + j + s);
#pragma GCC unroll 12
                for (int q = 0; q < kFilters; ++q) sum[q] += in * w[q];
              }
            const int columns = std::min(kColumns, shape.out_w - j);
            for (int q = 0; q < kFilters && first + q < shape.k; ++q)
              std::memcpy(y + ((n * shape.k + first + q) * shape.out_h + i) * shape.out_w + j,
                          &sum[q], 4 * columns);
          }
      }
  }
}
