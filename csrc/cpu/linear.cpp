// linear on the CPU: each output element's sum in order, or on SIMD lanes.
#include "ops/linear.h"

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

inline float sum_in_order(const float* x, const float* w, int count) {
  float sum = 0.0f;
  for (int f = 0; f < count; ++f) sum += x[f] * w[f];
  return sum;
}

inline float sum_with_reduction(const float* x, const float* w, int count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int f = 0; f < count; ++f) sum += x[f] * w[f];
  return sum;
}

}  // namespace

void linear(const float* input, const float* weight, const float* bias, float* output,
            const LinearShape& shape, bool reduction, int threads) {
  const int features = shape.in_features;
  const int out = shape.out_features;
  const std::int64_t outputs = shape.output_size();
  parallel_for(outputs, features, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t m = index % out;
      const float* x = input + index / out * features;
      const float* w = weight + m * features;
      const float sum =
          reduction ? sum_with_reduction(x, w, features) : sum_in_order(x, w, features);
      output[index] = bias ? sum + bias[m] : sum;
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
