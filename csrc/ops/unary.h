// unary: y[i] = function(x[i]); alpha and beta are the function's two numbers.
//
// Layouts: any, C-contiguous, taken as [size]; float32; y may be x. NaN gives NaN (0 in
// thresholded_relu and shrink: no comparison holds), infinities what the formula gives; errors are
// a few units in the last place.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

// Every function: name(x). a is alpha, b is beta.
#define CNN_ENGINE_UNARY_FUNCTIONS(F)                                             \
  F(affine)           /* a * x + b */                                             \
  F(relu)             /* max(x, 0) */                                             \
  F(leaky_relu)       /* x, or a * x below 0 */                                   \
  F(thresholded_relu) /* x above a, else 0 */                                     \
  F(elu)              /* x, or a * (exp(x) - 1) below 0 */                        \
  F(selu)             /* b * x, or b * a * (exp(x) - 1) below 0 */                \
  F(celu)             /* max(x, 0) + min(0, a * (exp(x / a) - 1)) */              \
  F(sigmoid)          /* 1 / (1 + exp(-x)) */                                     \
  F(hard_sigmoid)     /* a * x + b, held between 0 and 1 */                       \
  F(hard_swish)       /* x * (x / 6 + 1/2, held between 0 and 1) */               \
  F(swish)            /* x / (1 + exp(-a * x)) */                                 \
  F(mish)             /* x * tanh(softplus(x)) */                                 \
  F(gelu)             /* x / 2 * (1 + erf(x / sqrt(2))) */                        \
  F(gelu_tanh)        /* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) */ \
  F(clip)             /* max(x, a), then min of that and b */                     \
  F(shrink)           /* x - b above a, x + b below -a, else 0 */                 \
  F(tanh)                                                                         \
  F(scaled_tanh) /* a * tanh(b * x) */                                            \
  F(erf)                                                                          \
  F(softplus) /* log(1 + exp(x)) */                                               \
  F(softsign) /* x / (1 + |x|) */                                                 \
  F(sqrt)                                                                         \
  F(exp)                                                                          \
  F(log)                                                                          \
  F(abs)                                                                          \
  F(neg)                                                                          \
  F(reciprocal)                                                                   \
  F(floor)                                                                        \
  F(ceil)                                                                         \
  F(round) /* halves to the even number */                                        \
  F(sign)                                                                         \
  F(sin)                                                                          \
  F(cos)                                                                          \
  F(tan)                                                                          \
  F(asin)                                                                         \
  F(acos)                                                                         \
  F(atan)                                                                         \
  F(sinh)                                                                         \
  F(cosh)                                                                         \
  F(asinh)                                                                        \
  F(acosh)                                                                        \
  F(atanh)

enum class UnaryFunction {
#define CNN_ENGINE_NAME(name) name,
  CNN_ENGINE_UNARY_FUNCTIONS(CNN_ENGINE_NAME)
#undef CNN_ENGINE_NAME
};

// As Python names it; null for what is no function.
inline const char* name_of(UnaryFunction function) {
  switch (function) {
#define CNN_ENGINE_NAME(name) \
  case UnaryFunction::name:   \
    return #name;
    CNN_ENGINE_UNARY_FUNCTIONS(CNN_ENGINE_NAME)
#undef CNN_ENGINE_NAME
  }
  return nullptr;
}

namespace cpu {
void unary(const float* input,  // [size]
           float* output,       // [size]
           std::int64_t size, UnaryFunction function, float alpha, float beta, int threads);
}
namespace cuda {
void unary(const float* input,  // [size]
           float* output,       // [size]
           std::int64_t size, UnaryFunction function, float alpha, float beta, Stream stream);
}
}  // namespace cnn_engine
