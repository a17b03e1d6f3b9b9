// Pools over rows of an image: a whole output row takes in the window's positions one after the
// other, so that the columns are SIMD lanes. Included only by files that are compiled once for each
// instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/window.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// y[j] = take(y[j], row[j * step + offset]) for every j whose position is inside the row.
template <typename Take>
CNN_ENGINE_INLINE void take_row(const float* row, float* y, int width, int out_width, int step,
                                std::int64_t offset, const Take& take) {
  if (offset >= width) return;
  const std::int64_t first = offset >= 0 ? 0 : (step - 1 - offset) / step;
  const std::int64_t end = std::min<std::int64_t>(out_width, (width - 1 - offset) / step + 1);
  if (first >= end) return;
  const float* from = row + first * step + offset;
  y += first;
  const std::int64_t count = end - first;
  if (step == 1) {
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) y[j] = take(y[j], from[j]);
  } else if (step == 2) {
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) y[j] = take(y[j], from[2 * j]);
  } else {
    for (std::int64_t j = 0; j < count; ++j) y[j] = take(y[j], from[j * step]);
  }
}

// `finish(y, top)` ends an output row whose windows begin at row `top`. The window's positions are
// in the order row, column.
template <typename Shape, typename Take, typename Finish>
void pool_rows(const float* input, float* output, const Shape& shape, float start, int threads,
               const Take& take, const Finish& finish) {
  const Shape p = shape;
  const int out_h = p.out_h(), out_w = p.out_w();
  const std::int64_t rows = std::int64_t{p.n} * p.c * out_h;
  const std::int64_t cost = std::int64_t{out_w} * p.r * p.s / 4;
  parallel_for(rows, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      const float* map = input + index / out_h * p.h * p.w;
      float* y = output + index * out_w;
      const int top = static_cast<int>(index % out_h) * p.stride_h - p.pad_top;
      const int past = end_inside(top, p.r, p.dilation_h, p.h);
      std::fill_n(y, out_w, start);
      for (int i = first_inside(top, p.dilation_h); i < past; i += p.dilation_h) {
        const float* row = map + std::int64_t{i} * p.w;
        for (int s = 0; s < p.s; ++s) {
          take_row(row, y, p.w, out_w, p.stride_w, std::int64_t{s} * p.dilation_w - p.pad_left,
                   take);
        }
      }
      finish(y, top);
    }
  });
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
