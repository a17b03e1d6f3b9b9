// Functions of float32 numbers, computed in float64 without branches so that the compiler
// vectorises loops over them. Their relative error is below 2^-31 wherever float32 has numbers, so
// that what is rounded to float32 is as good as correctly rounded; NaN gives NaN.
//
// Where an instruction set is compiled (CNN_ENGINE_ISA), and never out of line: see
// runtime/shape.h. Coefficients: polynomials through Chebyshev's nodes, computed with 50 digits.
#pragma once

#include <cstdint>

namespace cnn_engine::cpu::CNN_ENGINE_ISA::math {

#define CNN_ENGINE_MATH static inline __attribute__((always_inline)) double

// Unsigned, as what is shifted and added below may pass over the highest bit.
static inline __attribute__((always_inline)) std::uint64_t bits_of(double x) {
  return __builtin_bit_cast(std::uint64_t, x);
}
CNN_ENGINE_MATH from_bits(std::uint64_t bits) { return __builtin_bit_cast(double, bits); }

// x held between two numbers; NaN stays NaN, for which every comparison is false.
CNN_ENGINE_MATH clamp(double x, double lowest, double highest) {
  const double low = x < lowest ? lowest : x;
  return low > highest ? highest : low;
}

// exp(x) - 1 in two parts: 2^k and 2^k (exp(r) - 1), with x = k ln 2 + r and |r| <= ln 2 / 2. x is
// first held where 2^k is a normal double: past it float32 has only 0 and infinity.
struct Exponential {
  double power;  // 2^k
  double rest;   // 2^k (exp(r) - 1)
};
static inline __attribute__((always_inline)) Exponential exponential(double x) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52: what is added to it is rounded
  x = clamp(x, -400.0, 400.0);
  const double shifted = x * 1.4426950408889634 + kShift;
  const double r = x - (shifted - kShift) * 0.6931471805599453;
  double q = 2.4869190885249283e-05;
  q = q * r + 0.0001990043050723607;
  q = q * r + 0.0013888837107411175;
  q = q * r + 0.00833329708013177;
  q = q * r + 0.04166666679355877;
  q = q * r + 0.16666666722192627;
  q = q * r + 0.49999999999951417;
  const double power = from_bits((bits_of(shifted) + 1023) << 52);
  return {power, power * (r + r * r * q)};
}

// Exactly 0 and infinity where it is nothing else in float32, so that -inf * exp(-inf) is NaN.
CNN_ENGINE_MATH exp(double x) {
  const Exponential e = exponential(x);
  const double low = x < -400.0 ? 0.0 : e.power + e.rest;
  return x > 400.0 ? __builtin_inf() : low;
}

CNN_ENGINE_MATH expm1(double x) {
  const Exponential e = exponential(x);
  return e.power - 1.0 + e.rest;
}

// The natural logarithm of a double that is neither subnormal nor infinite; x > 0.
CNN_ENGINE_MATH log_of_positive(double x) {
  constexpr std::uint64_t kRootHalf = 0x3fe6a09e667f3bcd;  // sqrt(1/2)
  constexpr std::uint64_t kOne = 0x3ff0000000000000;
  constexpr std::uint64_t kTwo52 = 0x4330000000000000;
  // x = 2^e m with m between sqrt(1/2) and sqrt(2); the exponent without its bias is put into the
  // last bits of 2^52 to become a double.
  const std::uint64_t moved = bits_of(x) + (kOne - kRootHalf);
  const double e = from_bits(moved >> 52 | kTwo52) - (4503599627370496.0 + 1023.0);
  const double m = from_bits((moved & 0x000fffffffffffff) + kRootHalf);
  const double s = (m - 1.0) / (m + 1.0);  // log m = 2 atanh s
  const double t = s * s;
  double q = 0.09681989652673471;
  q = q * t + 0.11095663374306322;
  q = q * t + 0.14285877912843856;
  q = q * t + 0.19999999395089074;
  q = q * t + 0.33333333333690635;
  return e * 0.6931471805599453 + 2.0 * (s + s * t * q);
}

CNN_ENGINE_MATH log(double x) {
  const double infinity = __builtin_inf();
  const double ordinary = log_of_positive(x);
  const double positive = x == infinity ? infinity : ordinary;
  const double defined = x > 0.0 ? positive : __builtin_nan("");
  return x == 0.0 ? -infinity : defined;
}

// log(1 + x) for x from 0 to a float32's highest.
CNN_ENGINE_MATH log1p_of_positive(double x) {
  const double y = 1.0 + x;
  return log_of_positive(y) - ((y - 1.0) - x) / y;  // what was rounded away in y
}

CNN_ENGINE_MATH magnitude(double x) { return __builtin_fabs(x); }

CNN_ENGINE_MATH tanh(double x) {
  // Past 20 it is 1 in float32; expm1 keeps the digits of small numbers.
  const double e = expm1(2.0 * clamp(x, -20.0, 20.0));
  return e / (e + 2.0);
}

CNN_ENGINE_MATH sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

// log(1 + exp(x)): the larger of x and 0, and what is above it.
CNN_ENGINE_MATH softplus(double x) {
  return (x < 0.0 ? 0.0 : x) + log1p_of_positive(exp(-magnitude(x)));
}

