// cumulative on the CPU: four lines at a time where the axis is the last dimension, as the
// additions of a single one wait for each other; else columns side by side.
#include "ops/cumulative.h"

#include "cpu/blocked.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// What a line starts with, so that its first element stays as it is (0 + -0 is 0), and what stands
// first where an element itself is left out.
struct RunningSum {
  static constexpr double kStart = -0.0;
  static constexpr float kEmpty = 0.0f;
  CNN_ENGINE_INLINE static double take(double sum, double x) { return sum + x; }
};
struct RunningProduct {
  static constexpr double kStart = 1.0;
  static constexpr float kEmpty = 1.0f;
  CNN_ENGINE_INLINE static double take(double product, double x) { return product * x; }
};

// `count` lines of `axis` elements, one behind the other. x is read before y is written: they may
// be the same.
template <typename Kind, bool exclusive, int count>
void running_lines(const float* x, float* y, std::int64_t axis, bool reverse) {
  const std::int64_t step = reverse ? -1 : 1, first = reverse ? axis - 1 : 0;
  double value[count];
#pragma GCC unroll 4
  for (int line = 0; line < count; ++line) value[line] = Kind::kStart;
  for (std::int64_t a = 0, i = first; a < axis; ++a, i += step) {
#pragma GCC unroll 4
    for (int line = 0; line < count; ++line) {
      const double before = value[line];
      value[line] = Kind::take(before, x[line * axis + i]);
      y[line * axis + i] = static_cast<float>(exclusive ? before : value[line]);
    }
  }
  if (!exclusive || axis == 0) return;
  for (int line = 0; line < count; ++line) y[line * axis + first] = Kind::kEmpty;
}

constexpr std::int64_t kRunningColumns = 256;

template <typename Kind, bool exclusive>
void running_columns(const float* x, float* y, const AxisShape& p, std::int64_t count,
                     bool reverse) {
  const std::int64_t step = reverse ? -p.inner : p.inner;
  const std::int64_t first = reverse ? (p.axis - 1) * p.inner : 0;
  double value[kRunningColumns];
  for (std::int64_t i = 0; i < count; ++i) value[i] = Kind::kStart;
  for (std::int64_t a = 0, at = first; a < p.axis; ++a, at += step) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      const double before = value[i];
      value[i] = Kind::take(before, x[at + i]);
      y[at + i] = static_cast<float>(exclusive ? before : value[i]);
    }
  }
  if (!exclusive || p.axis == 0) return;
  for (std::int64_t i = 0; i < count; ++i) y[first + i] = Kind::kEmpty;
}

template <typename Kind, bool exclusive>
void running(const float* x, float* y, const AxisShape& p, bool reverse, int threads) {
  if (p.inner == 1) {
    parallel_for((p.outer + 3) / 4, 4 * p.axis, threads, [=](std::int64_t begin, std::int64_t end) {
      std::int64_t line = 4 * begin;
      const std::int64_t last = 4 * end < p.outer ? 4 * end : p.outer;
      for (; line + 4 <= last; line += 4) {
        running_lines<Kind, exclusive, 4>(x + line * p.axis, y + line * p.axis, p.axis, reverse);
      }
      for (; line < last; ++line) {
        running_lines<Kind, exclusive, 1>(x + line * p.axis, y + line * p.axis, p.axis, reverse);
      }
    });
    return;
  }
  const std::int64_t groups = (p.inner + kRunningColumns - 1) / kRunningColumns;
  parallel_for(p.outer * groups, p.axis * kRunningColumns, threads,
               [=](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t column = i % groups * kRunningColumns;
                   const std::int64_t left = p.inner - column;
                   const std::int64_t at = i / groups * p.axis * p.inner + column;
                   running_columns<Kind, exclusive>(
                       x + at, y + at, p, left < kRunningColumns ? left : kRunningColumns, reverse);
                 }
               });
}

}  // namespace

void cumulative(const float* x, float* y, const AxisShape& shape, bool product, bool exclusive,
                bool reverse, int threads) {
  const AxisShape p = shape;
  if (product) {
    return exclusive ? running<RunningProduct, true>(x, y, p, reverse, threads)
                     : running<RunningProduct, false>(x, y, p, reverse, threads);
  }
  return exclusive ? running<RunningSum, true>(x, y, p, reverse, threads)
                   : running<RunningSum, false>(x, y, p, reverse, threads);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
