// where on the CPU: runs along the last dimension, in which each operand has one stride.
#include "ops/where.h"

#include "cpu/strided.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void where(const std::uint8_t* condition, const float* x, const float* y, float* out,
           const WhereShape& shape, int threads) {
  std::int64_t strides[4][kMaxDims];
  row_major(shape.dims, strides[0]);
  for (int d = 0; d < kMaxDims; ++d) {
    strides[1][d] = shape.condition_strides[d];
    strides[2][d] = shape.x_strides[d];
    strides[3][d] = shape.y_strides[d];
  }
  const Strided<4> walk = collapse<4>(shape.dims, strides);
  if (walk.size == 0) return;
  const int last = walk.rank - 1;
  std::int64_t step[4] = {};
  for (int k = 0; k < 4 && walk.rank; ++k) step[k] = walk.strides[k][last];
  const bool dense = step[1] == 1 && step[2] == 1 && step[3] == 1;
  for_each_run(walk, 1, threads, [=](const std::int64_t* at, std::int64_t count) {
    float* o = out + at[0];
    const std::uint8_t* c = condition + at[1];
    const float* a = x + at[2];
    const float* b = y + at[3];
    if (dense) {
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i) o[i] = c[i] ? a[i] : b[i];
    } else if (step[1] == 0) {
      const float* from = *c ? a : b;
      const std::int64_t stride = *c ? step[2] : step[3];
      for (std::int64_t i = 0; i < count; ++i) o[i] = from[i * stride];
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        o[i] = c[i * step[1]] ? a[i * step[2]] : b[i * step[3]];
      }
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
