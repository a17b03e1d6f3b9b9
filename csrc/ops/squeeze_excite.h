// squeeze_excite on CUDA: what a channel of each image is to be multiplied with, from the means of
// all channels, by two small layers:
//
//   m[n,c] = mean of x[n,:,:,c];  h[n,s] = first(b1[s] + sum over c of w1[s,c] * m[n,c])
//   y[n,k] = second(b2[k] + sum over s of w2[k,s] * h[n,s])
//
// Layouts: x [N,H,W,x_pitch], of which the first C of each place are meant; w1 [S,C], w2 [K,S], b1,
// b2 or null, y [N,K]; float32, the weights' rows also as linear_rows.h packs them. Means are of
// float64 sums, the layers' sums float32; the order of each depends on the shape and on whether the
// GPU has clusters. The functions are of unary.h, with their alpha and beta.
#pragma once

#include "ops/linear_rows.h"

namespace cnn_engine {

struct SqueezeExciteShape {
  int n, h, w, c;  // images [N, H, W, C]
  int s, k;        // the first layer's outputs, and the second's
  int x_pitch;

  static constexpr int kMostChannels = 2560;
  static constexpr int kMostHidden = 1024;

  CNN_ENGINE_INLINE LinearShape first() const { return {n, c, s}; }
  CNN_ENGINE_INLINE LinearShape second() const { return {n, s, k}; }

  void validate() const {
    require_at_least("batch", n, 0);
    require_at_least("height", h, 1);
    require_at_least("width", w, 1);
    require_at_least("channels", c, 1);
    require_at_least("channels that are left", kMostChannels - c, 0);
    require_at_least("outputs of the first layer", s, 1);
    require_at_least("outputs of the first layer that are left", kMostHidden - s, 0);
    require_at_least("outputs", k, 1);
    require_at_least("input pitch less channels", x_pitch - c, 0);
    require_indexable("input", h, w, x_pitch);
  }
};

namespace cuda {
void squeeze_excite(const float* input,  // [N, H, W, x_pitch]
                    const void* first,   // w1, packed
                    const float* first_bias,
                    const void* second,  // w2, packed
                    const float* second_bias,
                    float* output,  // [N, K]
                    const SqueezeExciteShape& shape, Conv2dOperands operands,
                    UnaryFunction first_function, float first_alpha, float first_beta,
                    UnaryFunction second_function, float second_alpha, float second_beta,
                    Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
