// mlp: two products over the channels of images with gelu between them, as ConvNeXt has them:
//
//   y = outer(conv1x1(e) + b2 + residual);  e = gelu(conv1x1(x) + b1)
//
// e is nowhere as a whole, and rounded as x is. The outer function is a clamp: relu, or clip. Sums
// are float32, in a fixed order: the same bits in every run.
//
// Layouts: x [N,H,W,C], residual [N,H,W,outputs] (may be null), y [N,H,W,outputs] in float16 or
// bfloat16, as the weights are packed, or float32, for operands of 32 bits, whose products are
// exact to 24 bits both times; b1 [K], b2 [outputs], each or null, float32. The shape is the first
// product's, a convolution of 1x1: K is what lies between.
#pragma once

#include "ops/conv2d_nhwc.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

// 1 where a GPU makes both sooner together: GPUs of compute capability 9.0.
std::int64_t mlp_takes(const Conv2dShape& shape, int outputs, ElementType compute_type,
                       const Target& target);
std::int64_t mlp_packed(const Conv2dShape& shape, int outputs, ElementType, int);  // bytes
// What it wrote is complete on return.
void mlp_pack(const float* first,   // [K, C]
              const float* second,  // [outputs, K]
              void* packed,         // [mlp_packed]
              const Conv2dShape& shape, int outputs, ElementType compute_type, Stream stream);
void mlp(const void* x,             // [N, H, W, C]
         const void* packed,        // [mlp_packed]
         const float* first_bias,   // [K] or null
         const float* second_bias,  // [outputs] or null
         const void* residual,      // [N, H, W, outputs] or null
         void* y,                   // [N, H, W, outputs]
         const Conv2dShape& shape, int outputs, const Overflow& overflow, ElementType compute_type,
         UnaryFunction outer, float alpha, float beta, Stream stream);

}  // namespace cnn_engine::cuda
