// Step 6, dot products: one instruction multiplies 16 pairs by 16 pairs and adds both products
// of each to a float32 sum (vdpbf16ps of AVX512_BF16): twice the work of a multiply-add. Two
// channels lie side by side for it, rounded to bfloat16, which has 8 bits where float32 has 24:
// the line `computes` says so. VNNI's vpdpbusd does the same with four 8-bit integers; inputs of
// this contract are float32, so that its step would change what is computed, not how. Without
// the instruction the compiler makes the same sums of shifts and multiply-adds.
//
// operator: conv2d
// computes: bfloat16
// requires: stride_w == 1 && dilation_w == 1 && groups == 1 && s <= 64
// workspace: 4 * (ceil_div(c, 2) * r * s * ceil_div(k, kFilters) * kFilters +
//            ceil_div(c, 2) * r * (out_w + kColumns + 64) * threads)
// call: conv2d_bfloat16(x, weight, bias, y, workspace, shape, threads);
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "cnn_engine/kernel.h"

constexpr int kFilters = 12;
constexpr int kColumns = 16;

typedef float Vector __attribute__((vector_size(4 * kColumns), aligned(4)));
typedef unsigned Pairs __attribute__((vector_size(4 * kColumns), aligned(4)));

// Rounds to the nearest, to even between two.
static unsigned bfloat16(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

static Vector dot(Vector sum, Pairs a, unsigned b) {
#ifdef __AVX512BF16__
  return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32(b));
#else
  const unsigned low = b << 16, high = b & 0xffff0000;
  float first, second;
  std::memcpy(&first, &low, 4);
  std::memcpy(&second, &high, 4);
  return sum + (Vector)(a << 16) * first + (Vector)(a & 0xffff0000) * second;
#endif
}

// Copies rows of pairs of channels that output row `i` of image `n` reads, with zeros around them.
static void copy_rows(const float* x, unsigned* rows, int length, const Conv2d& shape, int n,
                      int i) {
  for (int c = 0; c < shape.c; c += 2)
    for (int r = 0; r < shape.r; ++r) {
      unsigned* to = rows + (c / 2 * shape.r + r) * length;
      std::fill(to, to + length, 0u);
      const int row = i * shape.stride_h + r * shape.dilation_h - shape.pad_top;
      if (row < 0 || row >= shape.h) continue;
      const float* from = x + ((n * shape.c + c) * shape.h + row) * shape.w;
      const float* next = c + 1 < shape.c ? from + shape.h * shape.w : nullptr;
      const int count = std::min(shape.w, length - shape.pad_left);
      for (int j = 0; j < count; ++j)
        to[shape.pad_left + j] = bfloat16(from[j]) | (next ? bfloat16(next[j]) << 16 : 0);
    }
}

extern "C" void conv2d_bfloat16(const float* x, const float* weight, const float* bias, float* y,
                                unsigned* workspace, Conv2d shape, int threads) {
  const int length =
      shape.out_w + kColumns + 64;  // of a row with its zeros, and what a last vector reads
  const int area = shape.r * shape.s, halves = (shape.c + 1) / 2, terms = halves * area;
  const int blocks = (shape.k + kFilters - 1) / kFilters;
  unsigned* packed = workspace;  // [blocks][terms][kFilters], pairs of channels
  unsigned* all = workspace + terms * blocks * kFilters;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int f = 0; f < blocks * kFilters; ++f)
      for (int t = 0; t < terms; ++t) {
        const int c = t / area * 2, filter = std::min(f, shape.k - 1);
        const float* w = weight + (filter * shape.c + c) * area + t % area;
        const unsigned pair = bfloat16(w[0]) | (c + 1 < shape.c ? bfloat16(w[area]) << 16 : 0);
        packed[(f / kFilters * terms + t) * kFilters + f % kFilters] = pair;
      }
    unsigned* rows = all + omp_get_thread_num() * halves * shape.r * length;
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
            const unsigned* w = packed + block * terms * kFilters;
            for (int t = 0; t < halves * shape.r; ++t)
              for (int s = 0; s < shape.s; ++s, w += kFilters) {
                const Pairs in = *reinterpret_cast<const Pairs*>(rows + t * length + j + s);
#pragma GCC unroll 12
                for (int q = 0; q < kFilters; ++q) sum[q] = dot(sum[q], in, w[q]);
              }
            const int columns = std::min(kColumns, shape.out_w - j);
            for (int q = 0; q < kFilters && first + q < shape.k; ++q)
              std::memcpy(y + ((n * shape.k + first + q) * shape.out_h + i) * shape.out_w + j,
                          &sum[q], 4 * columns);
          }
      }
  }
}
