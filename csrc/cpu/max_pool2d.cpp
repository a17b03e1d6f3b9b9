// max_pool2d on the CPU: of each output row first the greatest of the window's rows, then of its
// columns.
#include "ops/max_pool2d.h"

#include <limits>
#include <vector>

#include "cpu/pool_rows.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void max_pool2d(const float* input, float* output, const MaxPool2dShape& shape, int threads) {
  const MaxPool2dShape p = shape;
  const int out_h = p.out_h(), out_w = p.out_w();
  const auto take = [](float best, float x) {
    return (x > best) | (x != x) ? x : best;  // a NaN wins and, as best, stays
  };
  const std::int64_t rows = std::int64_t{p.n} * p.c * out_h;
  const std::int64_t cost = (std::int64_t{p.w} * p.r + std::int64_t{out_w} * p.s) / 4;
  parallel_for(rows, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    std::vector<float> columns(p.w);
    for (std::int64_t index = begin; index < end; ++index) {
      const float* map = input + index / out_h * p.h * p.w;
      float* y = output + index * out_w;
      const int top = static_cast<int>(index % out_h) * p.stride_h - p.pad_top;
      const int past = end_inside(top, p.r, p.dilation_h, p.h);
      std::fill(columns.begin(), columns.end(), kLowest);
      for (int i = first_inside(top, p.dilation_h); i < past; i += p.dilation_h) {
        take_row(map + std::int64_t{i} * p.w, columns.data(), p.w, p.w, 1, 0, take);
      }
      std::fill_n(y, out_w, kLowest);
      for (int s = 0; s < p.s; ++s) {
        take_row(columns.data(), y, p.w, out_w, p.stride_w,
                 std::int64_t{s} * p.dilation_w - p.pad_left, take);
      }
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
