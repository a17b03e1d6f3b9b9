// pad2d: y[n,c,i,j] = x[n, c, i - PH, j - PW] inside the image, 0 in a border of PH rows and PW
// columns.
//
// Layouts: x [N,C,H,W], y [N,C,H+2PH,W+2PW]; float32, C-contiguous.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct Pad2dShape {
  int n, c, h, w;    // input [N, C, H, W]
  int pad_h, pad_w;  // added above and below, left and right

  CNN_ENGINE_INLINE int out_h() const { return h + 2 * pad_h; }
  CNN_ENGINE_INLINE int out_w() const { return w + 2 * pad_w; }
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
    require_at_least("padding height", pad_h, 0);
    require_at_least("padding width", pad_w, 0);
    require_at_least("padded height", std::int64_t{h} + 2 * std::int64_t{pad_h}, 1);
    require_at_least("padded width", std::int64_t{w} + 2 * std::int64_t{pad_w}, 1);
    require_indexable("output", c, out_h(), out_w());
  }
};

namespace cpu {
void pad2d(const float* input,  // [N, C, H, W]
           float* output,       // [N, C, H + 2 PH, W + 2 PW]
           const Pad2dShape& shape, int threads);
}
namespace cuda {
void pad2d(const float* input,  // [N, C, H, W]
           float* output,       // [N, C, H + 2 PH, W + 2 PW]
           const Pad2dShape& shape, Stream stream);
}
}  // namespace cnn_engine
