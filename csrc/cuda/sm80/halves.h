// What a kernel multiplies, as a type, where that is one of 16 bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "ops/conv2d_nhwc.h"

namespace cnn_engine::cuda {

// Calls body(a null pointer to the type of 16 bits).
template <typename Body>
void with_halves(const char* name, ElementType compute_type, const Body& body) {
  if (compute_type == ElementType::float16) return body(static_cast<__half*>(nullptr));
  if (compute_type == ElementType::bfloat16) return body(static_cast<__nv_bfloat16*>(nullptr));
  throw std::invalid_argument(std::string(name) + ": expected float16 or bfloat16");
}

}  // namespace cnn_engine::cuda
