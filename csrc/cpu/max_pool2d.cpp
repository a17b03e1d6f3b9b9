// max_pool2d on the CPU: rows at a time.
#include "ops/max_pool2d.h"

#include <limits>

#include "cpu/pool_rows.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void max_pool2d(const float* input, float* output, const MaxPool2dShape& shape, int threads) {
  pool_rows(
      input, output, shape, -std::numeric_limits<float>::infinity(), threads,
      [](float best, float x) {
        return (x > best) | (x != x) ? x : best;  // a NaN wins and, as best, stays
      },
      [](float*, int) {});
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
