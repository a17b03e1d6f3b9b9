// expand_depthwise on the CPU: the first two convolutions of an inverted residual block, and the
// mean that the gate of its squeeze-and-excite block reads:
//
//   e = inner(conv1x1(x) + b1);  y = outer(conv2d(e) + b2), a channel and a filter a group
//   mean[n,k] = mean over y's places of y[n,i,j,k]
//
// e is nowhere as a whole: y's bits are those of conv2d_nhwc's methods direct and depthwise, one
// after the other. The functions are those of unary.h with their alphas and betas.
//
// Layouts: x [N,H,W,pitches.x], y [N,OH,OW,pitches.y], of which the first C and K of each row are
// meant; b1, b2 [K], each or null; mean [N,mean_pitch] or null; float32. The weights are packed by
// conv2d_nhwc_pack for these methods. The shape is the second convolution's: C and K are K.
#pragma once

#include "ops/conv2d_nhwc.h"

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
