// softmax on the CPU: a row at a time, its maximum and its sum in order or on SIMD lanes. The sum
// is a double: a float of many classes is large beside each.
#include "ops/softmax.h"

#include <math.h>

#include <limits>

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// A NaN is never larger, so it does not become the maximum; exp() then carries it into the sum.
template <bool reduction>
void softmax_row(const float* x, float* y, int classes) {
  float largest = -std::numeric_limits<float>::infinity();
  double sum = 0.0;
  if (reduction) {
#pragma omp simd reduction(max : largest)
    for (int m = 0; m < classes; ++m) largest = x[m] > largest ? x[m] : largest;
  } else {
    for (int m = 0; m < classes; ++m) largest = x[m] > largest ? x[m] : largest;
  }
  for (int m = 0; m < classes; ++m) y[m] = ::expf(x[m] - largest);
  if (reduction) {
#pragma omp simd reduction(+ : sum)
    for (int m = 0; m < classes; ++m) sum += y[m];
  } else {
    for (int m = 0; m < classes; ++m) sum += y[m];
  }
  const float whole = static_cast<float>(sum);
  for (int m = 0; m < classes; ++m) y[m] /= whole;
}

}  // namespace

void softmax(const float* input, float* output, const SoftmaxShape& shape, bool reduction,
             int threads) {
  const int classes = shape.classes;
  parallel_for(shape.n, std::int64_t{classes} * 20, threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t n = begin; n < end; ++n) {
                   const float* x = input + n * classes;
                   float* y = output + n * classes;
                   reduction ? softmax_row<true>(x, y, classes) : softmax_row<false>(x, y, classes);
                 }
               });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
