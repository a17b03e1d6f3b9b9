// linear: y[n,m] = b[m] + sum over f of x[n,f] * w[m,f]
//
// Layouts: x [N,F], w [M,F], b [M] or null, y [N,M]; float32, C-contiguous.
// With `reduction`, several lanes share one output's sum: SIMD lanes on the CPU, a warp on CUDA.
#pragma once

#include "ops/panels.h"
#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct LinearShape {
  int n;             // images
  int in_features;   // F
  int out_features;  // M

  CNN_ENGINE_INLINE std::int64_t input_size() const { return std::int64_t{n} * in_features; }
  CNN_ENGINE_INLINE std::int64_t weight_size() const {
    return std::int64_t{out_features} * in_features;
  }
  CNN_ENGINE_INLINE std::int64_t output_size() const { return std::int64_t{n} * out_features; }
  // As linear_blocked.h packs the weights, and the floats of it.
  CNN_ENGINE_INLINE Panels panels() const { return Panels(out_features, in_features); }
  CNN_ENGINE_INLINE std::int64_t packed_size() const { return panels().size(); }
  CNN_ENGINE_INLINE std::int64_t flops() const { return 2 * output_size() * in_features; }
  CNN_ENGINE_INLINE std::int64_t bytes() const {
    return 4 * (input_size() + weight_size() + out_features + output_size());
  }

  void validate() const {
    require_at_least("batch", n, 0);
    require_at_least("input features", in_features, 1);
    require_at_least("output features", out_features, 1);
  }
};

namespace cpu {
void linear(const float* input,   // [N, F]
            const float* weight,  // [M, F]
            const float* bias,    // [M] or null
            float* output,        // [N, M]
            const LinearShape& shape, bool reduction, int threads);
}
namespace cuda {
void linear(const float* input,   // [N, F]
            const float* weight,  // [M, F]
            const float* bias,    // [M] or null
            float* output,        // [N, M]
            const LinearShape& shape, bool reduction, Stream stream);
}
}  // namespace cnn_engine
