// The functions of unary.h on CUDA, each as a type with `of`, and by their number.
#pragma once

#include "cuda/common/extremes.cuh"
#include "ops/functions.h"

namespace cnn_engine::cuda {

// A NaN passes through all of them.

__device__ inline float clamp(float x, float lowest, float highest) {
  return min_nan(max_nan(x, lowest), highest);
}

// 1 / (1 + exp(-x)), of e = exp(-|x|): |x| = -(n log(2) + r), 2^n from its bits and exp(r) by a
// polynomial within 2^-28. Half as long as expf and a division, whose e is 0.1 of 2^-24 too large
// on average (H100), and to either side.
__device__ inline float sigmoid(float x) {
  constexpr float kBias = 0x1.8p23f + 151.0f;  // what is added to it is rounded to a whole number
  constexpr float kUnit = 0x1p-24f;            // of e, for numbers below 2^-126
  const float size = min_nan(fabsf(x), 104.0f);
  const float biased = fmaf(size, -1.44269504f, kBias), n = biased - kBias;
  const float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, -size));
  float e = fmaf(0.00138145406f, r, 0.00836874545f);
  e = fmaf(e, r, 0.041668389f);
  e = fmaf(e, r, 0.166665211f);
  e = fmaf(e, r, 0.49999994f);
  e = fmaf(fmaf(e, r, 1.0f), r, 1.0f) * __uint_as_float(__float_as_uint(biased) << 23);
  const float below = fmaf(e, kUnit, 1.0f);
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(below));
  quotient = fmaf(fmaf(-below, quotient, 1.0f), quotient, quotient);
  return (x < 0.0f ? e * kUnit : 1.0f) * quotient;
}

// x / 6 of 0 to 6, the nearest number as by division (tests/operators/test_unary.py).
__device__ inline float sixth(float x) {
  const float y = x * (1.0f / 6.0f);
  return fmaf(fmaf(y, -6.0f, x), 1.0f / 6.0f, y);
}

// x times the normal distribution's integral up to x: max(x, 0) less |x| times that from t = |x|
// on, which is 2^-(t^2 log2(e) / 2) times a polynomial in 1 / (1 + 0.26 t) that is within 2^-26.
// What the square loses of its bits is made good. 0 below -13.2, NaN of -inf.
__device__ inline float gelu(float x) {
  constexpr float kHalfLog2E = 0.72134752f;
  const float t = fminf(fabsf(x), 14.0f);
  float v, power;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(fmaf(t, 0.26f, 1.0f)));
  float y = fmaf(0.0339164361f, v, -0.170465693f);
  y = fmaf(y, v, 0.29085803f);
  y = fmaf(y, v, -0.200648561f);
  y = fmaf(y, v, 0.199987963f);
  y = fmaf(y, v, 0.0312707573f);
  y = fmaf(y, v, 0.109464243f);
  y = fmaf(y, v, 0.1017171f);
  y = fmaf(y, v, 0.103907011f);
  y = fmaf(y, v, -7.28385658e-6f) * t;
  const float square = t * t, exponent = square * -kHalfLog2E;
  const float lost = fmaf(fmaf(t, t, -square), -kHalfLog2E, fmaf(square, -kHalfLog2E, -exponent));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  const float positive = fmaf(0.5f, x, 0.5f * fabsf(x));
  return fmaf(-fmaf(y, 0.693147181f * lost, y), power, positive);
}

// a, b: alpha and beta.
#define CNN_ENGINE_FUNCTION(name, expression)                                                 \
  struct unary_##name {                                                                       \
    static __device__ float of(float x, [[maybe_unused]] float a, [[maybe_unused]] float b) { \
      return expression;                                                                      \
    }                                                                                         \
  };

