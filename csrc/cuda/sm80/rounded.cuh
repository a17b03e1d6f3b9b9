// Results at once: a function looked up once for all of them, and for what is kept in 16 bits
// instructions whose errors, of 2^-21, and of gelu 2^-14, rounding hides.
#pragma once

#include <type_traits>

#include "cuda/common/activation.cuh"
#include "cuda/sm80/storage.cuh"

namespace cnn_engine::cuda {

// 1 / (1 + 2^x); 2^x may be an infinity, whose reciprocal is 0.
__device__ inline float rounded_logistic(float x) {
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}

// x times the normal distribution's integral up to x: max(x, 0) less |x| times that from |x| on,
// whose logarithm is nearly a polynomial. Within 6.4e-6, and within 2^-14.6 of results from 2^-10
// on, of which float16 keeps 2^-11 and bfloat16 2^-8; 0 below -13 and of -inf.
__device__ inline float rounded_gelu(float x) {
  float size, power, positive;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(size) : "f"(fabsf(x)), "f"(16.0f));
  float exponent = fmaf(size, -0.00037580557f, 0.0063382811f);
  exponent = fmaf(exponent, size, -0.049869202f);
  exponent = fmaf(exponent, size, -0.46202734f);
  exponent = fmaf(exponent, size, -1.1500963f);
  exponent = fmaf(exponent, size, -1.0000583f);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(positive) : "f"(x), "f"(0.0f));
  return fmaf(-size, power, positive);
}

// Applies a function to values that are kept as T.
template <typename T, int n>
__device__ inline void apply(const Activation& function, float (&value)[n]) {
  constexpr bool kRounded = !std::is_same_v<T, float>;
  constexpr float kLog2E = 1.4426950408889634f;
  const float alpha = function.alpha, beta = function.beta;
  const auto each = [&](const auto& of) {
#pragma unroll
    for (int i = 0; i < n; ++i) value[i] = of(value[i]);
  };
  switch (function.function) {
    case UnaryFunction::clip:
      return each([&](float x) { return clamp(x, alpha, beta); });
    case UnaryFunction::relu:
      return each([](float x) { return unary_relu::of(x, 0.0f, 0.0f); });
    case UnaryFunction::hard_swish:
      if (!kRounded) return each([](float x) { return unary_hard_swish::of(x, 0.0f, 0.0f); });
      // A NaN is lost in the ramp, and comes back by the product.
      return each([](float x) { return x * (fminf(fmaxf(x + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f)); });
    case UnaryFunction::swish:
      if (!kRounded) return each([&](float x) { return unary_swish::of(x, alpha, 0.0f); });
      return each([by = -alpha * kLog2E](float x) { return x * rounded_logistic(x * by); });
    case UnaryFunction::gelu:
      if (!kRounded) return each([](float x) { return unary_gelu::of(x, 0.0f, 0.0f); });
      return each([](float x) { return rounded_gelu(x); });
    default:  // called, one after another
      return each([&](float x) { return unary_of(function.function, x, alpha, beta); });
  }
}

// The largest magnitude of values that are no NaN.
template <int n>
__device__ inline float largest(const float (&value)[n]) {
  float found = 0.0f;
#pragma unroll
  for (int i = 0; i < n; ++i) found = fmaxf(found, fabsf(value[i]));
  return found;
}

// store_neighbours of values of which `most` is the largest.
template <typename T, int n>
__device__ inline void store_rounded(T* to, const float (&from)[n], float most,
                                     const Overflow& overflow) {
  if (std::is_same_v<T, __half> && most >= 65520.0f) return store_neighbours(to, from, overflow);
  Neighbours<T, n> made;
#pragma unroll
  for (int i = 0; i < n; ++i) made.value[i] = narrowed<T>(from[i]);
  *reinterpret_cast<Neighbours<T, n>*>(to) = made;
}

// What was read, or zeros.
template <typename T, int n>
__device__ inline Neighbours<T, n> kept_if(bool some, const Neighbours<T, n>& read) {
  constexpr int kWords = sizeof(read) / 4;
  if constexpr (sizeof(read) % 4 == 0) {
    struct Words {
      unsigned word[kWords];
    } words;
    memcpy(&words, &read, sizeof(read));
#pragma unroll
    for (int i = 0; i < kWords; ++i) words.word[i] = some ? words.word[i] : 0u;
    Neighbours<T, n> result;
    memcpy(&result, &words, sizeof(read));
    return result;
  } else {
    Neighbours<T, n> result;
#pragma unroll
    for (int i = 0; i < n; ++i) result.value[i] = some ? read.value[i] : T(0.0f);
    return result;
  }
}

}  // namespace cnn_engine::cuda
