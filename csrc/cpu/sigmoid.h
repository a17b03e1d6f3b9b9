// sigmoid, swish and gelu of 16 numbers at once, with what AVX-512 has for them: 2^k in one
// instruction, subnormal numbers too, and a division that other instructions run beside. Included
// only by files that are compiled once for each instruction set.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include <cstdint>

#include "cpu/math.h"
#include "ops/unary.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr __mmask16 kLanes = 0xffff;  // without a mask GCC 12 warns of an operand that it made up

// exp(-x), held where it is 0; infinity below -88.7. A NaN stays, as it is the second operand.
inline __attribute__((always_inline)) __m512 exp_of_minus16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), shift = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23
  x = _mm512_maskz_min_ps(kLanes, _mm512_set1_ps(120.0f), x);
  const __m512 k = _mm512_sub_ps(_mm512_fnmadd_ps(x, _mm512_set1_ps(1.44269504f), shift), shift);
  // -x = k ln 2 - r, with ln 2 in two parts, of which the first times k is exact.
  __m512 r = _mm512_fmadd_ps(k, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(k, _mm512_set1_ps(0.00021219444f), r);
  __m512 q = _mm512_set1_ps(0.0013926184f);
  q = _mm512_fnmadd_ps(q, r, _mm512_set1_ps(0.008363179f));
  q = _mm512_fnmadd_ps(q, r, _mm512_set1_ps(0.041666556f));
  q = _mm512_fnmadd_ps(q, r, _mm512_set1_ps(0.16666576f));
  q = _mm512_fnmadd_ps(q, r, _mm512_set1_ps(0.5f));
  const __m512 p = _mm512_fmsub_ps(_mm512_mul_ps(r, r), q, r);
  return _mm512_maskz_scalef_ps(kLanes, _mm512_add_ps(one, p), k);
}

// sigmoid(alpha * x), times x with `times`: a quotient by 1 + exp(-alpha * x) where that is finite.
template <bool times>
inline __attribute__((always_inline)) __m512 sigmoid16(__m512 x, __m512 alpha) {
  const __m512 one = _mm512_set1_ps(1.0f), least = _mm512_set1_ps(-88.0f);
  const __m512 at = _mm512_mul_ps(alpha, x);
  __m512 above = times ? x : one, e = exp_of_minus16(at);
  const __mmask16 small = _mm512_cmp_ps_mask(at, least, _CMP_LT_OQ);
  if (__builtin_expect(small, 0)) {
    // There both are multiplied by exp(alpha * x).
    const __m512 other = exp_of_minus16(_mm512_mask_sub_ps(at, small, _mm512_setzero_ps(), at));
    above = _mm512_mask_mul_ps(above, small, above, other);
    e = _mm512_mask_mov_ps(e, small, other);
  }
  return _mm512_div_ps(above, _mm512_add_ps(one, e));
}

// math::gelu32, whose square's lost bits one instruction finds.
inline __attribute__((always_inline)) __m512 gelu16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), half = _mm512_set1_ps(0.5f), size = _mm512_abs_ps(x);
  const __m512 t = _mm512_maskz_min_ps(kLanes, _mm512_set1_ps(math::kMostOfGelu), size);
  const __m512 near = _mm512_set1_ps(math::kNearGelu);
  const __m512 v = _mm512_div_ps(one, _mm512_fmadd_ps(t, near, one));
  __m512 y = _mm512_set1_ps(math::kGelu[0]);
#pragma GCC unroll 9
  for (int i = 1; i < 10; ++i) y = _mm512_fmadd_ps(y, v, _mm512_set1_ps(math::kGelu[i]));
  y = _mm512_mul_ps(y, t);
  const __m512 square = _mm512_mul_ps(t, t), exponent = _mm512_mul_ps(square, half);
  const __m512 more = _mm512_mul_ps(exponent, _mm512_set1_ps(math::kMoreOfGelu));
  const __m512 lost = _mm512_fmadd_ps(_mm512_fmsub_ps(t, t, square), half, more);
  const __m512 tail = _mm512_mul_ps(y, exp_of_minus16(exponent));
  const __m512 positive = _mm512_fmadd_ps(half, x, _mm512_mul_ps(half, size));
  return _mm512_sub_ps(positive, _mm512_fnmadd_ps(tail, lost, tail));
}

// y[i] = of(x[i]).
template <typename Of>
inline __attribute__((always_inline)) void by_sixteens(const float* x, float* y, std::int64_t size,
                                                       const Of& of) {
  std::int64_t i = 0;
  for (; i + 16 <= size; i += 16) _mm512_storeu_ps(y + i, of(_mm512_loadu_ps(x + i)));
  if (i == size) return;
  const auto rest = static_cast<__mmask16>((1u << (size - i)) - 1);
  _mm512_mask_storeu_ps(y + i, rest, of(_mm512_maskz_loadu_ps(rest, x + i)));
}

// sigmoid, times x with `times` (swish: `alpha` is a factor of the sigmoid's x).
template <bool times>
void sigmoids(const float* x, float* y, std::int64_t size, float alpha) {
  const __m512 factor = _mm512_set1_ps(times ? alpha : 1.0f);
  by_sixteens(x, y, size, [=](__m512 some) __attribute__((always_inline)) {
    return sigmoid16<times>(some, factor);
  });
}
void gelus(const float* x, float* y, std::int64_t size, float) {
  by_sixteens(x, y, size, [](__m512 some) __attribute__((always_inline)) { return gelu16(some); });
}

// The function above that computes `function`, or null.
inline auto sixteens_of(UnaryFunction function) {
  return function == UnaryFunction::swish     ? sigmoids<true>
         : function == UnaryFunction::sigmoid ? sigmoids<false>
         : function == UnaryFunction::gelu    ? gelus
                                              : nullptr;
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
#endif
