// stem_pool: a network's first convolution and the max pool behind it as one kernel, on GPUs of
// compute capability 9.0:
//
//   y = max_pool2d(activation(conv2d(x) + bias))
//
// What is pooled is nowhere as a whole; y has the bits that conv2d_nhwc_wgmma_planar and
// max_pool2d_nhwc make one after another. x is [N, C, H, W] in float32, y [N, OH, OW] in
// float16 or bfloat16, as the weights are packed, by conv2d_nhwc_wgmma_planar_pack. The function is
// a clamp: relu, or clip. The convolution is one of conv2d_nhwc_wgmma_planar's whose windows are
// two columns apart; the pool's windows are 3x3, two positions apart, with at most one position
// around.
#pragma once

#include "ops/conv2d_nhwc.h"
#include "ops/max_pool2d.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

// 1 where a GPU makes both sooner together.
std::int64_t stem_pool_takes(const Conv2dShape& shape, const MaxPool2dShape& pool,
                             ElementType compute_type, const Target& target);
void stem_pool(const float* input,    // [N, C, H, W]
               const void* packed,    // [conv2d_nhwc_wgmma_planar_packed]
               const Images& output,  // [N, pool's OH, OW]
               const Conv2dShape& shape, const MaxPool2dShape& pool, ElementType compute_type,
               const Epilogue& epilogue, Stream stream);

}  // namespace cnn_engine::cuda
