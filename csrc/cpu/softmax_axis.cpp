// softmax_axis on the CPU: a line at a time where the axis is the last dimension, else columns side
// by side. Sums are doubles; so are a logarithm's differences and exponentials, whose results are
// not between 0 and 1.
#include "ops/softmax_axis.h"

#include "cpu/math.h"
#include "cpu/sigmoid.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// y = exp(x - largest), of numbers that are not larger.
void exponentials(const float* x, float* y, std::int64_t count, float largest) {
#if defined(__AVX512F__)
  const __m512 top = _mm512_set1_ps(largest);
  by_sixteens(x, y, count, [=](__m512 some) __attribute__((always_inline)) {
    return exp_of_minus16(_mm512_sub_ps(top, some));
  });
#else
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = math::exp_of_negative(x[i] - largest);
#endif
}

// A NaN is never larger, so it does not become the largest; exp() then carries it into the sum.
void softmax_line(const float* x, float* y, std::int64_t count, bool logarithm) {
  float largest = -__builtin_inff();
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  double sum = 0.0;
  if (logarithm) {
    const double top = largest;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < count; ++i) sum += math::exp(x[i] - top);
    const double shift = math::log(sum);
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) y[i] = static_cast<float>(x[i] - top - shift);
  } else {
    exponentials(x, y, count, largest);
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < count; ++i) sum += y[i];
    const float scale = static_cast<float>(1.0 / sum);
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) y[i] *= scale;
  }
}

constexpr std::int64_t kColumnsAtOnce = 256;

void softmax_columns(const float* x, float* y, std::int64_t axis, std::int64_t inner,
                     std::int64_t columns, bool logarithm) {
  float largest[kColumnsAtOnce];
  double sum[kColumnsAtOnce];
  for (std::int64_t i = 0; i < columns; ++i) {
    largest[i] = -__builtin_inff();
    sum[i] = 0.0;
  }
  for (std::int64_t a = 0; a < axis; ++a) {
    const float* row = x + a * inner;
#pragma omp simd
    for (std::int64_t i = 0; i < columns; ++i) {
      largest[i] = row[i] > largest[i] ? row[i] : largest[i];
    }
  }
  for (std::int64_t a = 0; a < axis; ++a) {
    const float* row = x + a * inner;
    float* to = y + a * inner;
    if (logarithm) {
#pragma omp simd
      for (std::int64_t i = 0; i < columns; ++i) {
        sum[i] += math::exp(row[i] - double{largest[i]});
      }
    } else {
#pragma omp simd
      for (std::int64_t i = 0; i < columns; ++i) {
        const float e = math::exp_of_negative(row[i] - largest[i]);
        sum[i] += e;
        to[i] = e;
      }
    }
  }
  for (std::int64_t i = 0; i < columns; ++i) sum[i] = logarithm ? math::log(sum[i]) : 1.0 / sum[i];
  for (std::int64_t a = 0; a < axis; ++a) {
    const float* row = x + a * inner;
    float* to = y + a * inner;
    if (logarithm) {
#pragma omp simd
      for (std::int64_t i = 0; i < columns; ++i) {
        to[i] = static_cast<float>(row[i] - double{largest[i]} - sum[i]);
      }
    } else {
#pragma omp simd
      for (std::int64_t i = 0; i < columns; ++i) to[i] *= static_cast<float>(sum[i]);
    }
  }
}

}  // namespace

void softmax_axis(const float* x, float* y, const AxisShape& shape, bool logarithm, int threads) {
  const AxisShape p = shape;
  if (p.inner == 1) {
    parallel_for(p.outer, p.axis * 20, threads, [=](std::int64_t begin, std::int64_t end) {
      for (std::int64_t o = begin; o < end; ++o) {
        softmax_line(x + o * p.axis, y + o * p.axis, p.axis, logarithm);
      }
    });
    return;
  }
  const std::int64_t groups = (p.inner + kColumnsAtOnce - 1) / kColumnsAtOnce;
  parallel_for(p.outer * groups, p.axis * kColumnsAtOnce * 20, threads,
               [=](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t column = i % groups * kColumnsAtOnce;
                   const std::int64_t left = p.inner - column;
                   const std::int64_t at = i / groups * p.axis * p.inner + column;
                   softmax_columns(x + at, y + at, p.axis, p.inner,
                                   left < kColumnsAtOnce ? left : kColumnsAtOnce, logarithm);
                 }
               });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
