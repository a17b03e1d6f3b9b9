// conv2d_nhwc on GPUs of compute capability 9.0, whose engines bring what is multiplied to shared
// memory and multiply from there:
//
//   y = activation(conv2d(z) + bias + residual);  z = max(x * scale + shift, floor)
//
// z is rounded as x is, and other than x only for a kernel of 1x1 without padding. Layouts: as
// conv2d_nhwc's, x stored as what is multiplied, at an address and with a pitch that
// are multiples of 16 bytes. One group, channels in eights, of 32 bits in fours, strides up to 8,
// and windows that reach up to 128 pixels beyond the image. Tile and split of the sums are those of
// a rank, as conv2d_nhwc's. The same bits in every run; they depend on the shape and the rank
// alone. float32 is multiplied as two parts of float16, in scales of each filter's weights and each
// pixel's channels of a step: its error is that of float32, but an infinity in x makes NaN of the
// sums that it is a term of, and numbers that are 2^-39 of the largest that shares their scale, or
// below 2^-115, are 0.
//
// All of a Launch but its workspace is heeded. A scale with a shift may be read as early as x's
// channels that are ready.
#pragma once

#include "ops/conv2d_nhwc.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

// 1 where a GPU runs it: better than conv2d_nhwc.
std::int64_t conv2d_nhwc_wgmma_takes(const Conv2dShape& shape, ElementType compute_type,
                                     const Target& target);
std::int64_t conv2d_nhwc_wgmma_packed(const Conv2dShape& shape, ElementType, int);  // bytes
// What it wrote is complete on return.
void conv2d_nhwc_wgmma_pack(const float* weight,  // [K, C, R, S]
                            void* packed,         // [conv2d_nhwc_wgmma_packed]
                            const Conv2dShape& shape, ElementType compute_type, Stream stream);
void conv2d_nhwc_wgmma(const ConstImages& input,  // [N, H, W]
                       const void* packed,        // [conv2d_nhwc_wgmma_packed]
                       const Images& output,      // [N, OH, OW]
                       const Conv2dShape& shape, ElementType compute_type, const Prologue& prologue,
                       const Epilogue& epilogue, const Launch& launch);

// A 3x3 convolution of stride 1, and a max pool of 2x2, stride 2, behind it:
//
//   y = max_pool2d(activation(conv2d(x) + bias))
//
// x and y are stored as what is multiplied, weights packed as conv2d_nhwc_wgmma's. The activation
// is a clamp. The bits are those of one behind the other with the same tile and split, but for the
// sign of a zero that no clamp made; overflow is reported of values that are
// pooled.
//
// 1 where a device runs it, and by the model of times faster than one behind the other.
std::int64_t conv2d_nhwc_wgmma_pool_takes(const Conv2dShape& shape, ElementType compute_type,
                                          const Target& target);
void conv2d_nhwc_wgmma_pool(const ConstImages& input,  // [N, H, W]
                            const void* packed,        // [conv2d_nhwc_wgmma_packed]
                            const Images& output,      // [N, OH / 2, OW / 2]
                            const Conv2dShape& shape, ElementType compute_type,
                            const Epilogue& epilogue, const Launch& launch);

// Two convolutions as one kernel, whose x, weights and windows are their own, of as many output
// pixels:
//
//   y = activation(conv2d(x) + conv2d(other) + bias), or
//   y = activation([conv2d(x), conv2d(other)] + bias), with `beside`: one's filters, in
//   sixty-fours,
//       then the other's
//
// What they read has one storage type. The ready channels are those of x.
// The epilogue has no residual.
struct Conv2dPairShape {
  static constexpr bool kPassedByMember = true;

  Conv2dShape first, second;
  bool beside;
};

// 1 where a device runs it, and by the model of times faster than one behind the other.
std::int64_t conv2d_nhwc_wgmma_pair_takes(const Conv2dPairShape& shape, ElementType compute_type,
                                          const Target& target);
std::int64_t conv2d_nhwc_wgmma_pair_packed(const Conv2dPairShape& shape, ElementType,
                                           int);             // bytes
void conv2d_nhwc_wgmma_pair_pack(const float* weight,        // [K, C, R, S]
                                 const float* other_weight,  // [other's K, C, R, S]
                                 void* packed,               // [conv2d_nhwc_wgmma_pair_packed]
                                 const Conv2dPairShape& shape, ElementType compute_type,
                                 Stream stream);
void conv2d_nhwc_wgmma_pair(const ConstImages& input,        // [N, H, W]
                            const ConstImages& other_input,  // [N, other's H, W]
                            const void* packed,              // [conv2d_nhwc_wgmma_pair_packed]
                            const Images& output,            // [N, OH, OW]
                            const Conv2dPairShape& shape, ElementType compute_type,
                            const Epilogue& epilogue, const Launch& launch);

// A first layer: x is [N, C, H, W] in float32, which is rounded as it is read, or multiplied as two
// parts of tf32. One group of at most four channels, kernels of at most eight columns, without
// dilation, 1 or 2 columns apart. What is not finite makes NaN of the sums of windows that end just
// before it, too: up to three columns.
std::int64_t conv2d_nhwc_wgmma_planar_takes(const Conv2dShape& shape, ElementType compute_type,
                                            const Target& target);
std::int64_t conv2d_nhwc_wgmma_planar_packed(const Conv2dShape& shape, ElementType,
                                             int);       // bytes
void conv2d_nhwc_wgmma_planar_pack(const float* weight,  // [K, C, R, S]
                                   void* packed,         // [conv2d_nhwc_wgmma_planar_packed]
                                   const Conv2dShape& shape, ElementType compute_type,
                                   Stream stream);
void conv2d_nhwc_wgmma_planar(const float* input,    // [N, C, H, W]
                              const void* packed,    // [conv2d_nhwc_wgmma_planar_packed]
                              const Images& output,  // [N, OH, OW]
                              const Conv2dShape& shape, ElementType compute_type,
                              const Epilogue& epilogue, Stream stream);

}  // namespace cnn_engine::cuda
