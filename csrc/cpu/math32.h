// Functions of float32 numbers within a few units in the last place, without branches, so that the
// compiler vectorises loops over them: exp32, tanh32 and erf32 in float32, sines and arctangents in
// float64, which their reductions need. NaN gives NaN.
//
// Where an instruction set is compiled (CNN_ENGINE_ISA), and never out of line: see
// runtime/shape.h. Coefficients: polynomials through Chebyshev's nodes, computed with 40 digits.
#pragma once

#include "cpu/math.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA::math {

#define CNN_ENGINE_MATH32 static inline __attribute__((always_inline)) float

// exp(x) = 2^k y with y between sqrt(1/2) and sqrt(2); the bits of `shifted` end in k's.
struct Exponential32 {
  float y, shifted;
};
static inline __attribute__((always_inline)) Exponential32 exponential32(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded
  const float shifted = x * 1.44269504f + kShift;
  const float k = shifted - kShift;
  // ln 2 in two parts, of which the first times k is exact.
  const float r = (x - k * 0.693359375f) + k * 0.00021219444f;
  float q = 0.000198910805f;
  q = q * r + 0.00139337307f;
  q = q * r + 0.00833331085f;
  q = q * r + 0.0416664642f;
  q = q * r + 0.166666667f;
  q = q * r + 0.5f;
  return {1.0f + (r + r * r * q), shifted};
}

// exp(x), within a unit; 0 and infinity where float32 has nothing else.
CNN_ENGINE_MATH32 exp32(float x) {
  const Exponential32 e = exponential32(clamp32(x, -120.0f, 100.0f));
  // 2^k as two factors: k is up to 173 to either side.
  const auto power = __builtin_bit_cast(std::uint32_t, e.shifted) - 0x4b400000u;
  const std::uint32_t half = power >> 1;  // of its 9 last bits, which alone stay
  const float first = __builtin_bit_cast(float, (half + 127u) << 23);
  const float second = __builtin_bit_cast(float, (power - half + 127u) << 23);
  return e.y * first * second;
}

// exp(x) for |x| up to 80.
CNN_ENGINE_MATH32 exp32_within(float x) {
  const Exponential32 e = exponential32(x);
  return e.y *
         __builtin_bit_cast(float, (__builtin_bit_cast(std::uint32_t, e.shifted) + 127u) << 23);
}

// tanh(x), within 1.5 units: odd powers where x is small, else by exp(2 |x|); past 10 it is 1.
CNN_ENGINE_MATH32 tanh32(float x) {
  const float size = __builtin_fabsf(x), s = x * x;
  float p = 0.00237076564f;
  p = p * s - 0.00841007080f;
  p = p * s + 0.0217883220f;
  p = p * s - 0.0539615518f;
  p = p * s + 0.133333129f;
  p = p * s - 0.333333332f;
  const float near = size + size * (s * p);
  const float far = 1.0f - 2.0f / (exp32_within(2.0f * (size > 10.0f ? 10.0f : size)) + 1.0f);
  return __builtin_copysignf(size < 0.6f ? near : far, x);
}

// erf(x), within 1.5 units: odd powers, or 1 - exp(a polynomial of |x|); past 4 it is 1.
CNN_ENGINE_MATH32 erf32(float x) {
  const float size = __builtin_fabsf(x), s = x * x;
  float p = 8.52940132e-05f;
  p = p * s - 0.000817963218f;
  p = p * s + 0.00520422669f;
  p = p * s - 0.0268606648f;
  p = p * s + 0.11283718f;
  p = p * s - 0.376126352f;
  p = p * s + 0.128379167f;  // and 1, below
  const float near = size + size * p;
  const float z = size > 4.0f ? 4.0f : size;
  float q = 1.64306366e-06f;
  q = q * z - 4.61638626e-05f;
  q = q * z + 0.00059758577f;
  q = q * z - 0.00476262583f;
  q = q * z + 0.0264276372f;
  q = q * z - 0.110087167f;
  q = q * z - 0.631823918f;
  q = q * z - 1.13023106f;
  q = q * z + 0.000318539662f;
  const float far = 1.0f - exp32_within(q);
  return __builtin_copysignf(size < 0.9f ? near : far, x);
}

#undef CNN_ENGINE_MATH32

// Past it, quarters of a turn are no longer counted: sine32 and cosine32 are for |x| up to it.
constexpr float kMostAngle = 1048576.0f;

// x = k pi / 2 + r with |r| <= pi / 4, and the sine and the cosine of r.
struct Angle {
  std::uint64_t quarter;  // k in the last bits
  double sine, cosine;
};
static inline __attribute__((always_inline)) Angle angle(double x) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = x * 0.6366197723675814 + kShift;
  const double k = shifted - kShift;
  // pi / 2 in two parts, of which the first, of 33 bits, times k is exact.
  const double r = (x - k * 1.5707963267341256) - k * 6.0771005065061926e-11;
  const double t = r * r;
  double s = -2.4805611712122475e-08;
  s = s * t + 2.7555990664728972e-06;
  s = s * t - 0.00019841266916110633;
  s = s * t + 0.0083333333310783229;
  s = s * t - 0.16666666666663885;
  double c = -2.7300933687212943e-07;
  c = c * t + 2.4800600180363809e-05;
  c = c * t - 0.0013888887671652504;
  c = c * t + 0.041666666664320267;
  return {bits_of(shifted), r + r * (t * s), 1.0 - 0.5 * t + t * t * c};
}

// The sine of a quarter turn more than k - 1: of the two, the one that it is, with its sign.
static inline __attribute__((always_inline)) double turned(std::uint64_t quarter, double sine,
                                                           double cosine) {
  const double value = quarter & 1 ? cosine : sine;
  return from_bits(bits_of(value) ^ (quarter & 2) << 62);
}

// Correctly rounded but for few, as all that follow.
static inline __attribute__((always_inline)) float sin32(float x) {
  const Angle a = angle(x);
  const float y = static_cast<float>(turned(a.quarter, a.sine, a.cosine));
  return x == 0.0f ? x : y;  // -0 stays
}
static inline __attribute__((always_inline)) float cos32(float x) {
  const Angle a = angle(x);
  return static_cast<float>(turned(a.quarter + 1, a.sine, a.cosine));
}
static inline __attribute__((always_inline)) float tan32(float x) {
  const Angle a = angle(x);
  const double y = turned(a.quarter, a.sine, a.cosine) / turned(a.quarter + 1, a.sine, a.cosine);
  return x == 0.0f ? x : static_cast<float>(y);
}

// atan(x): of u = |x| or 1 / |x|, whichever is below 1, by odd powers.
static inline __attribute__((always_inline)) float atan32(float x) {
  const double size = magnitude(x);
  const double u = size > 1.0 ? 1.0 / size : size, t = u * u;
  double p = 0.00059304375563652819;
  p = p * t - 0.0042216579909296478;
  p = p * t + 0.01407292334469724;
  p = p * t - 0.02991311194551696;
  p = p * t + 0.047294798621813337;
  p = p * t - 0.062463151941283169;
  p = p * t + 0.075866528336466699;
  p = p * t - 0.090735531189764087;
  p = p * t + 0.11109392308322223;
  p = p * t - 0.14285624891483526;
  p = p * t + 0.19999998154086215;
  p = p * t - 0.33333333326944142;
  const double below = u + u * (t * p);
  const double y = size > 1.0 ? 1.5707963267948966 - below : below;
  return __builtin_copysignf(static_cast<float>(y), x);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA::math
