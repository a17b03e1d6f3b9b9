// Operators that make each output element from the input element at the same position:
//
//   relu       y = max(x, 0); NaN stays NaN, as in PyTorch
//   tanh       y = tanh(x)
//   normalize  y = x * scale + offset, from pixels (uint8) to what a network reads (float32)
//
// Layouts: any, C-contiguous, taken as [size]. relu and tanh may work in place.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct ElementwiseShape {
  std::int64_t size;   // elements
  int input_itemsize;  // bytes: 4 for float32, 1 for uint8

  CNN_ENGINE_INLINE std::int64_t flops() const { return 0; }
  CNN_ENGINE_INLINE std::int64_t bytes() const { return size * (input_itemsize + 4); }

  void validate() const {
    if (size < 0)
      throw std::invalid_argument("size: expected at least 0, found " + std::to_string(size));
  }
};

namespace cpu {
void relu(const float* input, float* output, const ElementwiseShape& shape, int threads);
void tanh(const float* input, float* output, const ElementwiseShape& shape, int threads);
void normalize(const std::uint8_t* input, float* output, const ElementwiseShape& shape, float scale,
               float offset, int threads);
}  // namespace cpu
namespace cuda {
void relu(const float* input, float* output, const ElementwiseShape& shape, Stream stream);
void tanh(const float* input, float* output, const ElementwiseShape& shape, Stream stream);
void normalize(const std::uint8_t* input, float* output, const ElementwiseShape& shape, float scale,
               float offset, Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
