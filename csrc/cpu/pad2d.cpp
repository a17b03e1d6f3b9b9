// pad2d on the CPU: a row at a time, border and copy.
#include "ops/pad2d.h"

#include <cstring>

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void pad2d(const float* input, float* output, const Pad2dShape& shape, int threads) {
  const Pad2dShape p = shape;
  const int out_h = p.out_h();
  const int out_w = p.out_w();
  const std::int64_t rows = std::int64_t{p.n} * p.c * out_h;
  parallel_for(rows, out_w, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      const int y = static_cast<int>(index % out_h) - p.pad_top;
      const std::int64_t map = index / out_h;
      float* row = output + index * out_w;
      if (y < 0 || y >= p.h) {
        std::memset(row, 0, sizeof(float) * out_w);
        continue;
      }
      std::memset(row, 0, sizeof(float) * p.pad_left);
      std::memcpy(row + p.pad_left, input + (map * p.h + y) * p.w, sizeof(float) * p.w);
      std::memset(row + p.pad_left + p.w, 0, sizeof(float) * p.pad_right);
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
