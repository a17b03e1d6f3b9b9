// binary: out = function(x, y) for every element, x and y broadcast to out's shape.
//
// Layouts: out, [dims], x and y through strides of their own (ops/strided.h); float32.
// out may be x or y where that has its shape and strides.
#pragma once

#include "ops/functions.h"
#include "ops/strided.h"
#include "runtime/stream.h"

namespace cnn_engine {

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
  std::int64_t out_strides[kMaxDims];  // of distinct elements

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
