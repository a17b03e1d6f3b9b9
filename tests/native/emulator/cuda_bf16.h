// bfloat16 on the host, for emulated kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  std::uint16_t bits;

  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x);
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {  // half to even
  const unsigned bits = __float_as_uint(x);
  __nv_bfloat16 made;
  made.bits = static_cast<std::uint16_t>(std::isnan(x) ? 0x7fff
                                                       : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  return made;
}
inline __nv_bfloat16::__nv_bfloat16(float x) : bits(__float2bfloat16_rn(x).bits) {}
inline std::uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
