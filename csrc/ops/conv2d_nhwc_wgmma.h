// conv2d_nhwc on GPUs of compute capability 9.0, whose engines bring what is multiplied to shared
// memory and multiply from there:
//
//   y = activation(conv2d(z) + bias + residual);  z = max(x * scale + shift, floor)
//
// z is rounded as x is, and other than x only for a kernel of 1x1 without padding. Layouts: as
// conv2d_nhwc's, x stored as what is multiplied, at an address and with a pitch that
// are multiples of 16 bytes. One group, channels in eights, of 32 bits in fours, strides up to 8,
// and windows that reach up to 128 places beyond the image. Tile and split of the sums are those of
// a rank, as conv2d_nhwc's. The same bits in every run; they depend on the shape and the rank
// alone. float32 is multiplied as two parts of float16, in scales of each filter's weights and each
// place's channels of a step: its error is that of float32, but an infinity in x makes NaN of the
// sums that it is a term of, and numbers that are 2^-39 of the largest that shares their scale, or
// below 2^-115, are 0.
//
// Of x, the first `known` channels, and a scale with a shift, may be read as soon as the kernel
// starts, before the kernel before it has ended; with `holds` the next kernel starts only when this
// one has waited for those before it, which had then ended when the next one starts.
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
void conv2d_nhwc_wgmma(const void* input,     // [N, H, W, pitches.x]
                       const void* packed,    // [conv2d_nhwc_wgmma_packed]
                       const float* bias,     // [K] or null
                       const void* residual,  // [N, OH, OW, pitches.residual] or null
                       const float* scale,    // [C] or [N, C], or null
                       const float* shift,    // [C] or null
                       void* output,          // [N, OH, OW, pitches.y]
                       const Conv2dShape& shape, const Conv2dPitches& pitches,
                       const Conv2dStorage& storage, const Overflow& overflow,
                       ElementType compute_type, bool scale_per_image, float floor,
                       UnaryFunction activation, float alpha, float beta, int known, bool holds,
                       int rank, Stream stream);

// A 3x3 convolution, one place apart, and a max pool of 2x2, two apart, behind it:
//
//   y = max_pool2d(activation(conv2d(x) + bias))
//
// x and y are stored as what is multiplied, weights packed as conv2d_nhwc_wgmma's. The activation
// is a clamp. The bits are those of one behind the other with the same tile and split, but for the
// sign of a zero that no clamp made; who is to be told of infinities is told of those that are
// pooled.
//
// 1 where a device runs it, and by the model of times faster than one behind the other.
std::int64_t conv2d_nhwc_wgmma_pool_takes(const Conv2dShape& shape, ElementType compute_type,
                                          const Target& target);
void conv2d_nhwc_wgmma_pool(const void* input,   // [N, H, W, pitches.x]
                            const void* packed,  // [conv2d_nhwc_wgmma_packed]
                            const float* bias,   // [K] or null
                            void* output,        // [N, OH / 2, OW / 2, pitches.y]
                            const Conv2dShape& shape, const Conv2dPitches& pitches,
                            const Overflow& overflow, ElementType compute_type,
                            UnaryFunction activation, float alpha, float beta, int rank,
                            Stream stream);

// Two convolutions as one kernel, whose x, weights and windows are their own, of as many places:
//
//   y = activation(conv2d(x) + conv2d(other) + bias), or
//   y = activation([conv2d(x), conv2d(other)] + bias), with `beside`: one's filters, in
//   sixty-fours,
//       then the other's
//
// What they read is stored alike. `known` is of x's channels.
//
// 1 where a device runs it, and by the model of times faster than one behind the other.
std::int64_t conv2d_nhwc_wgmma_pair_takes(const Conv2dShape& shape, const Conv2dShape& other,
                                          bool beside, ElementType compute_type,
                                          const Target& target);
std::int64_t conv2d_nhwc_wgmma_pair_packed(const Conv2dShape& shape, const Conv2dShape& other,
                                           bool beside, ElementType, int);  // bytes
void conv2d_nhwc_wgmma_pair_pack(const float* weight,                       // [K, C, R, S]
                                 const float* other_weight,                 // [other's K, C, R, S]
                                 void* packed,  // [conv2d_nhwc_wgmma_pair_packed]
                                 const Conv2dShape& shape, const Conv2dShape& other, bool beside,
                                 ElementType compute_type, Stream stream);
void conv2d_nhwc_wgmma_pair(const void* input,        // [N, H, W, pitches.x]
                            const void* other_input,  // [N, other's H, W, other_pitch]
                            const void* packed,       // [conv2d_nhwc_wgmma_pair_packed]
                            const float* bias,        // [K], with beside [K + other's K], or null
                            void* output,             // [N, OH, OW, pitches.y]
                            const Conv2dShape& shape, const Conv2dShape& other, bool beside,
                            const Conv2dPitches& pitches, int other_pitch,
                            const Conv2dStorage& storage, const Overflow& overflow,
                            ElementType compute_type, UnaryFunction activation, float alpha,
                            float beta, int known, bool holds, int rank, Stream stream);

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
void conv2d_nhwc_wgmma_planar(const float* input,  // [N, C, H, W]
                              const void* packed,  // [conv2d_nhwc_wgmma_planar_packed]
                              const float* bias,   // [K] or null
                              void* output,        // [N, OH, OW, y_pitch]
                              const Conv2dShape& shape, int y_pitch, ElementType storage,
                              const Overflow& overflow, ElementType compute_type,
                              UnaryFunction activation, float alpha, float beta, Stream stream);

}  // namespace cnn_engine::cuda
