// fill on the CPU.
#include "ops/fill.h"

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void fill(float* output, std::int64_t size, float value, int threads) {
  parallel_for(size, 1, threads, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) output[i] = value;
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
