// affine_channel on the CPU: a channel's elements side by side, or all channels of a position where
// they are.
#include "ops/affine_channel.h"

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void affine_channel(const float* x, const float* center, const float* scale, const float* shift,
                    float* y, const ChannelShape& shape, int threads) {
  const ChannelShape p = shape;
  if (p.inner == 1) {
    parallel_for(p.outer, p.channels, threads, [=](std::int64_t begin, std::int64_t end) {
      for (std::int64_t o = begin; o < end; ++o) {
        const float* from = x + o * p.channels;
        float* to = y + o * p.channels;
        if (center != nullptr) {
#pragma omp simd
          for (std::int64_t c = 0; c < p.channels; ++c) {
            to[c] = (from[c] - center[c]) * scale[c] + shift[c];
          }
        } else {
#pragma omp simd
          for (std::int64_t c = 0; c < p.channels; ++c) to[c] = from[c] * scale[c] + shift[c];
        }
      }
    });
    return;
  }
  parallel_for(p.outer * p.channels, p.inner, threads, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t c = row % p.channels;
      const float middle = center != nullptr ? center[c] : 0.0f;
      const float factor = scale[c];
      const float above = shift[c];
      const float* from = x + row * p.inner;
      float* to = y + row * p.inner;
#pragma omp simd
      for (std::int64_t i = 0; i < p.inner; ++i) to[i] = (from[i] - middle) * factor + above;
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
