// pad2d: y[n,c,i,j] = x[n, c, i - PT, j - PL] inside the image, 0 in a border of PT rows above it,
// PB below, PL columns on the left and PR on the right.
//
// Layouts: x [N,C,H,W], y [N,C,H+PT+PB,W+PL+PR]; float32, C-contiguous.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct Pad2dShape {
  int n, c, h, w;                                  // input [N, C, H, W]
  int pad_top, pad_left;                           // added above and on the left
  int pad_bottom = pad_top, pad_right = pad_left;  // below and on the right
  static constexpr int kOptionalMembers = 2;

  CNN_ENGINE_INLINE int out_h() const { return h + pad_top + pad_bottom; }
  CNN_ENGINE_INLINE int out_w() const { return w + pad_left + pad_right; }
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
    require_at_least("padding height", pad_top < pad_bottom ? pad_top : pad_bottom, 0);
    require_at_least("padding width", pad_left < pad_right ? pad_left : pad_right, 0);
    require_at_least("padded height", std::int64_t{h} + pad_top + pad_bottom, 1);
    require_at_least("padded width", std::int64_t{w} + pad_left + pad_right, 1);
    require_indexable("output", c, out_h(), out_w());
  }
};

namespace cpu {
void pad2d(const float* input,  // [N, C, H, W]
           float* output,       // [N, C, OH, OW]
           const Pad2dShape& shape, int threads);
}
namespace cuda {
void pad2d(const float* input,  // [N, C, H, W]
           float* output,       // [N, C, OH, OW]
           const Pad2dShape& shape, Stream stream);
}
}  // namespace cnn_engine
