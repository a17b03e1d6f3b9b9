// matmul: y[z,i,j] = min(max(bias[j] + sum over t of a[z,i,t] * b[z,t,j], lowest), highest)
//
// z counts the matrices of up to 4 batch dimensions. a and b are read with a stride for each
// dimension, in elements: 0 repeats a matrix (broadcasting), and exchanged strides read a matrix
// transposed. y is [batch..., I, J], C-contiguous; bias [J] or null; float32. NaN stays NaN; -inf
// and inf clamp nothing.
//
// matmul sums each element by itself in order: the specification. matmul_blocked makes tiles in
// registers, on CUDA of tiles in shared memory; the order of a sum depends on the shape
// and the GPU alone. Its workspace holds what matmul_blocked_workspace says, in bytes: for the
// threads of the call, on CUDA for a GPU.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"
#include "runtime/target.h"

namespace cnn_engine {

struct MatmulShape {
  static constexpr int kBatchDimensions = 4;
  int rows, columns, depth;        // I, J, and the length of a sum
  std::int64_t a_row, a_depth;     // strides of a
  std::int64_t b_depth, b_column;  // strides of b
  int batch[kBatchDimensions];     // dimensions of the batch, outermost first; 1 where fewer
  std::int64_t a_batch[kBatchDimensions], b_batch[kBatchDimensions];  // their strides

  CNN_ENGINE_INLINE std::int64_t matrices() const {
    return std::int64_t{batch[0]} * batch[1] * batch[2] * batch[3];
  }
  CNN_ENGINE_INLINE std::int64_t output_size() const { return matrices() * rows * columns; }
  CNN_ENGINE_INLINE std::int64_t flops() const { return 2 * output_size() * depth; }
  // Where matrix z of an input begins.
  CNN_ENGINE_INLINE std::int64_t offset(const std::int64_t (&strides)[kBatchDimensions],
                                        std::int64_t z) const {
    std::int64_t at = 0;
    for (int d = kBatchDimensions - 1; d >= 0; --d) {
      at += z % batch[d] * strides[d];
      z /= batch[d];
    }
    return at;
  }

  void validate() const {
    require_at_least("rows", rows, 0);
    require_at_least("columns", columns, 0);
    require_at_least("products of a sum", depth, 0);
    std::int64_t all = 1;
    for (int size : batch) {
      require_at_least("batch dimension", size, 0);
      if (size > 0) all = all > INT64_MAX / size ? INT64_MAX : all * size;
    }
    require_at_least("matrices", all, 0);
    require_indexable("output", 1, rows, columns);
  }
};

namespace cpu {
void matmul(const float* a,     // [batch, I, F] by its strides
            const float* b,     // [batch, F, J] by its strides
            const float* bias,  // [J] or null
            float* output,      // [batch, I, J]
            const MatmulShape& shape, float lowest, float highest, int threads);
std::int64_t matmul_blocked_workspace(const MatmulShape& shape, int threads);
void matmul_blocked(const float* a,     // [batch, I, F] by its strides
                    const float* b,     // [batch, F, J] by its strides
                    const float* bias,  // [J] or null
                    float* output,      // [batch, I, J]
                    void* workspace, const MatmulShape& shape, float lowest, float highest,
                    int threads);
}  // namespace cpu
namespace cuda {
void matmul(const float* a,     // [batch, I, F] by its strides
            const float* b,     // [batch, F, J] by its strides
            const float* bias,  // [J] or null
            float* output,      // [batch, I, J]
            const MatmulShape& shape, float lowest, float highest, Stream stream);
std::int64_t matmul_blocked_workspace(const MatmulShape& shape, const Target& target);
void matmul_blocked(const float* a,     // [batch, I, F] by its strides
                    const float* b,     // [batch, F, J] by its strides
                    const float* bias,  // [J] or null
                    float* output,      // [batch, I, J]
                    void* workspace, const MatmulShape& shape, float lowest, float highest,
                    Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
