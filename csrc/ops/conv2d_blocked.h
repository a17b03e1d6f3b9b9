// conv2d_blocked: conv2d as a matrix product in blocks, with what follows it:
//
//   y = min(max(conv2d(x) + residual, lowest), highest);  conv2d is the formula of conv2d.h
//
// NaN stays NaN. With lowest = -inf and highest = inf nothing is clamped; relu is 0 and inf. Any
// kernel, stride, padding, dilation and groups. Weights are packed once, by conv2d_pack. Each
// output is a sum of parts, and a part one sum in the order channel, row, column; how many parts
// depends on the shape alone: the same bits with any number of threads, on any GPU.
//
// Layouts: x [N,C,H,W], b [K] or null, residual (may be null, not y)
// and y [N,K,OH,OW]; float32, C-contiguous. Packed weights: [groups][panels][C/groups * R *
// S][panel_rows], a panel being as many filters of one group, missing ones zero; where a group has
// one channel (depthwise), [K, R, S] as they come. The workspace holds what
// conv2d_blocked_workspace says, in bytes: for the threads of the call, on CUDA for a GPU.
#pragma once

#include "ops/conv2d.h"
#include "runtime/target.h"

namespace cnn_engine {

namespace cpu {
void conv2d_pack(const float* weight,  // [K, C / groups, R, S]
                 float* packed,        // [shape.packed_size()]
                 const Conv2dShape& shape, int threads);
std::int64_t conv2d_blocked_workspace(const Conv2dShape& shape, int threads);
void conv2d_blocked(const float* input,     // [N, C, H, W]
                    const float* packed,    // [shape.packed_size()]
                    const float* bias,      // [K] or null
                    const float* residual,  // [N, K, OH, OW] or null
                    float* output,          // [N, K, OH, OW]
                    void* workspace, const Conv2dShape& shape, float lowest, float highest,
                    int threads);
}  // namespace cpu
namespace cuda {
void conv2d_pack(const float* weight,  // [K, C / groups, R, S]
                 float* packed,        // [shape.packed_size()]
                 const Conv2dShape& shape, Stream stream);
std::int64_t conv2d_blocked_workspace(const Conv2dShape& shape, const Target& target);
void conv2d_blocked(const float* input,     // [N, C, H, W]
                    const float* packed,    // [shape.packed_size()]
                    const float* bias,      // [K] or null
                    const float* residual,  // [N, K, OH, OW] or null
                    float* output,          // [N, K, OH, OW]
                    void* workspace, const Conv2dShape& shape, float lowest, float highest,
                    Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
