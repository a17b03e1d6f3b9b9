// What kernels over images whose channels lie side by side apply to their sums.
#pragma once

#include "cuda/common/unary.cuh"

namespace cnn_engine::cuda {

// A function of unary.h; those that networks have most are not called.
struct Activation {
  UnaryFunction function;
  float alpha, beta;

  __device__ float operator()(float x) const {
    switch (function) {
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
        return unary_of(function, x, alpha, beta);
    }
  }
};

}  // namespace cnn_engine::cuda
