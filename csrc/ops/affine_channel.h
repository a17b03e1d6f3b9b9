// affine_channel: y[o,c,i] = (x[o,c,i] - center[c]) * scale[c] + shift[c]: batch normalisation with
// the statistics of training. Subtracting first keeps what a large mean would round away.
//
// Layouts: x and y [outer, channels, inner], center, scale and shift [channels]; float32,
// C-contiguous; y may be x.
#pragma once

#include "ops/strided.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct ChannelShape {
  std::int64_t outer, channels, inner;

  void validate() const { require_dims({outer, channels, inner, 1, 1, 1, 1, 1}); }
};

namespace cpu {
void affine_channel(const float* x,       // [outer, channels, inner]
                    const float* center,  // [channels]; null: 0
                    const float* scale,   // [channels]
                    const float* shift,   // [channels]
                    float* y,             // [outer, channels, inner]
                    const ChannelShape& shape, int threads);
}
namespace cuda {
void affine_channel(const float* x,       // [outer, channels, inner]
                    const float* center,  // [channels]; null: 0
                    const float* scale,   // [channels]
                    const float* shift,   // [channels]
                    float* y,             // [outer, channels, inner]
                    const ChannelShape& shape, Stream stream);
}
}  // namespace cnn_engine
