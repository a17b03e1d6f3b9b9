// mlp: two convolutions of 1x1 over the channels of images with gelu between them, as ConvNeXt has
// them:
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

#include <array>

#include "ops/conv2d_nhwc.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

struct MlpShape {
  static constexpr bool kPassedByMember = true;

  Conv2dShape first;
  int outputs;
};

// 1 where a GPU makes both sooner together: GPUs of compute capability 9.0.
std::int64_t mlp_takes(const MlpShape& shape, ElementType compute_type, const Target& target);
std::int64_t mlp_packed(const MlpShape& shape, ElementType, int);  // bytes
// What it wrote is complete on return.
void mlp_pack(const float* first,   // [K, C]
              const float* second,  // [outputs, K]
              void* packed,         // [mlp_packed]
              const MlpShape& shape, ElementType compute_type, Stream stream);
// The first epilogue is a bias and gelu; the residual has no pitch.
void mlp(const void* x,       // [N, H, W, C]
         const void* packed,  // [mlp_packed]
         void* y,             // [N, H, W, outputs]
         const MlpShape& shape, ElementType compute_type, const std::array<Epilogue, 2>& epilogues,
         Stream stream);

}  // namespace cnn_engine::cuda
