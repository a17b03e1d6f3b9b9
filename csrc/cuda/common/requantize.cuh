// Between floats and the integers of 8 bits that stand for them, one number at a time: what
// cpu/requantize.h does in vectors. Each operation on floats is rounded by itself, so that all
// devices make equal bits: the intrinsics are never contracted.
#pragma once

#include <cstdint>

#include "ops/quantized_conv2d.h"

namespace cnn_engine::cuda {

// clamp(round_half_even(v) + zero, low, high); a NaN gives low.
__device__ inline int to_integer(float v, int zero, int low, int high) {
  const float least = __int2float_rn(low - zero), most = __int2float_rn(high - zero);
  v = v > least ? v : least;
  v = v < most ? v : most;
  return __float2int_rn(v) + zero;
}

// The number of 8 bits.
__device__ inline int integer_of(std::uint8_t bits, ElementType type) {
  return type == ElementType::int8 ? static_cast<std::int8_t>(bits) : bits;
}

// The contract's v of a layer's sum.
__device__ inline float scaled(int total, float scale) {
  return __fmul_rn(__int2float_rn(total), scale);
}
__device__ inline float scaled(int total, float scale, std::uint8_t residual,
                               const QuantizedTypes& types) {
  const int steps = integer_of(residual, types.residual) - types.residual_zero;
  float v = scaled(total, scale);
  if (types.inner_scale != 0) {
    v = scaled(to_integer(v, 0, types.inner_low, types.inner_high), types.inner_scale);
  }
  return __fadd_rn(v, scaled(steps, types.residual_scale));
}

}  // namespace cnn_engine::cuda
