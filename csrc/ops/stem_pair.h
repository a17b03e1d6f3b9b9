// stem_pair: a network's first two convolutions and the max pool behind them as one kernel, on GPUs
// of compute capability 9.0:
//
//   y = max_pool2d(second_activation(conv2d(activation(conv2d(x) + bias)) + second_bias))
//
// What the first convolution makes is nowhere as a whole; y has the bits that
// conv2d_nhwc_wgmma_planar and conv2d_nhwc_wgmma_pool make one after another. x is [N, C, H, W] in
// float32, y [N, H / 2, W / 2, y_pitch] in float16 or bfloat16, as the weights are packed. Windows
// of both convolutions are 3x3, one place apart with one around, and the pool's 2x2; at most three
// channels and 64 filters each; the functions are clamps: relu, or clip.
#pragma once

#include "ops/conv2d_nhwc.h"

namespace cnn_engine::cuda {

// Shapes are of the first convolution; `filters` are the second's.
// 1 where a device, by its number, makes all sooner together.
std::int64_t stem_pair_takes(const Conv2dShape& shape, int filters, Conv2dOperands operands,
                             int device);
// Bytes of both convolutions' packed weights.
std::int64_t stem_pair_packed(const Conv2dShape& shape, int filters, Conv2dOperands operands,
                              int device);
void stem_pair_pack(const float* weight,         // [K, C, 3, 3]
                    const float* second_weight,  // [filters, K, 3, 3]
                    void* packed, const Conv2dShape& shape, int filters, Conv2dOperands operands,
                    Stream stream);
void stem_pair(const float* input,        // [N, C, H, W]
               const void* packed,        // [stem_pair_packed]
               const float* bias,         // [K] or null
               const float* second_bias,  // [filters] or null
               void* output,              // [N, H / 2, W / 2, y_pitch]
               const Conv2dShape& shape, int filters, int y_pitch, const Overflow& overflow,
               Conv2dOperands operands, UnaryFunction activation, float alpha, float beta,
               UnaryFunction second_activation, float second_alpha, float second_beta,
               Stream stream);

}  // namespace cnn_engine::cuda
