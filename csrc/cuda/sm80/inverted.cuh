// What the kernels of inverted residual blocks share.
#pragma once

#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/halves.h"
#include "cuda/sm80/mma.cuh"

namespace cnn_engine::cuda {

constexpr int kPiece = 16;  // bytes of a copy

// Copies 16 bytes that another block wrote, so not by way of the first-level cache; or zeros.
__device__ inline void copy_piece(void* to_shared, const void* from_global, bool some = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)),
               "l"(from_global), "r"(some ? kPiece : 0)
               : "memory");
}

}  // namespace cnn_engine::cuda
