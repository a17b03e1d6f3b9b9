// conv2d_nhwc_depthwise on CUDA: conv2d_nhwc.h with one channel and one filter a group, and nothing
// before it:
//
//   y = activation(conv2d(x) + bias + residual)
//
// Layouts: x [N,H,W], residual and y [N,OH,OW], all of them and the packed weights [R,S,C] of one
// type; bias float32 (epilogue.h). Each output is summed in the order row,
// column: the same bits with any batch. But many outputs of 16 bits are made by tensor cores, in
// tiles of 8x8 pixels, of which all may be NaN where what they read is not finite.
//
// depthwise_means makes the means over y's pixels besides, in parts that add up, of 7x7 pixels
// each: of float32 images without pitches and without a residual, kernels of 3x3 or 5x5, equal
// strides of 1 or 2, channels in fours, addresses that are multiples of 16.
#pragma once

#include "ops/conv2d_nhwc.h"
#include "ops/epilogue.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

void conv2d_nhwc_depthwise_pack(const float* weight,  // [C, 1, R, S]
                                void* packed,         // [R, S, C]
                                const Conv2dShape& shape, ElementType storage, Stream stream);
void conv2d_nhwc_depthwise(const ConstImages& input,  // [N, H, W]
                           const void* packed,        // [R, S, C]
                           const Images& output,      // [N, OH, OW]
                           const Conv2dShape& shape, const Epilogue& epilogue, Stream stream);

// Parts of the means where a GPU makes both sooner than gates read y, or 0: GPUs
// of compute capability 9.0, several images of at most 28x28 pixels.
std::int64_t depthwise_means_takes(const Conv2dShape& shape, const Target& target);
void depthwise_means(const float* input,  // [N, H, W, C]
                     const void* packed,  // [R, S, C]
                     float* output,       // [N, OH, OW, C]
                     float* means,        // [N, parts, C]
                     const Conv2dShape& shape, int parts, const Epilogue& epilogue, Stream stream);

}  // namespace cnn_engine::cuda
