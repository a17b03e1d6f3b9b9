// conv2d: y[n,k,i,j] = b[k] + sum over c,r,s of x[n, g*C/G + c, i*SH + r*DH - PT, j*SW + s*DW - PL]
//                                              * w[k,c,r,s],  where g = k / (K/G)
//
// A cross-correlation, as every deep-learning library defines it; x is 0 outside the image. Filters
// and channels are in G groups that do not see each other. One dimension is H = R = 1.
// Layouts: x [N,C,H,W], w [K,C/G,R,S], b [K] or null, y [N,K,OH,OW]; float32, C-contiguous.
//
// Variants: `direct` (--variant if) tests the image's bounds in the innermost loop. `pad` reads an
// input that pad2d has already padded: its shape has no padding, and no bounds are tested. `tiled`
// (CUDA, one group) sums in registers over tiles of the input that lie in shared memory with their
// border. With `reduction`, several lanes share one output's sum: SIMD lanes on the CPU, a warp on
// CUDA. The variant `blocked` has a contract of its own: conv2d_blocked.h.
#pragma once

#include "ops/panels.h"
#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

enum class Conv2dVariant { direct, pad, tiled };

inline const char* name_of(Conv2dVariant variant) {
  switch (variant) {
    case Conv2dVariant::direct:
      return "direct";
    case Conv2dVariant::pad:
      return "pad";
    case Conv2dVariant::tiled:
      return "tiled";
  }
  return nullptr;
}

struct Conv2dShape {
  int n, c, h, w;                                  // input  [N, C, H, W]
  int k, r, s;                                     // weight [K, C / groups, R, S]
  int stride_h, stride_w;                          // rows and columns apart
  int pad_top, pad_left;                           // zeros above and on the left
  int pad_bottom = pad_top, pad_right = pad_left;  // below and on the right
  int dilation_h = 1, dilation_w = 1;              // rows and columns between two kernel offsets
  int groups = 1;
  static constexpr int kOptionalMembers = 5;

  CNN_ENGINE_INLINE int out_h() const {
    return (h + pad_top + pad_bottom - dilation_h * (r - 1) - 1) / stride_h + 1;
  }
  CNN_ENGINE_INLINE int out_w() const {
    return (w + pad_left + pad_right - dilation_w * (s - 1) - 1) / stride_w + 1;
  }
  CNN_ENGINE_INLINE int group_channels() const { return c / groups; }
  CNN_ENGINE_INLINE int group_filters() const { return k / groups; }
  CNN_ENGINE_INLINE int filter_size() const {
    return group_channels() * r * s;
  }  // weights of a filter
  // One channel a group: a convolution of each channel by itself.
  CNN_ENGINE_INLINE bool depthwise() const { return groups > 1 && groups == c; }
  // Floats of the weights as conv2d_blocked.h packs them.
  CNN_ENGINE_INLINE std::int64_t packed_size() const {
    return depthwise() ? weight_size() : groups * panels().size();
  }
  CNN_ENGINE_INLINE Panels panels() const {
    return Panels(group_filters(), filter_size());
  }  // of a group
  CNN_ENGINE_INLINE std::int64_t input_size() const { return std::int64_t{n} * c * h * w; }
  CNN_ENGINE_INLINE std::int64_t weight_size() const { return std::int64_t{k} * filter_size(); }
  CNN_ENGINE_INLINE std::int64_t output_size() const {
    return std::int64_t{n} * k * out_h() * out_w();
  }
  CNN_ENGINE_INLINE std::int64_t flops() const { return 2 * output_size() * filter_size(); }
  // Each tensor once: the least that any kernel must move.
  CNN_ENGINE_INLINE std::int64_t bytes() const {
    return 4 * (input_size() + weight_size() + k + output_size());
  }

  void validate() const {
    require_at_least("batch", n, 0);
    require_at_least("channels", c, 1);
    require_at_least("height", h, 1);
    require_at_least("width", w, 1);
    require_at_least("filters", k, 1);
    require_at_least("kernel height", r, 1);
    require_at_least("kernel width", s, 1);
    require_at_least("stride height", stride_h, 1);
    require_at_least("stride width", stride_w, 1);
    require_at_least("padding height", pad_top < pad_bottom ? pad_top : pad_bottom, 0);
    require_at_least("padding width", pad_left < pad_right ? pad_left : pad_right, 0);
    require_at_least("dilation height", dilation_h, 1);
    require_at_least("dilation width", dilation_w, 1);
    require_at_least("groups", groups, 1);
    require_at_least("channels in whole groups", c % groups == 0, 1);
    require_at_least("filters in whole groups", k % groups == 0, 1);
    const std::int64_t padded_h = std::int64_t{h} + pad_top + pad_bottom;
    const std::int64_t padded_w = std::int64_t{w} + pad_left + pad_right;
    require_at_least("padded height less the kernel",
                     padded_h - std::int64_t{dilation_h} * (r - 1) - 1, 0);
    require_at_least("padded width less the kernel",
                     padded_w - std::int64_t{dilation_w} * (s - 1) - 1, 0);
    require_indexable("input", c, h, w);
    require_indexable("padded input", c, padded_h, padded_w);
    require_indexable("filter", group_channels(), r, s);
    require_indexable("output", k, out_h(), out_w());
  }
};

namespace cpu {
void conv2d(const float* input,   // [N, C, H, W]
            const float* weight,  // [K, C / groups, R, S]
            const float* bias,    // [K] or null
            float* output,        // [N, K, OH, OW]
            const Conv2dShape& shape, Conv2dVariant variant, bool reduction, int threads);
}
namespace cuda {
void conv2d(const float* input,   // [N, C, H, W]
            const float* weight,  // [K, C / groups, R, S]
            const float* bias,    // [K] or null
            float* output,        // [N, K, OH, OW]
            const Conv2dShape& shape, Conv2dVariant variant, bool reduction, Stream stream);
}
}  // namespace cnn_engine
