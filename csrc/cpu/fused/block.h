// How output channels are cut into blocks of SIMD vectors: packing and kernels must agree.
#pragma once

#include "runtime/shape.h"

namespace cnn_engine::cpu::fused {

// Vectors in the next block when `left` remain: three, and never three and then a single one.
CNN_ENGINE_INLINE int block_size(int left) { return left == 4 ? 2 : left < 3 ? left : 3; }

}  // namespace cnn_engine::cpu::fused
