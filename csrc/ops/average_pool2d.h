// Pools that sum over the window of max_pool2d.h; positions outside the image are 0:
//
//   average_pool2d  y = sum of the window / count
//   lp_pool2d       y = (sum over the window of |x| to the p) to the 1/p
//
// The count is of the window's positions in the image, or with count_include_pad of those in the
// image or its padding; never of those in the extra rows and columns, which only make room for a
// last window. Sums are in the order row, column. A window without a position to count gives 0.
// Layouts: x [N,C,H,W], y [N,C,OH,OW]; float32, C-contiguous.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct AveragePool2dShape {
  int n, c, h, w;                                // input [N, C, H, W]
  int r, s;                                      // window
  int stride_h, stride_w;                        // rows and columns apart
  int pad_top, pad_left, pad_bottom, pad_right;  // zeros around the image
  int dilation_h, dilation_w;                    // between two positions of a window
  int extra_h, extra_w;                          // below and on the right, beyond the padding

  CNN_ENGINE_INLINE int out_h() const {
    return (h + pad_top + pad_bottom + extra_h - dilation_h * (r - 1) - 1) / stride_h + 1;
  }
  CNN_ENGINE_INLINE int out_w() const {
    return (w + pad_left + pad_right + extra_w - dilation_w * (s - 1) - 1) / stride_w + 1;
  }
  CNN_ENGINE_INLINE std::int64_t input_size() const { return std::int64_t{n} * c * h * w; }
  CNN_ENGINE_INLINE std::int64_t output_size() const {
    return std::int64_t{n} * c * out_h() * out_w();
  }
  CNN_ENGINE_INLINE std::int64_t flops() const { return 0; }
  CNN_ENGINE_INLINE std::int64_t bytes() const { return 4 * (input_size() + output_size()); }

  // Positions of a window from `start` that lie in [0, size), or in [-before, size + after).
  static CNN_ENGINE_INLINE int count(int start, int positions, int dilation, int size, int before,
                                     int after) {
    const std::int64_t first = start + std::int64_t{before};
    const std::int64_t below = first >= 0 ? 0 : (-first + dilation - 1) / dilation;
    const std::int64_t room = std::int64_t{size} + before + after - first;
    std::int64_t up_to = room <= 0 ? 0 : (room + dilation - 1) / dilation;
    if (up_to > positions) up_to = positions;
    return up_to > below ? static_cast<int>(up_to - below) : 0;
  }
  // What the sum of the window from (top, left) is divided by.
  CNN_ENGINE_INLINE float divisor(int top, int left, bool count_include_pad) const {
    const int before_h = count_include_pad ? pad_top : 0,
              after_h = count_include_pad ? pad_bottom : 0;
    const int before_w = count_include_pad ? pad_left : 0,
              after_w = count_include_pad ? pad_right : 0;
    const float positions = static_cast<float>(count(top, r, dilation_h, h, before_h, after_h)) *
                            static_cast<float>(count(left, s, dilation_w, w, before_w, after_w));
    return positions > 0.0f ? positions : 1.0f;
  }

  void validate() const {
    require_at_least("batch", n, 0);
    require_at_least("channels", c, 1);
    require_at_least("height", h, 1);
    require_at_least("width", w, 1);
    require_at_least("window height", r, 1);
    require_at_least("window width", s, 1);
    require_at_least("stride height", stride_h, 1);
    require_at_least("stride width", stride_w, 1);
    require_at_least("padding height", pad_top < pad_bottom ? pad_top : pad_bottom, 0);
    require_at_least("padding width", pad_left < pad_right ? pad_left : pad_right, 0);
    require_at_least("dilation height", dilation_h, 1);
    require_at_least("dilation width", dilation_w, 1);
    require_at_least("extra rows", extra_h, 0);
    require_at_least("extra columns", extra_w, 0);
    const std::int64_t padded_h = std::int64_t{h} + pad_top + pad_bottom + extra_h;
    const std::int64_t padded_w = std::int64_t{w} + pad_left + pad_right + extra_w;
    require_at_least("padded height less the window",
                     padded_h - std::int64_t{dilation_h} * (r - 1) - 1, 0);
    require_at_least("padded width less the window",
                     padded_w - std::int64_t{dilation_w} * (s - 1) - 1, 0);
    require_indexable("input", c, h, w);
    require_indexable("padded input", c, padded_h, padded_w);
    require_indexable("output", c, out_h(), out_w());
  }
};

namespace cpu {
void average_pool2d(const float* input,  // [N, C, H, W]
                    float* output,       // [N, C, OH, OW]
                    const AveragePool2dShape& shape, bool count_include_pad, int threads);
void lp_pool2d(const float* input,  // [N, C, H, W]
               float* output,       // [N, C, OH, OW]
               const AveragePool2dShape& shape, int p, int threads);
}  // namespace cpu
namespace cuda {
void average_pool2d(const float* input,  // [N, C, H, W]
                    float* output,       // [N, C, OH, OW]
                    const AveragePool2dShape& shape, bool count_include_pad, Stream stream);
void lp_pool2d(const float* input,  // [N, C, H, W]
               float* output,       // [N, C, OH, OW]
               const AveragePool2dShape& shape, int p, Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
