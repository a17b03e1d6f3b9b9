// exp and tanh on SIMD lanes: within a few units in the last place of float32.
// Included only by files that are compiled once for each instruction set.
#pragma once

#include "cpu/fused/vector.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2, with the polynomial of Cephes' expf. Below -87 the result
// is that of -87, about 1e-38; above 88 that of 88.
template <int W>
CNN_ENGINE_INLINE Vec<W> exponential(Vec<W> x) {
  using V = Vec<W>;
  x = x > 88.0f ? V{} + 88.0f : x;
  x = x < -87.0f ? V{} - 87.0f : x;
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const V shifted = x * 1.44269504088896341f + magic;
  const V n = shifted - magic;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const IntVec<W> exponent = __builtin_convertvector(n, IntVec<W>) + 127;
  return p * reinterpret_cast<V>(exponent << 23);
}

template <int W>
CNN_ENGINE_INLINE Vec<W> hyperbolic_tangent(Vec<W> x) {
  using V = Vec<W>;
  const V magnitude = x < 0.0f ? -x : x;
  const V large = 1.0f - 2.0f / (exponential<W>(magnitude + magnitude) + 1.0f);
  const V s = x * x;
  V p = s * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * s - 5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  const V small = (p * s) * x + x;
  return magnitude < 0.625f ? small : (x < 0.0f ? -large : large);
}

template <int W>
CNN_ENGINE_INLINE Vec<W> activated(Activation activation, Vec<W> x) {
  switch (activation) {
    case Activation::relu:
      return maximum(Vec<W>{}, x);
    case Activation::tanh:
      return hyperbolic_tangent<W>(x);
    case Activation::none:
      break;
  }
  return x;
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
