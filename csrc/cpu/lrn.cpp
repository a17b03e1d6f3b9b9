// lrn on the CPU: a channel's positions of one image at a time.
#include "ops/lrn.h"

#include <math.h>

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void lrn(const float* input, float* output, const LrnShape& shape, int threads) {
  const LrnShape p = shape;
  const float scale = p.alpha / static_cast<float>(p.size);
  parallel_for(std::int64_t{p.n} * p.c, std::int64_t{p.inner} * (20 + p.size), threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t index = begin; index < end; ++index) {
                   const int channel = static_cast<int>(index % p.c);
                   const int first = p.first(channel), last = p.last(channel);
                   const float* image = input + (index - channel) * p.inner;
                   const float* x = input + index * p.inner;
                   float* y = output + index * p.inner;
                   for (int i = 0; i < p.inner; ++i) y[i] = 0.0f;
                   for (int d = first; d <= last; ++d) {
                     const float* from = image + std::int64_t{d} * p.inner;
                     for (int i = 0; i < p.inner; ++i) y[i] += from[i] * from[i];
                   }
                   for (int i = 0; i < p.inner; ++i) {
                     y[i] = x[i] / ::powf(p.k + scale * y[i], p.beta);
                   }
                 }
               });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
