// interpolate_axis on the CPU: a line of the output at a time, or a number where the axis is the
// last.
#include "ops/interpolate_axis.h"

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void interpolate_axis(const float* x, const std::int64_t* index, const float* weight, float* y,
                      const InterpolateShape& shape, int threads) {
  const InterpolateShape p = shape;
  parallel_for(p.outer * p.length, p.inner * p.taps, threads,
               [=](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t line = begin; line < end; ++line) {
                   const float* from = x + line / p.length * p.axis * p.inner;
                   const std::int64_t* positions = index + line % p.length * p.taps;
                   const float* weights = weight + line % p.length * p.taps;
                   float* to = y + line * p.inner;
                   if (p.inner == 1) {
                     float sum = 0.0f;
                     for (int t = 0; t < p.taps; ++t) {
                       if (weights[t] != 0.0f) sum += weights[t] * from[positions[t]];
                     }
                     *to = sum;
                     continue;
                   }
                   for (std::int64_t i = 0; i < p.inner; ++i) to[i] = 0.0f;
                   for (int t = 0; t < p.taps; ++t) {
                     const float* source = from + positions[t] * p.inner;
                     const float w = weights[t];
                     if (w == 0.0f) continue;
#pragma omp simd
                     for (std::int64_t i = 0; i < p.inner; ++i) to[i] += w * source[i];
                   }
                 }
               });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
