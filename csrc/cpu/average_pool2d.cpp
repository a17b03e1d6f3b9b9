// average_pool2d and lp_pool2d on the CPU: rows at a time.
#include "ops/average_pool2d.h"

#include <math.h>

#include <vector>

#include "cpu/pool_rows.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void average_pool2d(const float* input, float* output, const AveragePool2dShape& shape,
                    bool count_include_pad, int threads) {
  const AveragePool2dShape p = shape;
  const int out_w = p.out_w();
  const auto positions = [&](int from, int count, int dilation, int size, int before, int after) {
    if (!count_include_pad) before = after = 0;
    return static_cast<float>(p.count(from, count, dilation, size, before, after));
  };
  std::vector<float> across(out_w);  // of each column's window
  for (int j = 0; j < out_w; ++j) {
    across[j] =
        positions(j * p.stride_w - p.pad_left, p.s, p.dilation_w, p.w, p.pad_left, p.pad_right);
  }
  pool_rows(
      input, output, p, 0.0f, threads, [](float sum, float x) { return sum + x; },
      [&](float* y, int top) {
        const float down = positions(top, p.r, p.dilation_h, p.h, p.pad_top, p.pad_bottom);
        const float* columns = across.data();
#pragma omp simd
        for (int j = 0; j < out_w; ++j) {
          const float count = down * columns[j];
          y[j] /= count > 0.0f ? count : 1.0f;
        }
      });
}

void lp_pool2d(const float* input, float* output, const AveragePool2dShape& shape, int p,
               int threads) {
  const int out_w = shape.out_w();
  const auto pool = [&](const auto& add, const auto& root) {
    pool_rows(input, output, shape, 0.0f, threads, add, [&](float* y, int) {
#pragma omp simd
      for (int j = 0; j < out_w; ++j) y[j] = root(y[j]);
    });
  };
  if (p == 1) {
    pool([](float sum, float x) { return sum + ::fabsf(x); }, [](float sum) { return sum; });
  } else if (p == 2) {
    pool([](float sum, float x) { return sum + x * x; }, [](float sum) { return ::sqrtf(sum); });
  } else {
    const float power = static_cast<float>(p);
    pool([=](float sum, float x) { return sum + ::powf(::fabsf(x), power); },
         [=](float sum) { return ::powf(sum, 1.0f / power); });
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
