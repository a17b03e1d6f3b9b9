// softmax_axis: y = exp(x - m) / s with m the largest of x along the axis and s the sum of exp(x -
// m); with `logarithm` y = x - m - log(s).
//
// Layouts: x and y [outer, axis, inner], float32, C-contiguous; y may be x. A line along the axis
// with a NaN or +inf, or with nothing but -inf, comes out all NaN, as in PyTorch.
#pragma once

#include "ops/reduce.h"

namespace cnn_engine {

namespace cpu {
void softmax_axis(const float* x,  // [outer, axis, inner]
                  float* y,        // [outer, axis, inner]
                  const AxisShape& shape, bool logarithm, int threads);
}
namespace cuda {
void softmax_axis(const float* x,  // [outer, axis, inner]
                  float* y,        // [outer, axis, inner]
                  const AxisShape& shape, bool logarithm, Stream stream);
}
}  // namespace cnn_engine
