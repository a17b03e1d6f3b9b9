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

// Stores what follows a layer's sum as element `at` of y; `residual` and `table` may be null.
__device__ inline void store_requantized(void* y, std::int64_t at, int total, float scale,
                                         const std::uint8_t* residual, const QuantizedTypes& types,
                                         const std::uint8_t* table) {
  if (types.y == ElementType::int32) {
    static_cast<int*>(y)[at] = total;
    return;
  }
  if (types.y == ElementType::float32) {
    static_cast<float*>(y)[at] = scaled(total, scale);
    return;
  }
  const float v = residual ? scaled(total, scale, *residual, types) : scaled(total, scale);
  const auto byte = static_cast<std::uint8_t>(to_integer(v, types.y_zero, types.low, types.high));
  static_cast<std::uint8_t*>(y)[at] = table ? table[byte] : byte;
}

// What follows the sums of sixteen neighbouring filters, of a y of 8 bits without an inner scale:
// the same integers by fewer conversions, which are slow. A float that is rounded to an integer has
// it in its last bits once 1.5 * 2^23 is added; a byte in those of 2^23 is that number and the
// byte.
class Requantizer {
 public:
  __device__ explicit Requantizer(const QuantizedTypes& types)
      : types_(types),
        least_(static_cast<float>(types.low - types.y_zero)),
        most_(static_cast<float>(types.high - types.y_zero)) {
    const bool is_signed = types.residual == ElementType::int8;
    flip_ = is_signed ? 0x80808080u : 0u;
    zero_ = static_cast<float>((1 << 23) + types.residual_zero + (is_signed ? 128 : 0));
  }

  template <bool Residual>
  __device__ uint4 sixteen(const int (&totals)[16], const float* scales, const uint4& residual,
                           const std::uint8_t* table) const {
    const unsigned added[4] = {residual.x, residual.y, residual.z, residual.w};
    unsigned made[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float4 factors = *reinterpret_cast<const float4*>(scales + 4 * word);
      const float scale[4] = {factors.x, factors.y, factors.z, factors.w};
      unsigned bytes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float v = scaled(totals[4 * word + i], scale[i]);
        if constexpr (Residual) {
          const float steps = __fsub_rn(
              __uint_as_float(__byte_perm(added[word] ^ flip_, 0x4b000000u, 0x7540u + i)), zero_);
          v = __fadd_rn(v, __fmul_rn(steps, types_.residual_scale));
        }
        v = __fadd_rn(fminf(fmaxf(v, least_), most_), 12582912.0f);
        bytes[i] = __float_as_uint(v) + types_.y_zero;
      }
      if (table) {
#pragma unroll
        for (int i = 0; i < 4; ++i) bytes[i] = table[bytes[i] & 0xff];
      }
      made[word] = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040u),
                               __byte_perm(bytes[2], bytes[3], 0x0040u), 0x5410u);
    }
    return make_uint4(made[0], made[1], made[2], made[3]);
  }

 private:
  const QuantizedTypes& types_;
  float least_, most_, zero_;
  unsigned flip_;
};

}  // namespace cnn_engine::cuda
