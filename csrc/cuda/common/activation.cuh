// An epilogue's activation on the device.
#pragma once

#include "cuda/common/unary.cuh"
#include "ops/epilogue.h"

namespace cnn_engine::cuda {

// The functions that networks have most are inlined, the others called.
__device__ inline float apply(const Activation activation, float x) {
  const float alpha = activation.alpha, beta = activation.beta;
  switch (activation.function) {
    case UnaryFunction::clip:
      return unary_clip::of(x, alpha, beta);
    case UnaryFunction::relu:
      return unary_relu::of(x, alpha, beta);
    case UnaryFunction::hard_swish:
      return unary_hard_swish::of(x, alpha, beta);
    case UnaryFunction::swish:
      return unary_swish::of(x, alpha, beta);
    case UnaryFunction::hard_sigmoid:
      return unary_hard_sigmoid::of(x, alpha, beta);
    default:
      return unary_of(activation.function, x, alpha, beta);
  }
}

}  // namespace cnn_engine::cuda
