// unary on the CPU: one loop a function, which the compiler vectorises where the function has no
// call in it.
#include "ops/unary.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "cpu/blocks.h"
#include "cpu/math32.h"
#include "cpu/sigmoid.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Comparisons are written so that a NaN, for which all are false, passes through.

// a, b: alpha and beta; `cost` is a call's work beside that of a copy.
#define CNN_ENGINE_FUNCTION(name, work, expression)                                           \
  struct unary_##name {                                                                       \
    static constexpr int kCost = work;                                                        \
    static inline __attribute__((always_inline)) float of(float x, [[maybe_unused]] double a, \
                                                          [[maybe_unused]] double b) {        \
      return static_cast<float>(expression);                                                  \
    }                                                                                         \
  };

CNN_ENGINE_FUNCTION(affine, 1, (a * x + b))
CNN_ENGINE_FUNCTION(relu, 1, x < 0.0f ? 0.0f : x)
CNN_ENGINE_FUNCTION(leaky_relu, 1, x < 0.0f ? a * x : x)
CNN_ENGINE_FUNCTION(thresholded_relu, 1, x > a ? x : 0.0f)
CNN_ENGINE_FUNCTION(elu, 10, x < 0.0f ? a * math::expm1(x) : x)
CNN_ENGINE_FUNCTION(selu, 10, (b * (x < 0.0f ? a * math::expm1(x) : x)))
CNN_ENGINE_FUNCTION(sigmoid, 4, math::sigmoid32(x))
CNN_ENGINE_FUNCTION(hard_sigmoid, 1, math::clamp32(float(a) * x + float(b), 0.0f, 1.0f))
CNN_ENGINE_FUNCTION(hard_swish, 1,
                    (x *
                     math::clamp32(math::sixth32(math::clamp32(x + 3.0f, 0.0f, 8.0f)), 0.0f, 1.0f)))
CNN_ENGINE_FUNCTION(swish, 4, (x * math::sigmoid32(float(a) * x)))
CNN_ENGINE_FUNCTION(gelu, 4, math::gelu32(x))
CNN_ENGINE_FUNCTION(clip, 1, math::clamp32(x, float(a), float(b)))
CNN_ENGINE_FUNCTION(shrink, 1, (x < -a ? x + b : (x > a ? x - b : 0.0)))
CNN_ENGINE_FUNCTION(tanh, 4, math::tanh32(x))
CNN_ENGINE_FUNCTION(scaled_tanh, 4, float(a) * math::tanh32(float(b) * x))
CNN_ENGINE_FUNCTION(erf, 6, math::erf32(x))
CNN_ENGINE_FUNCTION(softplus, 20, math::softplus(x))
CNN_ENGINE_FUNCTION(softsign, 2, x / (1.0f + ::fabsf(x)))
CNN_ENGINE_FUNCTION(sqrt, 2, ::sqrtf(x))
CNN_ENGINE_FUNCTION(exp, 3, math::exp32(x))
CNN_ENGINE_FUNCTION(log, 10, math::log(x))
CNN_ENGINE_FUNCTION(abs, 1, ::fabsf(x))
CNN_ENGINE_FUNCTION(neg, 1, -x)
CNN_ENGINE_FUNCTION(reciprocal, 2, 1.0f / x)
CNN_ENGINE_FUNCTION(floor, 1, ::floorf(x))
CNN_ENGINE_FUNCTION(ceil, 1, ::ceilf(x))
CNN_ENGINE_FUNCTION(round, 1, ::rintf(x))
CNN_ENGINE_FUNCTION(sign, 1, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x)
CNN_ENGINE_FUNCTION(atan, 10, math::atan32(x))
// Rare in networks: the library's double functions, a call a number.
CNN_ENGINE_FUNCTION(asin, 40, ::asin(static_cast<double>(x)))
CNN_ENGINE_FUNCTION(acos, 40, ::acos(static_cast<double>(x)))
CNN_ENGINE_FUNCTION(sinh, 40, ::sinh(static_cast<double>(x)))
CNN_ENGINE_FUNCTION(cosh, 40, ::cosh(static_cast<double>(x)))
CNN_ENGINE_FUNCTION(asinh, 60, ::asinh(static_cast<double>(x)))
CNN_ENGINE_FUNCTION(acosh, 60, ::acosh(static_cast<double>(x)))
CNN_ENGINE_FUNCTION(atanh, 60, ::atanh(static_cast<double>(x)))
#undef CNN_ENGINE_FUNCTION

