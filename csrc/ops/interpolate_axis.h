// interpolate_axis: y[o,j,i] = sum over t < taps of weight[j,t] * x[o, index[j,t], i]: resizing
// along one axis, with the neighbours and weights of any method in a table.
//
// Layouts: x [outer, axis, inner], y [outer, length, inner], weight [length, taps], all float32;
// index [length, taps], int64, 0 <= index < axis (checked by the caller); C-contiguous. A weight of
// 0 takes no part, so that what lies beside it may be NaN or infinite.
#pragma once

#include "ops/strided.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct InterpolateShape {
  std::int64_t outer, axis, inner;
  std::int64_t length;  // of the axis in y
  int taps;

  CNN_ENGINE_INLINE std::int64_t flops() const { return 2 * outer * length * inner * taps; }

  void validate() const {
    require_dims({outer, axis, inner, 1, 1, 1, 1, 1});
    require_dims({outer, length, inner, 1, 1, 1, 1, 1});
    require_at_least("taps", taps, 1);
  }
};

namespace cpu {
void interpolate_axis(const float* x,             // [outer, axis, inner]
                      const std::int64_t* index,  // [length, taps]
                      const float* weight,        // [length, taps]
                      float* y,                   // [outer, length, inner]
                      const InterpolateShape& shape, int threads);
}
namespace cuda {
void interpolate_axis(const float* x,             // [outer, axis, inner]
                      const std::int64_t* index,  // [length, taps]
                      const float* weight,        // [length, taps]
                      float* y,                   // [outer, length, inner]
                      const InterpolateShape& shape, Stream stream);
}
}  // namespace cnn_engine
