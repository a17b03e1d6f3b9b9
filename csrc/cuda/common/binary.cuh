// How binary.h's operands are walked over on CUDA.
#pragma once

#include "cuda/common/binary_functions.cuh"
#include "cuda/common/strided.cuh"
#include "ops/binary.h"

namespace cnn_engine::cuda {

// Has a walk go in groups of four, where every operand is repeated or side by side in the last
// dimension, and each group starts where four can be read at once; returns whether it does.
// `aligned`: whether each of the tensors starts so.
template <int operands>
bool take_fours(Strided<operands>& walk, const bool (&aligned)[operands]) {
  const int last = walk.rank - 1;
  if (last < 0 || walk.dims[last] % 4 != 0) return false;
  for (int k = 0; k < operands; ++k) {
    const std::int64_t* const strides = walk.strides[k];
    if (strides[last] == 0) continue;
    if (strides[last] != 1 || !aligned[k]) return false;
    for (int d = 0; d < last; ++d) {
      if (strides[d] % 4 != 0) return false;
    }
  }
  walk.dims[last] /= 4;
  walk.size /= 4;
  for (int k = 0; k < operands; ++k) walk.strides[k][last] *= 4;
  return true;
}

// The walk of a call over its result, x and y.
inline Strided<3> walk_of(const BinaryShape& shape) {
  std::int64_t strides[3][kMaxDims];
  for (int d = 0; d < kMaxDims; ++d) {
    strides[0][d] = shape.out_strides[d];
    strides[1][d] = shape.x_strides[d];
    strides[2][d] = shape.y_strides[d];
  }
  return collapse<3>(shape.dims, strides);
}

}  // namespace cnn_engine::cuda
