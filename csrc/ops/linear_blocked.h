// linear_blocked: linear (linear.h) in blocks over weights packed once, clamped:
//
//   y[n,m] = min(max(b[m] + sum over f of x[n,f] * w[m,f], lowest), highest)
//
// Layouts: x [N,F], b [M] or null, y [N,M]; float32, C-contiguous; packed weights
// [panels][F][panel rows] (panels.h). NaN stays NaN; -inf and inf clamp nothing. The workspace
// holds what linear_blocked_workspace says, in bytes: for the threads of the call, on CUDA for a
// GPU.
#pragma once

#include "ops/linear.h"
#include "runtime/target.h"

namespace cnn_engine {
namespace cpu {
void linear_pack(const float* weight,  // [M, F]
                 float* packed,        // [shape.packed_size()]
                 const LinearShape& shape, int threads);
std::int64_t linear_blocked_workspace(const LinearShape& shape, int threads);
void linear_blocked(const float* input,   // [N, F]
                    const float* packed,  // [shape.packed_size()]
                    const float* bias,    // [M] or null
                    float* output,        // [N, M]
                    void* workspace, const LinearShape& shape, float lowest, float highest,
                    int threads);
}  // namespace cpu
namespace cuda {
void linear_pack(const float* weight,  // [M, F]
                 float* packed,        // [shape.packed_size()]
                 const LinearShape& shape, Stream stream);
std::int64_t linear_blocked_workspace(const LinearShape& shape, const Target& target);
void linear_blocked(const float* input,   // [N, F]
                    const float* packed,  // [shape.packed_size()]
                    const float* bias,    // [M] or null
                    float* output,        // [N, M]
                    void* workspace, const LinearShape& shape, float lowest, float highest,
                    Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
