// bottleneck: a residual block's convolution of 3x3 and the one of 1x1 behind it, and the 1x1 one
// that the next block begins with:
//
//   e = inner(conv2d(x) + b1);  y = outer(conv1x1(e) + b2 + residual);  z = after(conv1x1(y) + b3)
//
// e is nowhere as a whole, and rounded as x is; z is made of y as it is stored, where there are
// filters of it, `reduced`. The functions are clamps: relu, or clip. The shape is the first
// convolution's, of stride 1, without groups or dilation, with one pixel of zeros around: y is
// as large as x. Sums are float32, in a fixed order: the same bits in every run.
//
// Layouts: x [N,H,W,C], residual [N,H,W,outputs] (may be null), y [N,H,W,outputs], z
// [N,H,W,reduced] in float16 or bfloat16, as the weights are packed; b1 [K], b2 [outputs], b3
// [reduced], each or null, float32.
#pragma once

#include <array>

#include "ops/conv2d_nhwc.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

struct BottleneckShape {
  static constexpr bool kPassedByMember = true;

  Conv2dShape first;
  int outputs, reduced;
};

// 1 where a GPU makes all sooner together: GPUs of compute capability 9.0, as
// few images as it has room for at once.
std::int64_t bottleneck_takes(const BottleneckShape& shape, const Target& target);
std::int64_t bottleneck_packed(const BottleneckShape& shape, ElementType, int);  // bytes
// What it wrote is complete on return.
void bottleneck_pack(const float* first,   // [K, C, 3, 3]
                     const float* second,  // [outputs, K]
                     const float* third,   // [reduced, outputs] or null
                     void* packed,         // [bottleneck_packed]
                     const BottleneckShape& shape, ElementType compute_type, Stream stream);
// The residual is that of the second epilogue, without a pitch; overflow is the last one's.
void bottleneck(const void* x,       // [N, H, W, C]
                const void* packed,  // [bottleneck_packed]
                void* y,             // [N, H, W, outputs]
                void* next,          // [N, H, W, reduced] or null
                const BottleneckShape& shape, ElementType compute_type,
                const std::array<Epilogue, 3>& epilogues, Stream stream);

}  // namespace cnn_engine::cuda
