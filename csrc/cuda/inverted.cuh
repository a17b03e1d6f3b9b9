// What the kernels of inverted residual blocks share.
#pragma once

#include <string>

#include "cuda/ends.cuh"
#include "cuda/mma.cuh"
#include "ops/conv2d_nhwc.h"

namespace cnn_engine::cuda {

constexpr int kPiece = 16;  // bytes of a copy

// Copies 16 bytes that another block wrote, so not by way of the first-level cache; or zeros.
__device__ inline void copy_piece(void* to_shared, const void* from_global, bool some = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)),
               "l"(from_global), "r"(some ? kPiece : 0)
               : "memory");
}

// Calls body(a null pointer to the type of 16 bits).
template <typename Body>
void with_halves(const char* name, Conv2dOperands operands, const Body& body) {
  if (operands == Conv2dOperands::float16) return body(static_cast<__half*>(nullptr));
  if (operands == Conv2dOperands::bfloat16) return body(static_cast<__nv_bfloat16*>(nullptr));
  throw std::invalid_argument(std::string(name) + ": expected float16 or bfloat16");
}

}  // namespace cnn_engine::cuda
