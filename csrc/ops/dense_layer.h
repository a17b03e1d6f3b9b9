// dense_layer on CUDA: the convolution of 3x3 that ends a layer of a dense block, and the one of
// 1x1 that the next layer begins with:
//
//   y = inner(conv3x3(e) + b1);  z = outer(conv1x1(max(floor, [x, y] * scale + shift)) + b2)
//
// [x, y] are the channels of the block so far and those of y. The shape is the 3x3 convolution's,
// of 128 channels and 32 filters, one place apart, with one place of zeros around. The functions
// are clamps: none, relu or clip. Sums are float32, in a fixed order: the same bits in every run.
//
// Layouts: e [N,H,W,128], x [N,H,W,before], y [N,H,W,32], z [N,H,W,128], float16 or bfloat16 as the
// weights are packed; x, y and z may be columns of wider rows, whose pitches are multiples of 8. b1
// [32] and b2 [128] may be null; scale and shift [before + 32]; float32.
//
// Of x the first `known` columns may be read before the kernel before has ended; `holds`: whether
// the next kernel starts only when this one has waited for the one before.
#pragma once

#include "ops/conv2d_nhwc.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

// 1 where a GPU makes both sooner as one kernel: GPUs of compute capability 9.0,
// as few images as two such kernels have room for at once.
std::int64_t dense_layer_takes(const Conv2dShape& shape, int before, int filters,
                               const Target& target);
std::int64_t dense_layer_packed(const Conv2dShape& shape, int before, int filters, ElementType,
                                int);      // bytes
void dense_layer_pack(const float* first,  // [32, 128, 3, 3]
                      const float* next,   // [128, before + 32]
                      void* packed,        // [dense_layer_packed]
                      const Conv2dShape& shape, int before, int filters, ElementType compute_type,
                      Stream stream);
void dense_layer(const void* x,            // [N, H, W, before]
                 const void* e,            // [N, H, W, 128]
                 const void* packed,       // [dense_layer_packed]
                 const float* first_bias,  // [32] or null
                 const float* next_bias,   // [128] or null
                 const float* scale,       // [before + 32]
                 const float* shift,       // [before + 32]
                 void* y,                  // [N, H, W, 32]
                 void* z,                  // [N, H, W, 128]
                 const Conv2dShape& shape, int before, int filters, const Conv2dPitches& pitches,
                 int z_pitch, float floor, const Overflow& overflow, ElementType compute_type,
                 UnaryFunction inner, float inner_alpha, float inner_beta, UnaryFunction outer,
                 float outer_alpha, float outer_beta, int known, bool holds, Stream stream);

}  // namespace cnn_engine::cuda
