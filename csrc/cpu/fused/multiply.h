// The inner loop of every fused layer with weights: y[t, k] = sum over c of x[t, c] * w[c, k], in
// the order of c, with k on SIMD lanes, `T` rows and `B` vectors of k held in registers. Included
// only by files that are compiled once for each instruction set.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

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

#if defined(__AVX512F__)
// y[t, k] of 16 k and of four more, of which a vector holds four rows: [row, c] of four c, times
// four vectors of weights, w[c, (c + j) % 4] for j < 4, whose sums are turned back at the end. So
// four values of four rows take four multiplications more, where a narrow vector takes 16. Rows
// past the last are the last again. `count` is a multiple of 4; w is [count / 4][4 * 16 + 4 * 4].
template <int T>
CNN_ENGINE_INLINE void multiply_rows_of_20(const float* x, std::size_t t_stride, const float* w,
                                           int count, float* y, std::size_t y_stride, int rows) {
  const float* from[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) from[t] = x + (t < rows ? t : rows - 1) * t_stride;
  __m512 wide[T], turned[T / 4][4];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) wide[t] = turned[t / 4][t % 4] = _mm512_setzero_ps();
  for (std::ptrdiff_t c = 0; c < count; c += 4, w += 80) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 weights = _mm512_loadu_ps(w + i * 16);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        wide[t] = _mm512_fmadd_ps(weights, _mm512_set1_ps(from[t][c + i]), wide[t]);
      }
    }
    __m512 values[T / 4];
#pragma GCC unroll 2
    for (int g = 0; g < T / 4; ++g) {
      const float* const* four = from + 4 * g;
      __m512 all = _mm512_broadcast_f32x4(_mm_loadu_ps(four[0] + c));
      all = _mm512_mask_broadcast_f32x4(all, 0x00f0, _mm_loadu_ps(four[1] + c));
      all = _mm512_mask_broadcast_f32x4(all, 0x0f00, _mm_loadu_ps(four[2] + c));
      values[g] = _mm512_mask_broadcast_f32x4(all, 0xf000, _mm_loadu_ps(four[3] + c));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512 weights = _mm512_broadcast_f32x4(_mm_loadu_ps(w + 64 + 4 * j));
#pragma GCC unroll 2
      for (int g = 0; g < T / 4; ++g) {
        turned[g][j] = _mm512_fmadd_ps(weights, values[g], turned[g][j]);
      }
    }
  }
  float rest[T][4];
#pragma GCC unroll 2
  for (int g = 0; g < T / 4; ++g) {
    const __m512 odd =
        _mm512_add_ps(_mm512_permute_ps(turned[g][1], 0x93), _mm512_permute_ps(turned[g][3], 0x39));
    const __m512 even = _mm512_add_ps(turned[g][0], _mm512_permute_ps(turned[g][2], 0x4e));
    _mm512_storeu_ps(rest[4 * g], _mm512_add_ps(even, odd));
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    if (t >= rows) break;
    _mm512_storeu_ps(y + t * y_stride, wide[t]);
    _mm256_storeu_ps(y + t * y_stride + 16, _mm256_zextps128_ps256(_mm_loadu_ps(rest[t])));
  }
}
#endif

// Of a block of 20 k, see above, in three narrow vectors of y.
CNN_ENGINE_INLINE void multiply_20([[maybe_unused]] const float* x,
                                   [[maybe_unused]] std::size_t t_stride,
                                   [[maybe_unused]] const float* w, [[maybe_unused]] int count,
                                   [[maybe_unused]] float* y, [[maybe_unused]] std::size_t y_stride,
                                   [[maybe_unused]] int rows) {
#if defined(__AVX512F__)
  for (; rows > 4; rows -= 8, x += 8 * t_stride, y += 8 * y_stride) {
    multiply_rows_of_20<8>(x, t_stride, w, count, y, y_stride, rows);
  }
  if (rows > 0) multiply_rows_of_20<4>(x, t_stride, w, count, y, y_stride, rows);
#endif
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
