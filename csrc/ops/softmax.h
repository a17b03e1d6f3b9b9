// softmax: y[n,m] = exp(x[n,m] - max of row n) / sum over m of exp(x[n,m] - max of row n)
//
// Layouts: x [N,M], y [N,M]; float32, C-contiguous; may work in place.
// As in PyTorch, a row with a NaN or +inf, or with nothing but -inf, comes out all NaN; -inf beside
// finite values gives 0. With `reduction`, several lanes share a row: SIMD lanes, or a warp on
// CUDA.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct SoftmaxShape {
  int n;        // rows
  int classes;  // M

  CNN_ENGINE_INLINE std::int64_t size() const { return std::int64_t{n} * classes; }
  CNN_ENGINE_INLINE std::int64_t flops() const { return 0; }
  CNN_ENGINE_INLINE std::int64_t bytes() const { return 8 * size(); }

  void validate() const {
    require_at_least("batch", n, 0);
    require_at_least("classes", classes, 1);
  }
};

namespace cpu {
void softmax(const float* input,  // [N, M]
             float* output,       // [N, M]
             const SoftmaxShape& shape, bool reduction, int threads);
}
namespace cuda {
void softmax(const float* input,  // [N, M]
             float* output,       // [N, M]
             const SoftmaxShape& shape, bool reduction, Stream stream);
}
}  // namespace cnn_engine
