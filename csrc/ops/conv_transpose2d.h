// conv_transpose2d: what conv2d's gradient is; every input element writes a filter:
//
//   y[n, k, i*SH + r*DH - PT, j*SW + s*DW - PL] += x[n,c,i,j] * w[c, k mod K/G, r, s],  then b[k]
//
// for the channels c of k's group; positions outside y are dropped, and padding may be negative
// (zeros around). Each output is one sum in the order channel, row, column of the filter. Layouts:
// x [N,C,H,W], w [C,K/G,R,S], b [K] or null, y [N,K,OH,OW]; float32, C-contiguous.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct ConvTranspose2dShape {
  int n, c, h, w;                                // input  [N, C, H, W]
  int k, r, s;                                   // weight [C, K / groups, R, S]
  int stride_h, stride_w;                        // rows and columns apart
  int pad_top, pad_left, pad_bottom, pad_right;  // taken away from the output
  int dilation_h, dilation_w;                    // rows and columns between two kernel offsets
  int groups;
  int output_pad_h, output_pad_w;  // added below and on the right

  CNN_ENGINE_INLINE std::int64_t full_h() const {
    return std::int64_t{h - 1} * stride_h + std::int64_t{r - 1} * dilation_h + 1 + output_pad_h;
  }
  CNN_ENGINE_INLINE std::int64_t full_w() const {
    return std::int64_t{w - 1} * stride_w + std::int64_t{s - 1} * dilation_w + 1 + output_pad_w;
  }
  CNN_ENGINE_INLINE int out_h() const { return static_cast<int>(full_h() - pad_top - pad_bottom); }
  CNN_ENGINE_INLINE int out_w() const { return static_cast<int>(full_w() - pad_left - pad_right); }
  CNN_ENGINE_INLINE int group_channels() const { return c / groups; }
  CNN_ENGINE_INLINE int group_filters() const { return k / groups; }
  CNN_ENGINE_INLINE std::int64_t input_size() const { return std::int64_t{n} * c * h * w; }
  CNN_ENGINE_INLINE std::int64_t weight_size() const {
    return std::int64_t{c} * group_filters() * r * s;
  }
  CNN_ENGINE_INLINE std::int64_t output_size() const {
    return std::int64_t{n} * k * out_h() * out_w();
  }
  CNN_ENGINE_INLINE std::int64_t flops() const {
    return 2 * input_size() * group_filters() * r * s;
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
    require_at_least("dilation height", dilation_h, 1);
    require_at_least("dilation width", dilation_w, 1);
    require_at_least("output padding height", output_pad_h, 0);
    require_at_least("output padding width", output_pad_w, 0);
    require_at_least("groups", groups, 1);
    require_at_least("channels in whole groups", c % groups == 0, 1);
    require_at_least("filters in whole groups", k % groups == 0, 1);
    require_at_least("full height", full_h(), 1);
    require_at_least("full width", full_w(), 1);
    require_at_least("output height", full_h() - pad_top - pad_bottom, 1);
    require_at_least("output width", full_w() - pad_left - pad_right, 1);
    require_indexable("input", c, h, w);
    require_indexable("full output", k, full_h(), full_w());
    require_indexable("output", k, out_h(), out_w());
    require_indexable("filters of a channel", group_filters(), r, s);
  }
};

namespace cpu {
void conv_transpose2d(const float* input,   // [N, C, H, W]
                      const float* weight,  // [C, K / groups, R, S]
                      const float* bias,    // [K] or null
                      float* output,        // [N, K, OH, OW]
                      const ConvTranspose2dShape& shape, int threads);
}
namespace cuda {
void conv_transpose2d(const float* input,   // [N, C, H, W]
                      const float* weight,  // [C, K / groups, R, S]
                      const float* bias,    // [K] or null
                      float* output,        // [N, K, OH, OW]
                      const ConvTranspose2dShape& shape, Stream stream);
}
}  // namespace cnn_engine
