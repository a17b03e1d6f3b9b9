// unary: y[i] = function(x[i]); alpha and beta are the function's two numbers.
//
// Layouts: any, C-contiguous, taken as [size]; float32; y may be x. NaN gives NaN (0 in
// thresholded_relu and shrink: no comparison holds), infinities what the formula gives; errors are
// a few units in the last place.
#pragma once

#include "ops/functions.h"
#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

// As Python names it; null for what is no function.
inline const char* name_of(UnaryFunction function) {
  switch (function) {
#define CNN_ENGINE_NAME(name) \
  case UnaryFunction::name:   \
    return #name;
    CNN_ENGINE_UNARY_FUNCTIONS(CNN_ENGINE_NAME)
#undef CNN_ENGINE_NAME
  }
  return nullptr;
}

namespace cpu {
void unary(const float* input,  // [size]
           float* output,       // [size]
           std::int64_t size, UnaryFunction function, float alpha, float beta, int threads);
}
namespace cuda {
void unary(const float* input,  // [size]
           float* output,       // [size]
           std::int64_t size, UnaryFunction function, float alpha, float beta, Stream stream);
}
}  // namespace cnn_engine
