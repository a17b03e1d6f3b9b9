// normalize_rows: y[r,i] = (x[r,i] - mean[r]) * inverse[r] * scale[c] + shift[c], with the mean of
// row r and inverse = 1 / sqrt(variance + epsilon) of the same elements; c = (r % groups) *
// channels + i / span. Instance, group and layer normalisation are this:
//
//   instance  rows N*C,     groups C,  channels 1,     span H*W
//   group     rows N*G,     groups G,  channels C/G,   span H*W
//   layer     rows outer,   groups 1,  channels inner, span 1
//
// Where it is not `centered`, the mean is taken for 0 and the mean of squares for the variance: RMS
// normalisation.
//
// Layouts: x and y [rows, channels, span], scale and shift [groups * channels], mean and inverse
// [rows]; float32, C-contiguous; y may be x. Sums are taken of differences from the row's first
// element, which a mean that is large beside the deviation costs no digits: in float64, or on CUDA,
// where no statistics are asked for, in float32 of a row that the lanes of a warp share, which add
// up the squares of what they hold less the mean.
#pragma once

#include "ops/strided.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct NormalizeRowsShape {
  std::int64_t rows, groups, channels, span;
  float epsilon;
  bool centered;

  CNN_ENGINE_INLINE std::int64_t row() const { return channels * span; }

  void validate() const {
    require_dims({rows, channels, span, 1, 1, 1, 1, 1});
    require_dims({groups, channels, 1, 1, 1, 1, 1, 1});
    if (groups < 1) {
      throw std::invalid_argument("groups: expected at least 1, found " + std::to_string(groups));
    }
  }
};

namespace cpu {
void normalize_rows(const float* x,      // [rows, channels, span]
                    const float* scale,  // [groups * channels]; null: 1
                    const float* shift,  // [groups * channels]; null: 0
                    float* y,            // [rows, channels, span]
                    float* mean,         // [rows], or null
                    float* inverse,      // [rows], or null
                    const NormalizeRowsShape& shape, int threads);
}
namespace cuda {
void normalize_rows(const float* x,      // [rows, channels, span]
                    const float* scale,  // [groups * channels]; null: 1
                    const float* shift,  // [groups * channels]; null: 0
                    float* y,            // [rows, channels, span]
                    float* mean,         // [rows], or null
                    float* inverse,      // [rows], or null
                    const NormalizeRowsShape& shape, Stream stream);
}
}  // namespace cnn_engine
