// The functions of binary.h on CUDA.
#pragma once

#include "cuda/common/strided.cuh"
#include "ops/binary.h"

namespace cnn_engine::cuda {

#define CNN_ENGINE_FUNCTION(name, expression)                           \
  struct binary_##name {                                                \
    static __device__ float of(float x, float y) { return expression; } \
  };

CNN_ENGINE_FUNCTION(add, x + y)
CNN_ENGINE_FUNCTION(sub, x - y)
CNN_ENGINE_FUNCTION(mul, (x * y))
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

// Has a walk over the result, x and y go in groups of four, where all three are repeated or side by
// side in the last dimension, and each group starts where four can be read at once; returns whether
// it does. `aligned`: whether each of the tensors starts so.
inline bool take_fours(Strided<3>& walk, const bool (&aligned)[3]) {
  const int last = walk.rank - 1;
  if (last < 0 || walk.dims[last] % 4 != 0) return false;
  for (int k = 0; k < 3; ++k) {
    const std::int64_t* const strides = walk.strides[k];
    if (strides[last] == 0) continue;
    if (strides[last] != 1 || !aligned[k]) return false;
    for (int d = 0; d < last; ++d) {
      if (strides[d] % 4 != 0) return false;
    }
  }
  walk.dims[last] /= 4;
  walk.size /= 4;
  for (int k = 0; k < 3; ++k) walk.strides[k][last] *= 4;
  return true;
}

// The walk of a call over its result, x and y.
inline Strided<3> walk_of(const BinaryShape& shape) {
  std::int64_t strides[3][kMaxDims];
  row_major(shape.dims, strides[0]);
  for (int d = 0; d < kMaxDims; ++d) {
    strides[1][d] = shape.x_strides[d];
    strides[2][d] = shape.y_strides[d];
  }
  return collapse<3>(shape.dims, strides);
}

}  // namespace cnn_engine::cuda
