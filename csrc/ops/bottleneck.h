// bottleneck: a residual block's convolution of 3x3 and the one of 1x1 behind it, and the 1x1 one
// that the next block begins with:
//
//   e = inner(conv2d(x) + b1);  y = outer(conv1x1(e) + b2 + residual);  z = after(conv1x1(y) + b3)
//
// e is nowhere as a whole, and rounded as x is; z is made of y as it is stored, where there are
// filters of it, `reduced`. The functions are clamps: relu, or clip. The shape is the first
// convolution's, one place apart, without groups or dilation, with one place of zeros around: y is
// as large as x. Sums are float32, in a fixed order: the same bits in every run.
//
// Layouts: x [N,H,W,C], residual [N,H,W,outputs] (may be null), y [N,H,W,outputs], z
// [N,H,W,reduced] in float16 or bfloat16, as the weights are packed; b1 [K], b2 [outputs], b3
// [reduced], each or null, float32.
#pragma once

#include "ops/conv2d_nhwc.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

// 1 where a GPU makes all sooner together: GPUs of compute capability 9.0, as
// few images as it has room for at once.
std::int64_t bottleneck_takes(const Conv2dShape& shape, int outputs, int reduced,
                              const Target& target);
std::int64_t bottleneck_packed(const Conv2dShape& shape, int outputs, int reduced, ElementType,
                               int);  // bytes
// What it wrote is complete on return.
void bottleneck_pack(const float* first,   // [K, C, 3, 3]
                     const float* second,  // [outputs, K]
                     const float* third,   // [reduced, outputs] or null
                     void* packed,         // [bottleneck_packed]
                     const Conv2dShape& shape, int outputs, int reduced, ElementType compute_type,
                     Stream stream);
void bottleneck(const void* x,             // [N, H, W, C]
                const void* packed,        // [bottleneck_packed]
                const float* first_bias,   // [K] or null
                const float* second_bias,  // [outputs] or null
                const float* third_bias,   // [reduced] or null
                const void* residual,      // [N, H, W, outputs] or null
                void* y,                   // [N, H, W, outputs]
                void* next,                // [N, H, W, reduced] or null
                const Conv2dShape& shape, int outputs, int reduced, const Overflow& overflow,
                ElementType compute_type, UnaryFunction inner, float inner_alpha, float inner_beta,
                UnaryFunction outer, float outer_alpha, float outer_beta, UnaryFunction after,
                float after_alpha, float after_beta, Stream stream);

}  // namespace cnn_engine::cuda
