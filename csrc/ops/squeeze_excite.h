// squeeze_excite on CUDA: the factors by which a squeeze-and-excite block multiplies channels:
//
//   h[n,m] = inner(b1[m] + sum over c of w1[m,c] * mean over p of x[n,p,c])
//   y[n,c] = outer(b2[c] + sum over m of w2[c,m] * h[n,m])
//
// and squeeze_excite_scale's z[n,p,c] = min(max(x[n,p,c] * y[n,c], lowest), highest).
//
// Layouts: x [N,P,C], float32 or in the weights' type; b1 [M], b2 [C], each or null; y [N,C];
// float32; z [N,P,C], as x; C-contiguous. The weights are packed as float16 or bfloat16, else as
// float32 (tf32 too). Means and sums are float32, and nothing between is rounded. C is a multiple
// of 8. Means may be given, as parts that add up to them [N,parts,C]. The functions are those of
// unary.h with their alphas and betas. Each row has the same bits with any batch.
#pragma once

#include "ops/conv2d_nhwc.h"
#include "ops/reduce.h"
#include "ops/unary.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

std::int64_t squeeze_excite_packed(const AxisShape& shape, int hidden, ElementType compute_type,
                                   int);                        // bytes
void squeeze_excite_pack(const float* first,                    // [M, C]
                         const float* second,                   // [C, M]
                         void* packed,                          // [squeeze_excite_packed]
                         const AxisShape& shape,                // N, P, C
                         int hidden, ElementType compute_type,  // M
                         Stream stream);
void squeeze_excite(const void* x,             // [N, P, C]
                    const void* packed,        // [squeeze_excite_packed]
                    const float* first_bias,   // [M] or null
                    const float* second_bias,  // [C] or null
                    const float* means,        // [N, parts, C] or null
                    float* y,                  // [N, C]
                    int parts, const AxisShape& shape, int hidden, ElementType x_stored,
                    ElementType compute_type, UnaryFunction inner, float inner_alpha,
                    float inner_beta, UnaryFunction outer, float outer_alpha, float outer_beta,
                    Stream stream);
// 1 where a GPU makes x * y of images of a shape in 16 bits sooner than the
// convolution that reads x would on its way: GPUs of compute capability 9.0, small images.
std::int64_t squeeze_excite_scales(const AxisShape& shape, int hidden, const Target& target);
void squeeze_excite_scale(const void* x,             // [N, P, C], in the weights' type of 16 bits
                          const void* packed,        // [squeeze_excite_packed]
                          const float* first_bias,   // [M] or null
                          const float* second_bias,  // [C] or null
                          void* z,                   // [N, P, C], not x
                          const AxisShape& shape, int hidden, ElementType storage,
                          const Overflow& overflow, ElementType compute_type, UnaryFunction inner,
                          float inner_alpha, float inner_beta, UnaryFunction outer,
                          float outer_alpha, float outer_beta, float lowest, float highest,
                          Stream stream);

}  // namespace cnn_engine::cuda
