// math::sigmoid32 of 16 numbers, with what AVX-512 has for it: 2^k in one instruction, subnormal
// numbers too, and reciprocals from 14 bits on, in half the time. Included only by files that are
// compiled once for each instruction set.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include <cstdint>

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

inline __attribute__((always_inline)) __m512 sigmoid16(__m512 x) {
  constexpr __mmask16 kAll = 0xffff;  // without a mask GCC 12 warns of an operand that it made up
  const __m512 one = _mm512_set1_ps(1.0f);
  // -|x|, held where its exponential is 0; a NaN stays, as it is the second operand.
  __m512 z = _mm512_or_ps(x, _mm512_set1_ps(-0.0f));
  z = _mm512_maskz_max_ps(kAll, _mm512_set1_ps(-120.0f), z);
  const __m512 shift = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23
  const __m512 k = _mm512_sub_ps(_mm512_fmadd_ps(z, _mm512_set1_ps(1.44269504f), shift), shift);
  __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(0.693359375f), z);
  r = _mm512_fmadd_ps(k, _mm512_set1_ps(0.00021219444f), r);
  __m512 q = _mm512_set1_ps(0.0013926184f);
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.008363179f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.041666556f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.16666576f));
  q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.5f));
  const __m512 p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), q, r);
  const __m512 rest = _mm512_add_ps(one, p);
  const __m512 small = _mm512_maskz_scalef_ps(kAll, rest, k);
  const __m512 sum = _mm512_add_ps(one, small);
  // What the rounding of the sum leaves out.
  const __m512 sum_low = _mm512_sub_ps(small, _mm512_sub_ps(sum, one));
  const __m512 near = _mm512_maskz_rcp14_ps(kAll, sum);
  const __m512 error = _mm512_fnmadd_ps(sum_low, near, _mm512_fnmadd_ps(sum, near, one));
  const __m512 inverse = _mm512_fmadd_ps(near, error, near);
  const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
  return _mm512_mul_ps(_mm512_mask_blend_ps(negative, one, small), inverse);
}

// y[i] = sigmoid(x[i]), times x[i] with `times` (swish: `alpha` is a factor of the sigmoid's x).
template <bool times>
void sigmoids(const float* x, float* y, std::int64_t size, float alpha) {
  const __m512 factor = _mm512_set1_ps(alpha);
  const auto of = [=](__m512 value) {
    return times ? _mm512_mul_ps(value, sigmoid16(_mm512_mul_ps(factor, value))) : sigmoid16(value);
  };
  std::int64_t i = 0;
  for (; i + 16 <= size; i += 16) _mm512_storeu_ps(y + i, of(_mm512_loadu_ps(x + i)));
  if (i == size) return;
  const auto rest = static_cast<__mmask16>((1u << (size - i)) - 1);
  _mm512_mask_storeu_ps(y + i, rest, of(_mm512_maskz_loadu_ps(rest, x + i)));
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
#endif
