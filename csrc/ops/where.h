// where: out = condition ? x : y for every element, all three broadcast to out's shape.
//
// Layouts: out C-contiguous, [dims]; the others through strides of their own (ops/strided.h);
// condition uint8 (0 is false), x, y and out float32. out may be x or y where that is C-contiguous
// in out's shape.
#pragma once

#include "ops/strided.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct WhereShape {
  std::int64_t dims[kMaxDims];               // of out; 1 in front where there are fewer
  std::int64_t condition_strides[kMaxDims];  // elements
  std::int64_t x_strides[kMaxDims];
  std::int64_t y_strides[kMaxDims];

  void validate() const { require_dims(dims); }
};

namespace cpu {
void where(const std::uint8_t* condition, const float* x, const float* y, float* out,
           const WhereShape& shape, int threads);
}
namespace cuda {
void where(const std::uint8_t* condition, const float* x, const float* y, float* out,
           const WhereShape& shape, Stream stream);
}
}  // namespace cnn_engine
