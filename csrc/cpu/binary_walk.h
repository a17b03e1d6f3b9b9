// The walk over the operands of a function of two tensors (ops/binary.h).
#pragma once

#include "cpu/strided.h"
#include "ops/binary.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

// Operand 0 is the output, 1 is x and 2 is y.
static inline Strided<3> walk_of(const BinaryShape& shape) {
  std::int64_t strides[3][kMaxDims];
  for (int d = 0; d < kMaxDims; ++d) {
    strides[0][d] = shape.out_strides[d];
    strides[1][d] = shape.x_strides[d];
    strides[2][d] = shape.y_strides[d];
  }
  return collapse<3>(shape.dims, strides);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
