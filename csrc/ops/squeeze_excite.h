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

#include <array>

#include "ops/conv2d_nhwc.h"
#include "ops/reduce.h"
#include "ops/unary.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

struct SqueezeExciteShape {
  static constexpr bool kPassedByMember = true;

  AxisShape images;  // N, P, C
  int hidden;        // M
};

// Means of images that others made.
struct PartialMeans {
  static constexpr bool kPassedByMember = true;

  const float* data;  // [N, parts, C], which add up to the means, or null
  int parts;
};

std::int64_t squeeze_excite_packed(const SqueezeExciteShape& shape, ElementType compute_type,
                                   int);       // bytes
void squeeze_excite_pack(const float* first,   // [M, C]
                         const float* second,  // [C, M]
                         void* packed,         // [squeeze_excite_packed]
                         const SqueezeExciteShape& shape, ElementType compute_type, Stream stream);
void squeeze_excite(const ConstValues& x,  // [N, P, C]
                    const void* packed,    // [squeeze_excite_packed]
                    const PartialMeans& means,
                    float* y,  // [N, C]
                    const SqueezeExciteShape& shape, ElementType compute_type,
                    const std::array<Epilogue, 2>& epilogues, Stream stream);
// 1 where a GPU makes x * y of images of a shape in 16 bits sooner than the
// convolution that reads x would on its way: GPUs of compute capability 9.0, small images.
std::int64_t squeeze_excite_scales(const SqueezeExciteShape& shape, const Target& target);
// The third epilogue is that of the product: a clip and overflow.
void squeeze_excite_scale(const ConstValues& x,  // [N, P, C], in the weights' type of 16 bits
                          const void* packed,    // [squeeze_excite_packed]
                          void* z,               // [N, P, C], stored as x, not x
                          const SqueezeExciteShape& shape, ElementType compute_type,
                          const std::array<Epilogue, 3>& epilogues, Stream stream);

}  // namespace cnn_engine::cuda
