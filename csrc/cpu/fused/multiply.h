// The inner loop of every fused layer with weights: y[t, k] = sum over c of x[t, c] * w[c, k], in
// the order of c, with k on SIMD lanes, `T` rows and `B` vectors of k held in registers. Included
// only by files that are compiled once for each instruction set.
#pragma once

#include <type_traits>

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

// The same with a wide vector of k and a narrow one, in the place of three narrow ones: to the same
// bits, and a CPU whose wide vectors take no longer does two multiplications for three.
template <int T>
CNN_ENGINE_INLINE void multiply_rows_mixed(const float* x, std::size_t t_stride,
                                           std::size_t c_stride, const float* w, int count,
                                           float* y, std::size_t y_stride) {
  Vec<kWide> wide[T] = {};
  Vec<kNarrow> narrow[T] = {};
  for (int c = 0; c < count; ++c, x += c_stride, w += kWide + kNarrow) {
    const Vec<kWide> first = load<kWide>(w);
    const Vec<kNarrow> rest = load<kNarrow>(w + kWide);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      Vec<kWide> value = splat<kWide>(x[t * t_stride]);
      keep(value);
      Vec<kNarrow> half;
      __builtin_memcpy(&half, &value, sizeof half);
      wide[t] += first * value;
      narrow[t] += rest * half;
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    store<kWide>(y + t * y_stride, wide[t]);
    store<kNarrow>(y + t * y_stride + kWide, narrow[t]);
  }
}

// Rows that fit in the registers beside the weights and one value.
template <int B>
constexpr int kMostRows = kRegisters == 32 ? (B == 1 ? 16 : 8) : (B == 1 ? 8 : 4);

template <int W, int B>
CNN_ENGINE_INLINE void multiply(const float* x, std::size_t t_stride, std::size_t c_stride,
                                const float* w, int count, float* y, std::size_t y_stride,
                                int rows) {
  constexpr bool is_mixed = B == 3 && W == kNarrow && kWide == 2 * kNarrow;
  constexpr int most = kMostRows<B>;
  int t = 0;
  const auto some = [&](auto size, int least) {
    constexpr int T = decltype(size)::value;
    for (; rows - t >= least; t += T) {
      const float* from = x + t * t_stride;
      float* to = y + t * y_stride;
      if constexpr (is_mixed) {
        multiply_rows_mixed<T>(from, t_stride, c_stride, w, count, to, y_stride);
      } else {
        multiply_rows<W, B, T>(from, t_stride, c_stride, w, count, to, y_stride);
      }
    }
  };
  if constexpr (is_mixed) some(std::integral_constant<int, 12>(), 20);
  some(std::integral_constant<int, most>(), most);
  if constexpr (most > 4) some(std::integral_constant<int, 4>(), 4);
  some(std::integral_constant<int, 1>(), 1);
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
