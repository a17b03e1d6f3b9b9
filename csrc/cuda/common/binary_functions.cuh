// The functions of two numbers on CUDA, each as a type with `of`, and by their number.
#pragma once

#include "ops/functions.h"

namespace cnn_engine::cuda {

#define CNN_ENGINE_FUNCTION(name, expression)                           \
  struct binary_##name {                                                \
    static __device__ float of(float x, float y) { return expression; } \
  };

// Never one instruction with another function: what several in a row make has the bits of each by
// itself.
CNN_ENGINE_FUNCTION(add, __fadd_rn(x, y))
CNN_ENGINE_FUNCTION(sub, __fsub_rn(x, y))
CNN_ENGINE_FUNCTION(mul, __fmul_rn(x, y))
CNN_ENGINE_FUNCTION(div, x / y)
CNN_ENGINE_FUNCTION(pow, powf(x, y))
// Of two numbers with a NaN among them no comparison is true.
CNN_ENGINE_FUNCTION(max, x > y || x != x ? x : y)
CNN_ENGINE_FUNCTION(min, x < y || x != x ? x : y)
CNN_ENGINE_FUNCTION(fmod, fmodf(x, y))
CNN_ENGINE_FUNCTION(prelu, x < 0.0f ? x * y : x)
#undef CNN_ENGINE_FUNCTION

struct binary_mod {
  static __device__ float of(float x, float y) {
    const float rest = fmodf(x, y);
    if (rest == 0.0f) return copysignf(0.0f, y);
    return (rest < 0.0f) != (y < 0.0f) ? rest + y : rest;
  }
};

__device__ inline float binary_of(BinaryFunction function, float x, float y) {
  switch (function) {
#define CNN_ENGINE_CASE(name) \
  case BinaryFunction::name:  \
    return binary_##name::of(x, y);
    CNN_ENGINE_BINARY_FUNCTIONS(CNN_ENGINE_CASE)
#undef CNN_ENGINE_CASE
  }
  return 0.0f;
}

}  // namespace cnn_engine::cuda
