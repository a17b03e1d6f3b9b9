// expand_depthwise: the first two convolutions of an inverted residual block and, on the CPU, the
// mean that the gate of its squeeze-and-excite block reads:
//
//   e = inner(conv1x1(x) + b1);  y = outer(conv2d(e) + b2), a channel and a filter a group
//   mean[n,k] = mean over y's positions of y[n,i,j,k]
//
// e is nowhere as a whole. The functions are those of unary.h with their alphas and betas. The
// shape is the second convolution's: C and K are K.
//
// The CPU's bits are those of conv2d_nhwc's methods direct and depthwise, one after the other.
// Layouts: x [N,H,W,pitches.x], y [N,OH,OW,pitches.y], of which the first C and K of each row are
// meant; b1, b2 [K], each or null; mean [N,mean_pitch] or null; float32. The weights are packed by
// conv2d_nhwc_pack for these methods.
//
// On CUDA x [N,H,W,channels] and y [N,OH,OW,K] are float16 or bfloat16, as the weights are packed
// and e is rounded; sums are float32.
#pragma once

#include <array>

#include "ops/conv2d_nhwc.h"
#include "runtime/target.h"

namespace cnn_engine::cpu {

std::int64_t expand_depthwise_workspace(const Conv2dShape& shape, int threads);  // bytes
void expand_depthwise(const float* input,        // [N, H, W, pitches.x]
                      const float* first,        // packed, of [K, channels, 1, 1]
                      const float* second,       // packed, of [K, 1, R, S]
                      const float* first_bias,   // [K] or null
                      const float* second_bias,  // [K] or null
                      float* output,             // [N, OH, OW, pitches.y]
                      float* mean,               // [N, mean_pitch] or null
                      void* workspace,           // [expand_depthwise_workspace]
                      const Conv2dShape& shape, int channels, const Conv2dPitches& pitches,
                      int mean_pitch, UnaryFunction inner, float inner_alpha, float inner_beta,
                      UnaryFunction outer, float outer_alpha, float outer_beta, int threads);

}  // namespace cnn_engine::cpu

namespace cnn_engine::cuda {

struct ExpandDepthwiseShape {
  static constexpr bool kPassedByMember = true;

  Conv2dShape second;
  int channels;  // of x
};

// Where a GPU makes both convolutions of a shape sooner together: the parts of
// an image's rows that are made apart, of equal numbers of rows but for the last. Else 0. GPUs of
// compute capability 9.0, few small images.
std::int64_t expand_depthwise_takes(const ExpandDepthwiseShape& shape, const Target& target);
std::int64_t expand_depthwise_packed(const ExpandDepthwiseShape& shape, ElementType compute_type,
                                     int);       // bytes
void expand_depthwise_pack(const float* first,   // [K, channels]
                           const float* second,  // [K, R, S]
                           void* packed,         // [expand_depthwise_packed]
                           const ExpandDepthwiseShape& shape, ElementType compute_type,
                           Stream stream);
// Overflow is the last epilogue's.
void expand_depthwise(const void* x,       // [N, H, W, channels]
                      const void* packed,  // [expand_depthwise_packed]
                      void* y,             // [N, OH, OW, K]
                      float* means,        // [N, parts, K], which add up to means, or null
                      const ExpandDepthwiseShape& shape, ElementType compute_type,
                      const std::array<Epilogue, 2>& epilogues, Stream stream);

}  // namespace cnn_engine::cuda
