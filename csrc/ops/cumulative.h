// cumulative: y[o,a,i] = the sum, or the product, of x[o,0..a,i]; `exclusive` leaves x[o,a,i]
// itself out, `reverse` runs from the end of the axis. On the CPU only.
//
// Layouts: x and y [outer, axis, inner], float32, C-contiguous; y may be x. Taken in float64,
// element by element in order, and rounded to float32 where it is written: the bits depend neither
// on the shape nor on threads.
#pragma once

#include "ops/reduce.h"

namespace cnn_engine {

namespace cpu {
void cumulative(const float* x,  // [outer, axis, inner]
                float* y,        // [outer, axis, inner]
                const AxisShape& shape, bool product, bool exclusive, bool reverse, int threads);
}  // namespace cpu
}  // namespace cnn_engine
