// binary on the CPU: runs along the last dimension, in which each operand has one stride.
#include "ops/binary.h"

#include <math.h>

#include <type_traits>

#include "cpu/binary_walk.h"
#include "cpu/blocks.h"

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
void binary_loop(const float* x, std::int64_t x_step, const float* y, std::int64_t y_step,
                 float* out, std::int64_t count) {
  if (x_step == 1 && y_step == 1) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) out[i] = Function::of(x[i], y[i]);
  } else if (x_step == 1 && y_step == 0) {
    const float value = *y;
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) out[i] = Function::of(x[i], value);
  } else if (x_step == 0 && y_step == 1) {
    const float value = *x;
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) out[i] = Function::of(value, y[i]);
  } else {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] = Function::of(x[i * x_step], y[i * y_step]);
    }
  }
}

void pow_block(const float* x, std::int64_t x_step, const float* y, std::int64_t y_step, float* out,
               std::int64_t count) {
  const float exponent = y_step == 0 && count > 0 ? *y : 1.0f;
  const auto block = exponent == 2.0f   ? binary_loop<Square>
                     : exponent == 3.0f ? binary_loop<Cube>
                     : exponent == 0.5f ? binary_loop<Root>
                                        : binary_loop<binary_pow>;
  block(x, x_step, y, y_step, out, count);
}
template <typename Function>
constexpr bool is_binary_pow = std::is_same_v<Function, binary_pow>;

}  // namespace

BinaryBlock binary_block(BinaryFunction function) {
  switch (function) {
#define CNN_ENGINE_BLOCK(name)                                                     \
  case BinaryFunction::name:                                                       \
    return {is_binary_pow<binary_##name> ? pow_block : binary_loop<binary_##name>, \
            binary_##name::kCost};
    CNN_ENGINE_BINARY_FUNCTIONS(CNN_ENGINE_BLOCK)
#undef CNN_ENGINE_BLOCK
  }
  return {};
}

void binary(const float* x, const float* y, float* out, const BinaryShape& shape,
            BinaryFunction function, int threads) {
  const Strided<3> walk = walk_of(shape);
  if (walk.size == 0) return;
  const int last = walk.rank - 1;
  const std::int64_t out_step = walk.rank ? walk.strides[0][last] : 1;
  const std::int64_t x_step = walk.rank ? walk.strides[1][last] : 0;
  const std::int64_t y_step = walk.rank ? walk.strides[2][last] : 0;
  const BinaryBlock block = binary_block(function);
  for_each_run(walk, block.cost, threads, [=](const std::int64_t* at, std::int64_t count) {
    const float *a = x + at[1], *b = y + at[2];
    float* const o = out + at[0];
    if (out_step == 1) return block.run(a, x_step, b, y_step, o, count);
    // One column among others.
    for (std::int64_t i = 0; i < count; ++i) {
      block.run(a + i * x_step, 0, b + i * y_step, 0, o + i * out_step, 1);
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
