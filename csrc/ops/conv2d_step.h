// conv2d_step: conv2d, then relu if asked, then 2x2 max-pooling with stride 2 if asked, as one
// kernel.
//
//   y[n,k,i,j] = pool(relu(conv2d(x)))[n,k,i,j]; the meaning of each is its own contract
//
// Layouts: x [N,C,H,W], w [K,C,R,S], b [K] or null, y [N,K,OH,OW], or [N,K,OH/2,OW/2] (rounded
// down) where pooled; float32, C-contiguous. The step between layered kernels and a fused network:
// what is between the three layers never goes to memory.
#pragma once

#include "ops/conv2d.h"

namespace cnn_engine::cuda {

void conv2d_step(const float* input,   // [N, C, H, W]
                 const float* weight,  // [K, C, R, S]
                 const float* bias,    // [K] or null
                 float* output,        // [N, K, OH, OW] or [N, K, OH / 2, OW / 2]
                 const Conv2dShape& shape, bool relu, bool pool, Stream stream);

}  // namespace cnn_engine::cuda
