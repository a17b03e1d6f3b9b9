// max_pool2d_nhwc, average_pool2d_nhwc: the pools of max_pool2d.h and average_pool2d.h, to the same
// bits, over images whose channels lie side by side.
//
// Layouts: x [N,H,W,x_pitch], y [N,OH,OW,y_pitch], of which the first C of each position are meant;
// float32, on CUDA both as `stored` says.
#pragma once

#include "ops/average_pool2d.h"
#include "ops/max_pool2d.h"
#include "ops/types.h"
#include "runtime/stream.h"

namespace cnn_engine {
namespace cpu {
void max_pool2d_nhwc(const float* input,  // [N, H, W, x_pitch]
                     float* output,       // [N, OH, OW, y_pitch]
                     const MaxPool2dShape& shape, int x_pitch, int y_pitch, int threads);
void average_pool2d_nhwc(const float* input,  // [N, H, W, x_pitch]
                         float* output,       // [N, OH, OW, y_pitch]
                         const AveragePool2dShape& shape, int x_pitch, int y_pitch,
                         bool count_include_pad, int threads);
}  // namespace cpu
namespace cuda {
void max_pool2d_nhwc(const void* input,  // [N, H, W, x_pitch]
                     void* output,       // [N, OH, OW, y_pitch]
                     const MaxPool2dShape& shape, int x_pitch, int y_pitch, ElementType storage,
                     Stream stream);
void average_pool2d_nhwc(const void* input,  // [N, H, W, x_pitch]
                         void* output,       // [N, OH, OW, y_pitch]
                         const AveragePool2dShape& shape, int x_pitch, int y_pitch,
                         bool count_include_pad, ElementType storage, Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