// 1 - erf(z) for z >= 0, as t exp(-z^2 + P(t)) with t = 2 / (2 + z); past 10.5 it is 0 in float32.
CNN_ENGINE_MATH erfc_of_positive(double z) {
  const double near = clamp(z, 0.0, 10.5);
  const double t = 2.0 / (2.0 + near);
  double p = 0.18581162413069582;
  p = p * t - 1.3723493252342507;
  p = p * t + 4.391175847694679;
  p = p * t - 7.866347005136808;
  p = p * t + 8.51723495281733;
  p = p * t - 5.732661532318938;
  p = p * t + 2.6492573919922604;
  p = p * t - 1.0656824755797305;
  p = p * t + 0.13302170222660514;
  p = p * t + 0.04742536778942542;
  p = p * t + 0.3788636306604493;
  p = p * t + 0.9997550215094353;
  p = p * t - 1.2655052003788005;
  return t * exp(p - near * near);
}

CNN_ENGINE_MATH erf(double x) {
  const double z = magnitude(x);
  const double s = x * x;
  double q = -1.1673210501927648e-05;
  q = q * s + 0.000117711616764358;
  q = q * s - 0.0008535105033679565;
  q = q * s + 0.005223633708895978;
  q = q * s - 0.026866121846048592;
  q = q * s + 0.1128379133004145;
  q = q * s - 0.37612638894096084;
  q = q * s + 1.1283791670951147;
  const double above = 1.0 - erfc_of_positive(z);
  const double far = x < 0.0 ? -above : above;
  return z < 0.75 ? x * q : far;
}

#undef CNN_ENGINE_MATH

// In float32, for what networks compute of millions of numbers: twice as many on a vector, and
// cheaper divisions. sigmoid32 is within 3 units in the last place, subnormal numbers too.

// exp(x) for x <= 0; 0 past -120. 2^k is made of two factors, as it may be below what one can be.
static inline __attribute__((always_inline)) float exp_of_negative(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
  x = x < -120.0f ? -120.0f : x;
  const float shifted = x * 1.44269504f + kShift;
  const float k = shifted - kShift;
  // ln 2 in two parts, of which the first times k is exact.
  const float r = (x - k * 0.693359375f) + k * 0.00021219444f;
  float q = 0.0013926184f;
  q = q * r + 0.008363179f;
  q = q * r + 0.041666556f;
  q = q * r + 0.16666576f;
  q = q * r + 0.5f;
  const float rest = 1.0f + (r + r * r * q);
  const auto power = __builtin_bit_cast(std::uint32_t, shifted) - 0x4b400000u;  // k; 0 or negative
  const std::uint32_t half = power >> 1;  // of its 9 last bits, which alone stay
  const float first = __builtin_bit_cast(float, (half + 127u) << 23);
  const float second = __builtin_bit_cast(float, (power - half + 127u) << 23);
  return rest * first * second;
}

static inline __attribute__((always_inline)) float sigmoid32(float x) {
  const float small = exp_of_negative(-__builtin_fabsf(x));
  return (x < 0.0f ? small : 1.0f) / (1.0f + small);
}

// x times the normal distribution's integral up to x, within 5 units in the last place: max(x, 0)
// less |x| times that from t = |x| on, which is exp(-t^2 / 2) times a polynomial in 1 / (1 + 0.26
// t) that is within 2^-26. t^2 / 2 is two numbers, as its rounding would be as much of the result.
constexpr float kMostOfGelu = 15.0f, kNearGelu = 0.26f;
constexpr float kGelu[] = {0.0339164361f, -0.170465693f,   0.29085803f,  -0.200648561f,
                           0.199987963f,  0.0312707573f,   0.109464243f, 0.1017171f,
                           0.103907011f,  -7.28385658e-06f};
// The polynomial is one for exp(-t^2 / 2 (1 + kMoreOfGelu)), as GPUs have that.
constexpr float kMoreOfGelu = -1.33497582e-08f;
static inline __attribute__((always_inline)) float gelu32(float x) {
  const float size = __builtin_fabsf(x), t = size > kMostOfGelu ? kMostOfGelu : size;
  const float v = 1.0f / (1.0f + kNearGelu * t);
  float y = kGelu[0];
#pragma GCC unroll 9
  for (int i = 1; i < 10; ++i) y = y * v + kGelu[i];
  y *= t;
  // Of t, 12 bits, whose square is exact, and the others.
  const float high = __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, t) & 0xfffff000u);
  const float square = 0.5f * (high * high), more = 0.5f * ((t - high) * (t + high));
  const float exponent = square + more;
  const float lost = more - (exponent - square) + kMoreOfGelu * exponent;
  const float tail = y * exp_of_negative(-exponent);
  return (0.5f * x + 0.5f * size) - (tail - tail * lost);
}

static inline __attribute__((always_inline)) float clamp32(float x, float lowest, float highest) {
  const float low = x < lowest ? lowest : x;
  return low > highest ? highest : low;
}

// x / 6 of a finite x by a product: 1/6 in two parts, as the rounding of one is the same way in
// every layer.
static inline __attribute__((always_inline)) float sixth32(float x) {
  constexpr float kHigh = 1.0f / 6.0f;
  constexpr float kLow = static_cast<float>(1.0 / 6.0 - static_cast<double>(kHigh));
  return x * kHigh + x * kLow;
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA::math