// Functions that are vectorised for angles up to math::kMostAngle; `far` is for the others.
#define CNN_ENGINE_ANGLE(name, work)                                                             \
  struct unary_##name {                                                                          \
    static constexpr int kCost = work;                                                           \
    static inline __attribute__((always_inline)) float of(float x) { return math::name##32(x); } \
    static float far(float x) { return static_cast<float>(::name(static_cast<double>(x))); }     \
  };
CNN_ENGINE_ANGLE(sin, 10)
CNN_ENGINE_ANGLE(cos, 10)
CNN_ENGINE_ANGLE(tan, 15)
#undef CNN_ENGINE_ANGLE

struct unary_celu {
  static constexpr int kCost = 10;
  static inline __attribute__((always_inline)) float of(float x, double a, double) {
    const double below = a * math::expm1(x / a);
    return static_cast<float>((x < 0.0f ? 0.0 : x) + (below > 0.0 ? 0.0 : below));
  }
};

struct unary_mish {
  static constexpr int kCost = 10;
  static inline __attribute__((always_inline)) float of(float x, double, double) {
    // tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2); past 40 the ratio is 1.
    const double e = math::exp(x > 40.0f ? 40.0f : x);
    const double n = e * (e + 2.0);
    return static_cast<float>(x * (n / (n + 2.0)));
  }
};

struct unary_gelu_tanh {
  static constexpr int kCost = 10;
  static inline __attribute__((always_inline)) float of(float x, double, double) {
    // (1 + tanh(u)) / 2 = sigmoid(2 u), which keeps its digits where tanh(u) is near -1.
    const double wide = x;
    const double u = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide);
    return static_cast<float>(wide * math::sigmoid(2.0 * u));
  }
};

template <typename Function>
void unary_loop(const float* x, float* y, std::int64_t count, float alpha, float beta) {
  const double a = alpha, b = beta;
#pragma omp simd  // each element is read before it is written, should both be the same array
  for (std::int64_t i = 0; i < count; ++i) y[i] = Function::of(x[i], a, b);
}

template <typename Function>
void angles_block(const float* x, float* y, std::int64_t count, float, float) {
  constexpr std::int64_t kBlock = 256;
  float some[kBlock];  // y may be the same array
  for (std::int64_t at = 0; at < count; at += kBlock) {
    const int size = static_cast<int>(std::min(kBlock, count - at));
    ::memcpy(some, x + at, size * sizeof(float));
    float* to = y + at;
    int far = 0;
#pragma omp simd reduction(| : far)
    for (int i = 0; i < size; ++i) {
      to[i] = Function::of(some[i]);
      far |= ::fabsf(some[i]) > math::kMostAngle;
    }
    if (!far) continue;
    for (int i = 0; i < size; ++i) {
      if (::fabsf(some[i]) > math::kMostAngle) to[i] = Function::far(some[i]);
    }
  }
}

template <>
void unary_loop<unary_sin>(const float* x, float* y, std::int64_t count, float a, float b) {
  angles_block<unary_sin>(x, y, count, a, b);
}
template <>
void unary_loop<unary_cos>(const float* x, float* y, std::int64_t count, float a, float b) {
  angles_block<unary_cos>(x, y, count, a, b);
}
template <>
void unary_loop<unary_tan>(const float* x, float* y, std::int64_t count, float a, float b) {
  angles_block<unary_tan>(x, y, count, a, b);
}

#if defined(__AVX512F__)
template <UnaryFunction function>
void sixteens_block(const float* x, float* y, std::int64_t count, float alpha, float) {
  sixteens_of(function)(x, y, count, alpha);
}
#endif

}  // namespace

UnaryBlock unary_block(UnaryFunction function) {
#if defined(__AVX512F__)
  constexpr int cost = unary_swish::kCost / 2;
  switch (function) {
    case UnaryFunction::swish:
      return {sixteens_block<UnaryFunction::swish>, cost};
    case UnaryFunction::sigmoid:
      return {sixteens_block<UnaryFunction::sigmoid>, cost};
    case UnaryFunction::gelu:
      return {sixteens_block<UnaryFunction::gelu>, cost};
    default:
      break;
  }
#endif
  switch (function) {
#define CNN_ENGINE_BLOCK(name) \
  case UnaryFunction::name:    \
    return {unary_loop<unary_##name>, unary_##name::kCost};
    CNN_ENGINE_UNARY_FUNCTIONS(CNN_ENGINE_BLOCK)
#undef CNN_ENGINE_BLOCK
  }
  return {};
}

void unary(const float* input, float* output, std::int64_t size, UnaryFunction function,
           float alpha, float beta, int threads) {
  const UnaryBlock block = unary_block(function);
  parallel_for(size, block.cost, threads, [=](std::int64_t begin, std::int64_t end) {
    block.run(input + begin, output + begin, end - begin, alpha, beta);
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
