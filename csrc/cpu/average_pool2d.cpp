// average_pool2d and lp_pool2d on the CPU: one output element at a time.
#include "ops/average_pool2d.h"

#include <math.h>

#include "ops/window.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// `add` puts an element to a sum, `finish` makes the output of a sum and its window's first place.
template <typename Add, typename Finish>
void for_each_window(const float* input, float* output, const AveragePool2dShape& shape,
                     int threads, const Add& add, const Finish& finish) {
  const AveragePool2dShape p = shape;
  const int out_h = p.out_h(), out_w = p.out_w();
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
        float sum = 0.0f;
        for (int y = y_begin; y < y_end; y += p.dilation_h) {
          for (int x = x_begin; x < x_end; x += p.dilation_w) sum = add(sum, map[y * p.w + x]);
        }
        output[index * out_w + j] = finish(sum, top, left);
      }
    }
  });
}

}  // namespace

void average_pool2d(const float* input, float* output, const AveragePool2dShape& shape,
                    bool count_include_pad, int threads) {
  for_each_window(
      input, output, shape, threads, [](float sum, float x) { return sum + x; },
      [&](float sum, int top, int left) {
        return sum / shape.divisor(top, left, count_include_pad);
      });
}

void lp_pool2d(const float* input, float* output, const AveragePool2dShape& shape, int p,
               int threads) {
  if (p == 1) {
    for_each_window(
        input, output, shape, threads, [](float sum, float x) { return sum + ::fabsf(x); },
        [](float sum, int, int) { return sum; });
  } else if (p == 2) {
    for_each_window(
        input, output, shape, threads, [](float sum, float x) { return sum + x * x; },
        [](float sum, int, int) { return ::sqrtf(sum); });
  } else {
    const float power = static_cast<float>(p);
    for_each_window(
        input, output, shape, threads,
        [=](float sum, float x) { return sum + ::powf(::fabsf(x), power); },
        [=](float sum, int, int) { return ::powf(sum, 1.0f / power); });
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
