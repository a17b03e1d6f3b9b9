// inverted_residual on CUDA: an inverted residual block without a gate, of few images, as one
// kernel:
//
//   e = inner(conv1x1(x) + b1), or x where there is no first convolution
//   d = middle(conv2d(e) + b2), a channel and a filter a group
//   y = outer(conv1x1(d) + b3), or outer(conv1x1(d) + b3 + x)
//
// e and d are nowhere as a whole. The functions are those of unary.h with their alphas and betas.
// The shape is the second convolution's: C and K are those of e. x [N,H,W,channels] and y
// [N,OH,OW,filters] are float16 or bfloat16, as the weights are packed and e and d are rounded;
// sums are float32. b1, b2 [K], b3 [filters], each or null.
#pragma once

#include <array>

#include "ops/conv2d_nhwc.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

struct InvertedResidualShape {
  static constexpr bool kPassedByMember = true;

  Conv2dShape second;
  int channels, filters;  // of x and y
  bool expands;           // whether there is a first convolution
};

// 1 where a GPU makes a block sooner so than by a kernel for each convolution:
// GPUs of compute capability 9.0, few images. `adds`: x is added.
std::int64_t inverted_residual_takes(const InvertedResidualShape& shape, bool adds,
                                     const Target& target);
std::int64_t inverted_residual_packed(const InvertedResidualShape& shape, ElementType compute_type,
                                      int);       // bytes
void inverted_residual_pack(const float* first,   // [K, channels] or null
                            const float* second,  // [K, R, S]
                            const float* third,   // [filters, K]
                            void* packed,         // [inverted_residual_packed]
                            const InvertedResidualShape& shape, ElementType compute_type,
                            Stream stream);
// Overflow is the last epilogue's.
void inverted_residual(const void* x,       // [N, H, W, channels]
                       const void* packed,  // [inverted_residual_packed]
                       void* y,             // [N, OH, OW, filters], not x
                       const InvertedResidualShape& shape, bool adds, ElementType compute_type,
                       const std::array<Epilogue, 3>& epilogues, Stream stream);

}  // namespace cnn_engine::cuda
