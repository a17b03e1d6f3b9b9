// max_pool2d: y[n,c,i,j] = max over r < R, s < S of x[n, c, i*SH + r - PH, j*SW + s - PW]
//
// Places outside the image do not take part. A NaN in the window makes the output NaN, and a window
// of -inf gives -inf, as in PyTorch. Layouts: x [N,C,H,W], y [N,C,OH,OW]; float32, C-contiguous.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct MaxPool2dShape {
  int n, c, h, w;                        // input [N, C, H, W]
  int r, s;                              // window
  int stride_h, stride_w, pad_h, pad_w;  // rows and columns apart

  CNN_ENGINE_INLINE int out_h() const { return (h + 2 * pad_h - r) / stride_h + 1; }
  CNN_ENGINE_INLINE int out_w() const { return (w + 2 * pad_w - s) / stride_w + 1; }
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
    require_at_least("padding height", pad_h, 0);
    require_at_least("padding width", pad_w, 0);
    // Past half the window a whole window could lie outside the image and have no maximum.
    require_at_least("half the window height less the padding", r / 2 - std::int64_t{pad_h}, 0);
    require_at_least("half the window width less the padding", s / 2 - std::int64_t{pad_w}, 0);
    require_at_least("padded height less the window", std::int64_t{h} + 2 * std::int64_t{pad_h} - r,
                     0);
    require_at_least("padded width less the window", std::int64_t{w} + 2 * std::int64_t{pad_w} - s,
                     0);
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
