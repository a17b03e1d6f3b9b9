// conv2d_nhwc: conv2d over images whose channels lie side by side, with what comes before and after
// it:
//
//   y = activation(conv2d(z) + bias + residual);  z = max(x * scale + shift, floor) inside the
//   image
//
// conv2d is the formula of conv2d.h, z is 0 outside the image. Weights are packed once for a
// method, by conv2d_nhwc_pack. The activation is a function of unary.h with its alpha and beta;
// clip with -inf and inf is none. NaN stays NaN, in z too.
//
// Methods:
//   direct     any kernel, stride, padding, dilation and groups
//   planar     the same without groups, reading x as [N,C,H,W]: for a first layer of few channels
//   depthwise  groups of one channel, or of as many filters as channels; no prologue
//   winograd2, winograd4  3x3, stride 1, no dilation, one group: Winograd's convolution with output
//              tiles of 2x2 or 4x4 (cpu/fused/cook_toom.h); directly where the values of an
//              output's window, or the weights, are not for it (cpu/window_bound.h)
// Each output is within (16 + K / 8) u of the sum of |x||w| over its own window of K terms, and
// exactly the bias where its x are all 0. Its order of sums depends on its image, the weights and
// the method alone: the same bits with any number of threads and any batch.
//
// Layouts: x [N,H,W,x_pitch], residual (may be null, not y) [N,OH,OW,residual_pitch], y
// [N,OH,OW,y_pitch], of which the first C, K and K of each row are meant; scale, shift [C], scale
// [N,C] with scale_per_image; each null where there is none; float32, but on CUDA x, residual and y
// each as its Images says. Packed weights and the workspace hold what conv2d_nhwc_packed (floats)
// and conv2d_nhwc_workspace (bytes) say.
#pragma once

#include "ops/conv2d.h"
#include "ops/epilogue.h"
#include "ops/images.h"
#include "ops/launch.h"
#include "ops/types.h"
#include "ops/unary.h"

namespace cnn_engine {

enum class Conv2dMethod { direct, planar, depthwise, winograd2, winograd4 };

inline const char* name_of(Conv2dMethod method) {
  switch (method) {
    case Conv2dMethod::direct:
      return "direct";
    case Conv2dMethod::planar:
      return "planar";
    case Conv2dMethod::depthwise:
      return "depthwise";
    case Conv2dMethod::winograd2:
      return "winograd2";
    case Conv2dMethod::winograd4:
      return "winograd4";
  }
  return nullptr;
}

// Elements from the channels of one position to those of the next.
struct Conv2dPitches {
  int x, y;
  int residual = 0;
  static constexpr int kOptionalMembers = 1;

  void validate() const {
    require_at_least("input pitch", x, 1);
    require_at_least("output pitch", y, 1);
    require_at_least("residual pitch", residual, 0);
  }
};

namespace cpu {
std::int64_t conv2d_nhwc_packed(const Conv2dShape& shape, Conv2dMethod method);
void conv2d_nhwc_pack(const float* weight,  // [K, C / groups, R, S]
                      float* packed,        // [conv2d_nhwc_packed]
                      const Conv2dShape& shape, Conv2dMethod method, int threads);
std::int64_t conv2d_nhwc_workspace(const Conv2dShape& shape, Conv2dMethod method, int threads);
void conv2d_nhwc(const float* input,     // [N, H, W, pitches.x]; planar: [N, C, H, W]
                 const float* packed,    // [conv2d_nhwc_packed]
                 const float* bias,      // [K] or null
                 const float* residual,  // [N, OH, OW, pitches.residual] or null
                 const float* scale,     // [C] or [N, C], or null; direct alone
                 const float* shift,     // [C] or null; with scale
                 float* output,          // [N, OH, OW, pitches.y]
                 void* workspace, const Conv2dShape& shape, const Conv2dPitches& pitches,
                 Conv2dMethod method, bool scale_per_image, float floor, UnaryFunction activation,
                 float alpha, float beta, int threads);

// The direct method with z and the weights rounded to bfloat16, and sums of float32; with groups,
// those have an even number of channels. For CPUs that cpu/kernels.h's bfloat16_why_not takes.
std::int64_t conv2d_nhwc_bfloat16_packed(const Conv2dShape& shape);
void conv2d_nhwc_bfloat16_pack(const float* weight, float* packed, const Conv2dShape& shape);
std::int64_t conv2d_nhwc_bfloat16_workspace(const Conv2dShape& shape, int threads);
void conv2d_nhwc_bfloat16(const float* input, const float* packed, const float* bias,
                          const float* residual, const float* scale, const float* shift,
                          float* output, void* workspace, const Conv2dShape& shape,
                          const Conv2dPitches& pitches, bool scale_per_image, float floor,
                          UnaryFunction activation, float alpha, float beta, int threads);
}  // namespace cpu

namespace cuda {
// On tensor cores; the direct method, or the planar one, of at most four channels, where x has a
// pitch of 0. Images lie in memory as float32 or as the 16-bit type that is multiplied. The
// prologue needs a kernel of 1x1 without padding, channels in runs of 16 bytes, filters in fours,
// and all at 16 bytes. Where operands have 16 bits and x has 32, x is rounded into the workspace
// first. What conv2d_nhwc_pack wrote is complete on return. The launch's rank and workspace are
// heeded.
std::int64_t conv2d_nhwc_packed(const Conv2dShape& shape, bool planar, ElementType compute_type,
                                int);  // bytes
std::int64_t conv2d_nhwc_workspace(const Conv2dShape& shape, bool planar, ElementType compute_type,
                                   ElementType x, int);  // bytes
void conv2d_nhwc_pack(const float* weight,               // [K, C / groups, R, S]
                      void* packed,                      // [conv2d_nhwc_packed]
                      const Conv2dShape& shape, bool planar, ElementType compute_type,
                      Stream stream);
void conv2d_nhwc(const ConstImages& input,  // [N, H, W]; planar: float32 [N, C, H, W]
                 const void* packed,        // [conv2d_nhwc_packed]
                 const Images& output,      // [N, OH, OW]
                 const Conv2dShape& shape, ElementType compute_type, const Prologue& prologue,
                 const Epilogue& epilogue, const Launch& launch);
}  // namespace cuda
}  // namespace cnn_engine
