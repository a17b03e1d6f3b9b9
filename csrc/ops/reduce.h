// reduce: y[o,i] = a summary of x[o,:,i], and arg_extreme: the position of its largest or smallest.
//
// Layouts: x [outer, axis, inner], float32; y [outer, inner], float32, or int64 of positions;
// C-contiguous. Sums and products are taken in float64 in an order that depends on the shape alone.
// max and min are NaN where an element is; so is the position that of the first NaN, as in NumPy.
// An empty axis gives 0, 1 (prod), -inf (max, log_sum, log_sum_exp), inf (min) or NaN (mean).
#pragma once

#include "ops/strided.h"
#include "runtime/stream.h"

namespace cnn_engine {

#define CNN_ENGINE_REDUCTIONS(F)                       \
  F(sum)                                               \
  F(mean)                                              \
  F(max)                                               \
  F(min)                                               \
  F(prod)                                              \
  F(l1)          /* sum of |x| */                      \
  F(l2)          /* square root of the sum of x * x */ \
  F(sum_square)  /* sum of x * x */                    \
  F(log_sum)     /* logarithm of the sum */            \
  F(log_sum_exp) /* logarithm of the sum of exp(x) */

enum class Reduction {
#define CNN_ENGINE_NAME(name) name,
  CNN_ENGINE_REDUCTIONS(CNN_ENGINE_NAME)
#undef CNN_ENGINE_NAME
};

// As Python names it; null for what is no reduction.
inline const char* name_of(Reduction reduction) {
  switch (reduction) {
#define CNN_ENGINE_NAME(name) \
  case Reduction::name:       \
    return #name;
    CNN_ENGINE_REDUCTIONS(CNN_ENGINE_NAME)
#undef CNN_ENGINE_NAME
  }
  return nullptr;
}

struct AxisShape {
  std::int64_t outer, axis, inner;

  void validate() const { require_dims({outer, axis, inner, 1, 1, 1, 1, 1}); }
};

namespace cpu {
void reduce(const float* x,  // [outer, axis, inner]
            float* y,        // [outer, inner]
            const AxisShape& shape, Reduction reduction, int threads);
void arg_extreme(const float* x,   // [outer, axis, inner]; axis at least 1
                 std::int64_t* y,  // [outer, inner]
                 const AxisShape& shape, bool largest, bool last, int threads);
}  // namespace cpu
namespace cuda {
void reduce(const float* x,  // [outer, axis, inner]
            float* y,        // [outer, inner]
            const AxisShape& shape, Reduction reduction, Stream stream);
// `largest`: the position of the largest, else the smallest; `last`: the last of equals, else the
// first.
void arg_extreme(const float* x,   // [outer, axis, inner]; axis at least 1
                 std::int64_t* y,  // [outer, inner]
                 const AxisShape& shape, bool largest, bool last, Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
