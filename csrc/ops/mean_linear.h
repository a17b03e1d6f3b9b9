// mean_linear on CUDA: the mean over an image's positions and the linear layer behind it:
//
//   y[m] = activation(b[m] + sum over c of w[m,c] * mean over p of f(x[p,c]))
//
// f is nothing, or max(floor, x * factors[c] + shift[c]).
//
// Layouts: x [N,P,C], of the type that weights are packed as, which of tf32's is float32; b [M],
// factors and shift [C], or null; y [N,M], float32 or as x; C-contiguous. N is at most 1, P 64, C
// 2048 and a multiple of 8; addresses are multiples of 16. Sums are float32, in an order that
// depends on the type, P and C alone; by weights of 16 bits a mean is multiplied as two numbers of
// 16 bits. The activation is a function of unary.h with its alpha and beta.
#pragma once

#include "ops/conv2d_nhwc.h"
#include "ops/reduce.h"
#include "ops/unary.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

struct MeanLinearShape {
  static constexpr bool kPassedByMember = true;

  AxisShape images;  // N, P, C
  int outputs;       // M
};

// 1 where a GPU makes both sooner as one kernel: GPUs of compute capability 9.0,
// one small image.
std::int64_t mean_linear_takes(const MeanLinearShape& shape, ElementType compute_type,
                               const Target& target);
std::int64_t mean_linear_packed(const MeanLinearShape& shape, ElementType compute_type,
                                int);       // bytes
void mean_linear_pack(const float* weight,  // [M, C]
                      void* packed,         // [mean_linear_packed]
                      const MeanLinearShape& shape, ElementType compute_type, Stream stream);
// The prologue's scale and shift are factors and shift.
void mean_linear(const void* x,         // [N, P, C]
                 const void* packed,    // [mean_linear_packed]
                 const Values& output,  // [N, M]
                 const MeanLinearShape& shape, ElementType compute_type, const Prologue& prologue,
                 const Epilogue& epilogue, Stream stream);

}  // namespace cnn_engine::cuda
