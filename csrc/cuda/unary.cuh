// The functions of unary.h on CUDA, each as a type with `of`, and by their number.
#pragma once

#include "ops/unary.h"

namespace cnn_engine::cuda {

// Comparisons are written so that a NaN, for which all are false, passes through.

__device__ inline float clamp(float x, float lowest, float highest) {
  const float low = x < lowest ? lowest : x;
  return low > highest ? highest : low;
}

// 1 / (1 + exp(-x)) by the exponential that does not overflow.
__device__ inline float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// a, b: alpha and beta.
#define CNN_ENGINE_FUNCTION(name, expression)                                                 \
  struct unary_##name {                                                                       \
    static __device__ float of(float x, [[maybe_unused]] float a, [[maybe_unused]] float b) { \
      return expression;                                                                      \
    }                                                                                         \
  };

CNN_ENGINE_FUNCTION(linear, (a * x + b))
CNN_ENGINE_FUNCTION(relu, x < 0.0f ? 0.0f : x)
CNN_ENGINE_FUNCTION(leaky_relu, x < 0.0f ? a * x : x)
CNN_ENGINE_FUNCTION(thresholded_relu, x > a ? x : 0.0f)
CNN_ENGINE_FUNCTION(elu, x < 0.0f ? a * expm1f(x) : x)
CNN_ENGINE_FUNCTION(selu, (b * (x < 0.0f ? a * expm1f(x) : x)))
CNN_ENGINE_FUNCTION(sigmoid, sigmoid(x))
CNN_ENGINE_FUNCTION(hard_sigmoid, clamp((a * x + b), 0.0f, 1.0f))
// x + 3 is exact near -3, where x / 6 + 1/2 would not be.
CNN_ENGINE_FUNCTION(hard_swish, (x * (clamp(x + 3.0f, 0.0f, 6.0f) / 6.0f)))
CNN_ENGINE_FUNCTION(swish, (x * sigmoid(a * x)))
CNN_ENGINE_FUNCTION(gelu, (x * normcdff(x)))
CNN_ENGINE_FUNCTION(clip, clamp(x, a, b))
CNN_ENGINE_FUNCTION(shrink, (x < -a ? x + b : (x > a ? x - b : 0.0f)))
CNN_ENGINE_FUNCTION(tanh, tanhf(x))
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
