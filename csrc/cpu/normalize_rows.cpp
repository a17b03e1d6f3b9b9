// normalize_rows on the CPU: a row per thread, its sums of doubles on SIMD lanes.
#include "ops/normalize_rows.h"

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

void normalize_row(const float* x, const float* scale, const float* shift, float* y, float* mean,
                   float* inverse, const NormalizeRowsShape& p) {
  const std::int64_t count = p.row();
  const double first = p.centered ? x[0] : 0.0;
  double sum = 0.0;
  double squares = 0.0;
#pragma omp simd reduction(+ : sum, squares)
  for (std::int64_t i = 0; i < count; ++i) {
    const double difference = x[i] - first;
    sum += difference;
    squares += difference * difference;
  }
  const double n = static_cast<double>(count);
  const double offset = p.centered ? sum / n : 0.0;
  const double variance = (squares - sum * offset) / n;
  const double center = first + offset;
  // Rounding can leave a variance of 0 below it.
  const double factor = 1.0 / __builtin_sqrt((variance < 0.0 ? 0.0 : variance) + p.epsilon);
  if (mean != nullptr) *mean = static_cast<float>(center);
  if (inverse != nullptr) *inverse = static_cast<float>(factor);
  if (p.span == 1) {
    if (scale != nullptr && shift != nullptr) {
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i) {
        y[i] = static_cast<float>((x[i] - center) * factor * scale[i] + shift[i]);
      }
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        const double value = (x[i] - center) * factor * (scale != nullptr ? scale[i] : 1.0f);
        y[i] = static_cast<float>(value + (shift != nullptr ? shift[i] : 0.0f));
      }
    }
    return;
  }
  for (std::int64_t c = 0; c < p.channels; ++c, x += p.span, y += p.span) {
    const double slope = factor * (scale != nullptr ? scale[c] : 1.0f);
    const double above = shift != nullptr ? shift[c] : 0.0f;
#pragma omp simd
    for (std::int64_t i = 0; i < p.span; ++i) {
      y[i] = static_cast<float>((x[i] - center) * slope + above);
    }
  }
}

}  // namespace

void normalize_rows(const float* x, const float* scale, const float* shift, float* y, float* mean,
                    float* inverse, const NormalizeRowsShape& shape, int threads) {
  const NormalizeRowsShape p = shape;
  const std::int64_t row = p.row();
  if (row == 0) return;
  parallel_for(p.rows, row * 4, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t channel = r % p.groups * p.channels;
      normalize_row(x + r * row, scale != nullptr ? scale + channel : nullptr,
                    shift != nullptr ? shift + channel : nullptr, y + r * row,
                    mean != nullptr ? mean + r : nullptr,
                    inverse != nullptr ? inverse + r : nullptr, p);
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
