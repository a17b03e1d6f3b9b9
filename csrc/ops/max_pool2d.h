// max_pool2d: y[n,c,i,j] = max over r < R, s < S of x[n, c, i*SH + r*DH - PT, j*SW + s*DW - PL]
//
// Positions outside the image do not take part; a window with none inside gives -inf. A NaN in the
// window makes the output NaN, and a window of -inf gives -inf, as in PyTorch. Layouts: x
// [N,C,H,W], y [N,C,OH,OW]; float32, C-contiguous.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct MaxPool2dShape {
  int n, c, h, w;                                  // input [N, C, H, W]
  int r, s;                                        // window
  int stride_h, stride_w;                          // rows and columns apart
  int pad_top, pad_left;                           // above and on the left
  int pad_bottom = pad_top, pad_right = pad_left;  // below and on the right
  int dilation_h = 1, dilation_w = 1;  // rows and columns between two positions of a window
  static constexpr int kOptionalMembers = 4;

  CNN_ENGINE_INLINE int out_h() const {
    return (h + pad_top + pad_bottom - dilation_h * (r - 1) - 1) / stride_h + 1;
  }
  CNN_ENGINE_INLINE int out_w() const {
    return (w + pad_left + pad_right - dilation_w * (s - 1) - 1) / stride_w + 1;
  }
  CNN_ENGINE_INLINE std::int64_t input_size() const { return std::int64_t{n} * c * h * w; }
  CNN_ENGINE_INLINE std::int64_t output_size() const {
    return std::int64_t{n} * c * out_h() * out_w();
  }
  CNN_ENGINE_INLINE std::int64_t flops() const { return 0; }
  CNN_ENGINE_INLINE std::int64_t bytes() const { return 4 * (input_size() + output_size()); }

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
    const std::int64_t window_h = std::int64_t{dilation_h} * (r - 1) + 1;
    const std::int64_t window_w = std::int64_t{dilation_w} * (s - 1) + 1;
    // Past it a whole window would lie outside the image and have no maximum.
    require_at_least("window height less the padding",
                     window_h - (pad_top > pad_bottom ? pad_top : pad_bottom), 1);
    require_at_least("window width less the padding",
                     window_w - (pad_left > pad_right ? pad_left : pad_right), 1);
    require_at_least("padded height less the window",
                     std::int64_t{h} + pad_top + pad_bottom - window_h, 0);
    require_at_least("padded width less the window",
                     std::int64_t{w} + pad_left + pad_right - window_w, 0);
    require_indexable("input", c, h, w);
    require_indexable("output", c, out_h(), out_w());
  }
};

namespace cpu {
void max_pool2d(const float* input,  // [N, C, H, W]
                float* output,       // [N, C, OH, OW]
                const MaxPool2dShape& shape, int threads);
}
namespace cuda {
void max_pool2d(const float* input,  // [N, C, H, W]
                float* output,       // [N, C, OH, OW]
                const MaxPool2dShape& shape, Stream stream);
}
}  // namespace cnn_engine
