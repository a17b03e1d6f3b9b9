// max_pool2d on the CPU: one output element at a time.
#include "ops/max_pool2d.h"

#include <limits>

#include "ops/window.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void max_pool2d(const float* input, float* output, const MaxPool2dShape& shape, int threads) {
  const MaxPool2dShape p = shape;
  const int out_h = p.out_h();
  const int out_w = p.out_w();
  const std::int64_t rows = std::int64_t{p.n} * p.c * out_h;
  const std::int64_t cost = std::int64_t{out_w} * p.r * p.s;
  parallel_for(rows, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      const float* map = input + index / out_h * p.h * p.w;
      const int top = static_cast<int>(index % out_h) * p.stride_h - p.pad_top;
      const int y_begin = first_inside(top, p.dilation_h);
      const int y_end = end_inside(top, p.r, p.dilation_h, p.h);
      for (int j = 0; j < out_w; ++j) {
        const int left = j * p.stride_w - p.pad_left;
        const int x_begin = first_inside(left, p.dilation_w);
        const int x_end = end_inside(left, p.s, p.dilation_w, p.w);
        float best = -std::numeric_limits<float>::infinity();
        for (int y = y_begin; y < y_end; y += p.dilation_h) {
          for (int x = x_begin; x < x_end; x += p.dilation_w) {
            const float value = map[y * p.w + x];
            if (value > best || value != value) best = value;  // a NaN wins and, as best, stays
          }
        }
        output[index * out_w + j] = best;
      }
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
