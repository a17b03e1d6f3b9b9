// The inner loop of every fused layer with weights: y[t, k] = sum over c of x[t, c] * w[c, k], in
// the order of c, with k on SIMD lanes, `T` rows and `B` vectors of k held in registers. Included
// only by files that are compiled once for each instruction set.
#pragma once

#include "cpu/fused/vector.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// acc[t][b] += the products of `count` values of c.
template <int W, int B, int T>
CNN_ENGINE_INLINE void accumulate(Vec<W> (&acc)[T][B], const float* x, std::size_t t_stride,
                                  std::size_t c_stride, const float* w, int count) {
  for (int c = 0; c < count; ++c, x += c_stride, w += B * W) {
    Vec<W> weights[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) weights[b] = load<W>(w + b * W);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const float value = x[t * t_stride];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) acc[t][b] += weights[b] * value;
    }
  }
}

template <int W, int B, int T>
CNN_ENGINE_INLINE void multiply_rows(const float* x, std::size_t t_stride, std::size_t c_stride,
                                     const float* w, int count, float* y, std::size_t y_stride) {
  Vec<W> acc[T][B] = {};
  accumulate<W, B, T>(acc, x, t_stride, c_stride, w, count);
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) store<W>(y + t * y_stride + b * W, acc[t][b]);
  }
}

// Rows that fit in the registers beside the weights and one value.
template <int B>
constexpr int kMostRows = kRegisters == 32 ? (B == 1 ? 16 : 8) : (B == 1 ? 8 : 4);

template <int W, int B>
CNN_ENGINE_INLINE void multiply(const float* x, std::size_t t_stride, std::size_t c_stride,
                                const float* w, int count, float* y, std::size_t y_stride,
                                int rows) {
  constexpr int most = kMostRows<B>;
  int t = 0;
  for (; t + most <= rows; t += most)
    multiply_rows<W, B, most>(x + t * t_stride, t_stride, c_stride, w, count, y + t * y_stride,
                              y_stride);
  for (; most > 4 && t + 4 <= rows; t += 4)
    multiply_rows<W, B, 4>(x + t * t_stride, t_stride, c_stride, w, count, y + t * y_stride,
                           y_stride);
  for (; t < rows; ++t)
    multiply_rows<W, B, 1>(x + t * t_stride, t_stride, c_stride, w, count, y + t * y_stride,
                           y_stride);
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
