// The functions of one number and of two that kernels have, for programs too that are compiled at
// first use: this file includes nothing.
#pragma once

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

// Every function: name(x, y).
#define CNN_ENGINE_BINARY_FUNCTIONS(F)                             \
  F(add)                                                           \
  F(sub)                                                           \
  F(mul)                                                           \
  F(div)                                                           \
  F(pow)                                                           \
  F(max)   /* NaN where either is */                               \
  F(min)   /* NaN where either is */                               \
  F(mod)   /* x - floor(x / y) * y: the sign of y, as in Python */ \
  F(fmod)  /* x - trunc(x / y) * y: the sign of x, as in C */      \
  F(prelu) /* x, or y * x below 0 */

enum class BinaryFunction {
#define CNN_ENGINE_NAME(name) name,
  CNN_ENGINE_BINARY_FUNCTIONS(CNN_ENGINE_NAME)
#undef CNN_ENGINE_NAME
};

}  // namespace cnn_engine
