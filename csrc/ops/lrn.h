// lrn: y[n,c,i] = x[n,c,i] / (k + alpha / size * sum of x[n,d,i]^2) ^ beta
//
// over the channels d from c - (size - 1) / 2 to c + size / 2 that exist (both rounded down), in
// order. Layouts: x and y [N,C,inner], float32, C-contiguous; not in place.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct LrnShape {
  int n, c, inner;  // [N, C, the rest]
  int size;         // channels that are summed over
  float alpha, beta, k;

  CNN_ENGINE_INLINE std::int64_t elements() const { return std::int64_t{n} * c * inner; }
  CNN_ENGINE_INLINE std::int64_t flops() const { return 0; }
  CNN_ENGINE_INLINE std::int64_t bytes() const { return 8 * elements(); }
  CNN_ENGINE_INLINE int first(int channel) const {
    const int at = channel - (size - 1) / 2;
    return at < 0 ? 0 : at;
  }
  CNN_ENGINE_INLINE int last(int channel) const {
    return c - 1 - channel < size / 2 ? c - 1 : channel + size / 2;
  }

  void validate() const {
    require_at_least("batch", n, 0);
    require_at_least("channels", c, 1);
    require_at_least("positions", inner, 0);
    require_at_least("size", size, 1);
    require_indexable("input", 1, c, inner);
  }
};

namespace cpu {
void lrn(const float* input,  // [N, C, inner]
         float* output,       // [N, C, inner]
         const LrnShape& shape, int threads);
}
namespace cuda {
void lrn(const float* input,  // [N, C, inner]
         float* output,       // [N, C, inner]
         const LrnShape& shape, Stream stream);
}
}  // namespace cnn_engine
