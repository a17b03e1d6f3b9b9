// conv2d: y[n,k,i,j] = b[k] + sum over c,r,s of x[n, c, i*SH + r - PH, j*SW + s - PW] * w[k,c,r,s]
//
// A cross-correlation, as every deep-learning library defines it; x is 0 outside the image.
// Layouts: x [N,C,H,W], w [K,C,R,S], b [K] or null, y [N,K,OH,OW]; float32, C-contiguous.
//
// Variants: `direct` (--variant if) tests the image's bounds in the innermost loop. `pad` reads an
// input that pad2d has already padded: its shape has pad_h = pad_w = 0, and no bounds are tested.
// `tiled` (CUDA) sums in registers over tiles of the input that lie in shared memory with their
// border. With `reduction`, several lanes share one output's sum: SIMD lanes on the CPU, a warp on
// CUDA.
#pragma once

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
  int n, c, h, w;                        // input  [N, C, H, W]
  int k, r, s;                           // weight [K, C, R, S]
  int stride_h, stride_w, pad_h, pad_w;  // rows and columns apart

  CNN_ENGINE_INLINE int out_h() const { return (h + 2 * pad_h - r) / stride_h + 1; }
  CNN_ENGINE_INLINE int out_w() const { return (w + 2 * pad_w - s) / stride_w + 1; }
  CNN_ENGINE_INLINE int taps() const { return c * r * s; }  // multiply-adds an output
  CNN_ENGINE_INLINE std::int64_t input_size() const { return std::int64_t{n} * c * h * w; }
  CNN_ENGINE_INLINE std::int64_t weight_size() const { return std::int64_t{k} * c * r * s; }
  CNN_ENGINE_INLINE std::int64_t output_size() const {
    return std::int64_t{n} * k * out_h() * out_w();
  }
  CNN_ENGINE_INLINE std::int64_t flops() const { return 2 * output_size() * taps(); }
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
    require_at_least("padding height", pad_h, 0);
    require_at_least("padding width", pad_w, 0);
    require_at_least("padded height less the kernel", std::int64_t{h} + 2 * std::int64_t{pad_h} - r,
                     0);
    require_at_least("padded width less the kernel", std::int64_t{w} + 2 * std::int64_t{pad_w} - s,
                     0);
    require_indexable("input", c, h, w);
    require_indexable("padded input", c, std::int64_t{h} + 2 * std::int64_t{pad_h},
                      std::int64_t{w} + 2 * std::int64_t{pad_w});
    require_indexable("filter", c, r, s);
    require_indexable("output", k, out_h(), out_w());
  }
};

namespace cpu {
void conv2d(const float* input,   // [N, C, H, W]
            const float* weight,  // [K, C, R, S]
            const float* bias,    // [K] or null
            float* output,        // [N, K, OH, OW]
            const Conv2dShape& shape, Conv2dVariant variant, bool reduction, int threads);
}
namespace cuda {
void conv2d(const float* input,   // [N, C, H, W]
            const float* weight,  // [K, C, R, S]
            const float* bias,    // [K] or null
            float* output,        // [N, K, OH, OW]
            const Conv2dShape& shape, Conv2dVariant variant, bool reduction, Stream stream);
}
}  // namespace cnn_engine