CNN_ENGINE_FUNCTION(affine, (a * x + b))
CNN_ENGINE_FUNCTION(relu, max_nan(x, 0.0f))
CNN_ENGINE_FUNCTION(leaky_relu, x < 0.0f ? a * x : x)
CNN_ENGINE_FUNCTION(thresholded_relu, x > a ? x : 0.0f)
CNN_ENGINE_FUNCTION(elu, x < 0.0f ? a * expm1f(x) : x)
CNN_ENGINE_FUNCTION(selu, (b * (x < 0.0f ? a * expm1f(x) : x)))
CNN_ENGINE_FUNCTION(sigmoid, sigmoid(x))
CNN_ENGINE_FUNCTION(hard_sigmoid, clamp((a * x + b), 0.0f, 1.0f))
// x + 3 is exact near -3, where x / 6 + 1/2 would not be.
CNN_ENGINE_FUNCTION(hard_swish, (x * sixth(clamp(x + 3.0f, 0.0f, 6.0f))))
CNN_ENGINE_FUNCTION(swish, (x * sigmoid(a * x)))
CNN_ENGINE_FUNCTION(gelu, gelu(x))
CNN_ENGINE_FUNCTION(clip, clamp(x, a, b))
CNN_ENGINE_FUNCTION(shrink, (x < -a ? x + b : (x > a ? x - b : 0.0f)))
CNN_ENGINE_FUNCTION(tanh, tanhf(x))
CNN_ENGINE_FUNCTION(scaled_tanh, (a * tanhf(b * x)))
CNN_ENGINE_FUNCTION(erf, erff(x))
CNN_ENGINE_FUNCTION(softplus, (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x))))
CNN_ENGINE_FUNCTION(softsign, x / (1.0f + fabsf(x)))
CNN_ENGINE_FUNCTION(sqrt, sqrtf(x))
CNN_ENGINE_FUNCTION(exp, expf(x))
CNN_ENGINE_FUNCTION(log, logf(x))
CNN_ENGINE_FUNCTION(abs, fabsf(x))
CNN_ENGINE_FUNCTION(neg, -x)
CNN_ENGINE_FUNCTION(reciprocal, 1.0f / x)
CNN_ENGINE_FUNCTION(floor, floorf(x))
CNN_ENGINE_FUNCTION(ceil, ceilf(x))
CNN_ENGINE_FUNCTION(round, rintf(x))
CNN_ENGINE_FUNCTION(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x)
CNN_ENGINE_FUNCTION(sin, sinf(x))
CNN_ENGINE_FUNCTION(cos, cosf(x))
CNN_ENGINE_FUNCTION(tan, tanf(x))
CNN_ENGINE_FUNCTION(asin, asinf(x))
CNN_ENGINE_FUNCTION(acos, acosf(x))
CNN_ENGINE_FUNCTION(atan, atanf(x))
CNN_ENGINE_FUNCTION(sinh, sinhf(x))
CNN_ENGINE_FUNCTION(cosh, coshf(x))
CNN_ENGINE_FUNCTION(asinh, asinhf(x))
CNN_ENGINE_FUNCTION(acosh, acoshf(x))
CNN_ENGINE_FUNCTION(atanh, atanhf(x))
#undef CNN_ENGINE_FUNCTION

struct unary_celu {
  static __device__ float of(float x, float a, float) {
    const float below = a * expm1f(x / a);
    return (x < 0.0f ? 0.0f : x) + (below > 0.0f ? 0.0f : below);
  }
};

struct unary_mish {
  static __device__ float of(float x, float, float) {
    // tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2); past 20 the ratio is 1.
    const float e = expf(x > 20.0f ? 20.0f : x);
    const float n = e * (e + 2.0f);
    return x * (n / (n + 2.0f));
  }
};

struct unary_gelu_tanh {
  static __device__ float of(float x, float, float) {
    // (1 + tanh(u)) / 2 = sigmoid(2 u), which keeps its digits where tanh(u) is near -1.
    const float u = 0.7978845608f * (x + 0.044715f * (x * x * x));
    return x * sigmoid(2.0f * u);
  }
};

// function(x), for kernels that end in any function; one call for all that are not cheap.
static __device__ __noinline__ float unary_of(UnaryFunction function, float x, float a, float b) {
  switch (function) {
#define CNN_ENGINE_CASE(name) \
  case UnaryFunction::name:   \
    return unary_##name::of(x, a, b);
    CNN_ENGINE_UNARY_FUNCTIONS(CNN_ENGINE_CASE)
#undef CNN_ENGINE_CASE
  }
  return x;
}

}  // namespace cnn_engine::cuda
