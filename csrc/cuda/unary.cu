// unary on CUDA: one thread makes four neighbouring elements where both arrays start at 16 bytes,
// else one.
#include "cuda/strided.cuh"
#include "ops/unary.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

// Comparisons are written so that a NaN, for which all are false, passes through.

__device__ float clamp(float x, float lowest, float highest) {
  const float low = x < lowest ? lowest : x;
  return low > highest ? highest : low;
}

// 1 / (1 + exp(-x)) by the exponential that does not overflow.
__device__ float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// a, b: alpha and beta.
#define CNN_ENGINE_FUNCTION(name, expression)                                                 \
  struct unary_##name {                                                                       \
    static __device__ float of(float x, [[maybe_unused]] float a, [[maybe_unused]] float b) { \
      return expression;                                                                      \
    }                                                                                         \
  };

CNN_ENGINE_FUNCTION(linear, (a * x + b))
CNN_ENGINE_FUNCTION(relu, x < 0.0f ? 0.0f : x)
CNN_ENGINE_FUNCTION(leaky_relu, x < 0.0f ? a * x : x)
CNN_ENGINE_FUNCTION(thresholded_relu, x > a ? x : 0.0f)
CNN_ENGINE_FUNCTION(elu, x < 0.0f ? a * expm1f(x) : x)
CNN_ENGINE_FUNCTION(selu, (b * (x < 0.0f ? a * expm1f(x) : x)))
CNN_ENGINE_FUNCTION(sigmoid, sigmoid(x))
CNN_ENGINE_FUNCTION(hard_sigmoid, clamp((a * x + b), 0.0f, 1.0f))
// x + 3 is exact near -3, where x / 6 + 1/2 would not be.
CNN_ENGINE_FUNCTION(hard_swish, (x * (clamp(x + 3.0f, 0.0f, 6.0f) / 6.0f)))
CNN_ENGINE_FUNCTION(swish, (x * sigmoid(a * x)))
CNN_ENGINE_FUNCTION(gelu, (x * normcdff(x)))
CNN_ENGINE_FUNCTION(clip, clamp(x, a, b))
CNN_ENGINE_FUNCTION(shrink, (x < -a ? x + b : (x > a ? x - b : 0.0f)))
CNN_ENGINE_FUNCTION(tanh, tanhf(x))
CNN_ENGINE_FUNCTION(erf, erff(x))
CNN_ENGINE_FUNCTION(softplus, (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x))))
CNN_ENGINE_FUNCTION(softsign, x / (1.0f + fabsf(x)))
CNN_ENGINE_FUNCTION(sqrt, sqrtf(x))
CNN_ENGINE_FUNCTION(exp, expf(x))
CNN_ENGINE_FUNCTION(log, logf(x))
CNN_ENGINE_FUNCTION(abs, fabsf(x))
CNN_ENGINE_FUNCTION(neg, -x)
CNN_ENGINE_FUNCTION(reciprocal, 1.0f / x)
CNN_ENGINE_FUNCTION(floor, floorf(x))
CNN_ENGINE_FUNCTION(ceil, ceilf(x))
CNN_ENGINE_FUNCTION(round, rintf(x))
CNN_ENGINE_FUNCTION(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x)
CNN_ENGINE_FUNCTION(sin, sinf(x))
CNN_ENGINE_FUNCTION(cos, cosf(x))
CNN_ENGINE_FUNCTION(tan, tanf(x))
CNN_ENGINE_FUNCTION(asin, asinf(x))
CNN_ENGINE_FUNCTION(acos, acosf(x))
CNN_ENGINE_FUNCTION(atan, atanf(x))
CNN_ENGINE_FUNCTION(sinh, sinhf(x))
CNN_ENGINE_FUNCTION(cosh, coshf(x))
CNN_ENGINE_FUNCTION(asinh, asinhf(x))
CNN_ENGINE_FUNCTION(acosh, acoshf(x))
CNN_ENGINE_FUNCTION(atanh, atanhf(x))
#undef CNN_ENGINE_FUNCTION

struct unary_celu {
  static __device__ float of(float x, float a, float) {
    const float below = a * expm1f(x / a);
    return (x < 0.0f ? 0.0f : x) + (below > 0.0f ? 0.0f : below);
  }
};

struct unary_mish {
  static __device__ float of(float x, float, float) {
    // tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2); past 20 the ratio is 1.
    const float e = expf(x > 20.0f ? 20.0f : x);
    const float n = e * (e + 2.0f);
    return x * (n / (n + 2.0f));
  }
};

struct unary_gelu_tanh {
  static __device__ float of(float x, float, float) {
    // (1 + tanh(u)) / 2 = sigmoid(2 u), which keeps its digits where tanh(u) is near -1.
    const float u = 0.7978845608f * (x + 0.044715f * (x * x * x));
    return x * sigmoid(2.0f * u);
  }
};

template <typename Function>
__global__ void unary_kernel(const float* input,  // [size]
                             float* output,       // [size]; may be the input
                             std::int64_t size, float a, float b, bool vectors) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t groups = vectors ? size / 4 : 0;
  for (std::int64_t i = grid_thread(); i < groups; i += threads) {
    float4 v = reinterpret_cast<const float4*>(input)[i];
    v.x = Function::of(v.x, a, b);
    v.y = Function::of(v.y, a, b);
    v.z = Function::of(v.z, a, b);
    v.w = Function::of(v.w, a, b);
    reinterpret_cast<float4*>(output)[i] = v;
  }
  for (std::int64_t i = groups * 4 + grid_thread(); i < size; i += threads) {
    output[i] = Function::of(input[i], a, b);
  }
}

template <typename Function>
void launch_unary(const float* input, float* output, std::int64_t size, float a, float b,
                  Stream stream) {
  const bool vectors = is_aligned(input, 16) && is_aligned(output, 16);
  const unsigned blocks = blocks_for(vectors ? size / 4 + size % 4 : size);
  unary_kernel<Function><<<blocks, kBlockThreads, 0, stream>>>(input, output, size, a, b, vectors);
  CUDA_CHECK_LAUNCH("unary_kernel");
}

}  // namespace

void unary(const float* input, float* output, std::int64_t size, UnaryFunction function,
           float alpha, float beta, Stream stream) {
  if (size <= 0) return;
  switch (function) {
#define CNN_ENGINE_LAUNCH(name) \
  case UnaryFunction::name:     \
    return launch_unary<unary_##name>(input, output, size, alpha, beta, stream);
    CNN_ENGINE_UNARY_FUNCTIONS(CNN_ENGINE_LAUNCH)
#undef CNN_ENGINE_LAUNCH
  }
}

}  // namespace cnn_engine::cuda
