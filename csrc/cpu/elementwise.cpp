// relu, tanh and normalize on the CPU: one loop each, which the compiler vectorises.
#include "ops/elementwise.h"

#include "cpu/math32.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void relu(const float* input, float* output, const ElementwiseShape& shape, int threads) {
  parallel_for(shape.size, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    // Written so that a NaN, for which every comparison is false, passes through.
    for (std::int64_t i = begin; i < end; ++i) output[i] = input[i] < 0.0f ? 0.0f : input[i];
  });
}

void tanh(const float* input, float* output, const ElementwiseShape& shape, int threads) {
  parallel_for(shape.size, 4, threads, [&](std::int64_t begin, std::int64_t end) {
#pragma omp simd  // each element is read before it is written, should both be the same array
    for (std::int64_t i = begin; i < end; ++i) output[i] = math::tanh32(input[i]);
  });
}

void normalize(const std::uint8_t* input, float* output, const ElementwiseShape& shape, float scale,
               float offset, int threads) {
  parallel_for(shape.size, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) output[i] = input[i] * scale + offset;
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
