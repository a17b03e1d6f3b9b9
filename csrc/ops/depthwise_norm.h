// depthwise_norm: each channel of an image convolved by itself, and each position's channels
// normalised:
//
//   c = conv2d(x) + bias;   y = (c - mean) / sqrt(variance + epsilon) * scale + shift
//
// with the mean and the variance of a position's channels. Layouts: x [N,H,W,C], y [N,OH,OW,C] and
// the weights [R,S,C], as conv2d_nhwc_depthwise_pack packs them, of one type; all else float32. c
// is not rounded to that type. The sums of c, in the order row, column, and of a position, by 32
// channels at once, are the same bits with any batch.
#pragma once

#include "ops/conv2d_nhwc.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

// Whether a GPU makes both sooner than one after the other: GPUs of compute
// capability 9.0, kernels of 7x7, strides of 1, 64 to 1,024 channels in 32s, few outputs.
std::int64_t depthwise_norm_takes(const Conv2dShape& shape, ElementType storage,
                                  const Target& target);
struct ChannelNorm {
  static constexpr bool kPassedByMember = true;

  const float* scale;  // [C]
  const float* shift;  // [C] or null
  float epsilon;
};

// The epilogue, of c, is a bias; its overflow is y's.
void depthwise_norm(const ConstValues& input,  // [N, H, W, C], at a multiple of 16
                    const void* packed,        // [R, S, C]
                    const Values& output,      // [N, OH, OW, C]
                    const Conv2dShape& shape, const ChannelNorm& norm, const Epilogue& epilogue,
                    Stream stream);

}  // namespace cnn_engine::cuda
