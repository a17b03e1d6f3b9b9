// binary on the CPU: runs along the last dimension, in which each operand has one stride.
#include "ops/binary.h"

#include <math.h>

#include "cpu/strided.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

#define CNN_ENGINE_FUNCTION(name, work, expression)                                                \
  struct binary_##name {                                                                           \
    static constexpr int kCost = work;                                                             \
    static inline __attribute__((always_inline)) float of(float x, float y) { return expression; } \
  };

CNN_ENGINE_FUNCTION(add, 1, x + y)
CNN_ENGINE_FUNCTION(sub, 1, x - y)
CNN_ENGINE_FUNCTION(mul, 1, (x * y))
CNN_ENGINE_FUNCTION(div, 2, x / y)
CNN_ENGINE_FUNCTION(pow, 20, ::powf(x, y))
// Of two numbers with a NaN among them no comparison is true.
CNN_ENGINE_FUNCTION(max, 1, x > y || x != x ? x : y)
CNN_ENGINE_FUNCTION(min, 1, x < y || x != x ? x : y)
CNN_ENGINE_FUNCTION(fmod, 20, ::fmodf(x, y))
CNN_ENGINE_FUNCTION(prelu, 1, x < 0.0f ? x * y : x)

struct binary_mod {
  static constexpr int kCost = 20;
  static inline __attribute__((always_inline)) float of(float x, float y) {
    const float rest = ::fmodf(x, y);
    if (rest == 0.0f) return ::copysignf(0.0f, y);
    return (rest < 0.0f) != (y < 0.0f) ? rest + y : rest;
  }
};

// The powers that networks raise to, without a call: the same numbers, most of them rounded once.
struct Square {
  static constexpr int kCost = 1;
  static inline __attribute__((always_inline)) float of(float x, float) { return x * x; }
};
struct Cube {
  static constexpr int kCost = 1;
  static inline __attribute__((always_inline)) float of(float x, float) {
    const double wide = x;
    return static_cast<float>(wide * wide * wide);
  }
};
struct Root {
  static constexpr int kCost = 2;
  static inline __attribute__((always_inline)) float of(float x, float) {
    // pow(-inf, 1/2) is inf and pow(-0, 1/2) is 0, which a square root's are not.
    return x == -__builtin_inff() ? __builtin_inff() : ::sqrtf(x) + 0.0f;
  }
};
#undef CNN_ENGINE_FUNCTION

// In every loop an element is read before it is written, should out be x or y.
template <typename Function>
void run(const float* x, const float* y, float* out, const Strided<3>& walk, int threads) {
  const int last = walk.rank - 1;
  const std::int64_t x_step = walk.rank ? walk.strides[1][last] : 0;
  const std::int64_t y_step = walk.rank ? walk.strides[2][last] : 0;
  for_each_run(walk, Function::kCost, threads, [=](const std::int64_t* at, std::int64_t count) {
    float* o = out + at[0];
    const float* a = x + at[1];
    const float* b = y + at[2];
    if (x_step == 1 && y_step == 1) {
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i) o[i] = Function::of(a[i], b[i]);
    } else if (x_step == 1 && y_step == 0) {
      const float value = *b;
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i) o[i] = Function::of(a[i], value);
    } else if (x_step == 0 && y_step == 1) {
      const float value = *a;
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i) o[i] = Function::of(value, b[i]);
    } else {
#pragma omp simd
      for (std::int64_t i = 0; i < count; ++i) {
        o[i] = Function::of(a[i * x_step], b[i * y_step]);
      }
    }
  });
}

}  // namespace

void binary(const float* x, const float* y, float* out, const BinaryShape& shape,
            BinaryFunction function, int threads) {
  std::int64_t strides[3][kMaxDims];
  row_major(shape.dims, strides[0]);
  bool one_exponent = true;
  for (int d = 0; d < kMaxDims; ++d) {
    strides[1][d] = shape.x_strides[d];
    strides[2][d] = shape.y_strides[d];
    one_exponent = one_exponent && (shape.dims[d] == 1 || shape.y_strides[d] == 0);
  }
  const Strided<3> walk = collapse<3>(shape.dims, strides);
  if (walk.size == 0) return;
  if (function == BinaryFunction::pow && one_exponent) {
    if (*y == 2.0f) return run<Square>(x, y, out, walk, threads);
    if (*y == 3.0f) return run<Cube>(x, y, out, walk, threads);
    if (*y == 0.5f) return run<Root>(x, y, out, walk, threads);
  }
  switch (function) {
#define CNN_ENGINE_RUN(name) \
  case BinaryFunction::name: \
    return run<binary_##name>(x, y, out, walk, threads);
    CNN_ENGINE_BINARY_FUNCTIONS(CNN_ENGINE_RUN)
#undef CNN_ENGINE_RUN
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
