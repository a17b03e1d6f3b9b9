// pointwise: y = several functions of unary.h and binary.h, one after another, of numbers that
// stand at the same position, in one pass over memory.
//
// Layouts: y C-contiguous, [dims]; inputs through strides of their own (ops/strided.h); float32. y
// may be an input that is C-contiguous in y's shape. Each step's result has the bits that unary and
// binary give.
#pragma once

#include "ops/binary.h"
#include "ops/unary.h"

namespace cnn_engine {

constexpr int kPointwiseInputs = 4;
constexpr int kPointwiseSteps = 16;

// One function. Its arguments are numbered: 0 to kPointwiseInputs - 1 the inputs, then the results
// of the steps before it.
struct PointwiseStep {
  std::int32_t is_binary;
  std::int32_t function;  // of BinaryFunction or UnaryFunction
  std::int32_t x, y;      // y: of binary functions only
  float alpha, beta;      // of unary functions only
};

struct PointwiseShape {
  std::int64_t dims[kMaxDims];       // of y; 1 in front where there are fewer
  std::int64_t a_strides[kMaxDims];  // elements; of inputs that no step reads: 0
  std::int64_t b_strides[kMaxDims];
  std::int64_t c_strides[kMaxDims];
  std::int64_t d_strides[kMaxDims];
  std::int64_t steps;  // the last one makes y

  void validate() const {
    require_dims(dims);
    if (steps < 1 || steps > kPointwiseSteps) {
      throw std::invalid_argument("steps: expected 1 to " + std::to_string(kPointwiseSteps) +
                                  ", found " + std::to_string(steps));
    }
  }
};

namespace cpu {
void pointwise(const float* a, const float* b, const float* c, const float* d, float* y,
               const PointwiseShape& shape,
               const PointwiseStep* steps,  // [shape.steps]
               int threads);
}
}  // namespace cnn_engine
