// binary: out = function(x, y) for every element, x and y broadcast to out's shape.
//
// Layouts: out C-contiguous, [dims]; x and y through strides of their own (ops/strided.h); float32.
// out may be x or y where that is C-contiguous in out's shape.
#pragma once

#include "ops/strided.h"
#include "runtime/stream.h"

namespace cnn_engine {

#define CNN_ENGINE_BINARY_FUNCTIONS(F)                             \
  F(add)                                                           \
  F(sub)                                                           \
  F(mul)                                                           \
  F(div)                                                           \
  F(pow)                                                           \
  F(max)   /* NaN where either is */                               \
  F(min)   /* NaN where either is */                               \
  F(mod)   /* x - floor(x / y) * y: the sign of y, as in Python */ \
  F(fmod)  /* x - trunc(x / y) * y: the sign of x, as in C */      \
  F(prelu) /* x, or y * x below 0 */

enum class BinaryFunction {
#define CNN_ENGINE_NAME(name) name,
  CNN_ENGINE_BINARY_FUNCTIONS(CNN_ENGINE_NAME)
#undef CNN_ENGINE_NAME
};

// As Python names it; null for what is no function.
inline const char* name_of(BinaryFunction function) {
  switch (function) {
#define CNN_ENGINE_NAME(name) \
  case BinaryFunction::name:  \
    return #name;
    CNN_ENGINE_BINARY_FUNCTIONS(CNN_ENGINE_NAME)
#undef CNN_ENGINE_NAME
  }
  return nullptr;
}

struct BinaryShape {
  std::int64_t dims[kMaxDims];       // of out; 1 in front where there are fewer
  std::int64_t x_strides[kMaxDims];  // elements
  std::int64_t y_strides[kMaxDims];

  void validate() const { require_dims(dims); }
};

namespace cpu {
void binary(const float* x, const float* y, float* out, const BinaryShape& shape,
            BinaryFunction function, int threads);
}
namespace cuda {
void binary(const float* x, const float* y, float* out, const BinaryShape& shape,
            BinaryFunction function, Stream stream);
}
}  // namespace cnn_engine
