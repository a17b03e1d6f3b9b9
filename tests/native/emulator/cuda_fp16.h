// float16 on the host, for emulated kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda_runtime.h"

struct __half {
  std::uint16_t bits;

  __half() = default;
  explicit __half(float x);
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent == 0
                         ? std::ldexp(static_cast<float>(fraction), -24)
                         : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return x.bits & 0x8000 ? -size : size;
}
// Half to even.
inline __half __float2half_rn(float x) {
  __half made;
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (std::isnan(x)) {
    made.bits = 0x7fff;
  } else if (size >= 65520.0f) {
    made.bits = sign | 0x7c00;
  } else {
    int exponent = size == 0 ? -14 : std::max(std::ilogb(size), -14);
    const int whole = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
    // Of numbers with a leading 1 that is counted with the exponent.
    made.bits = static_cast<std::uint16_t>(sign | (((exponent + 14) << 10) + whole));
  }
  return made;
}
inline __half::__half(float x) : bits(__float2half_rn(x).bits) {}
inline std::uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }

inline __half __ushort_as_half(std::uint16_t bits) {
  __half made;
  made.bits = bits;
  return made;
}
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __float2half2_rn(float x) { return __half2half2(__half(x)); }
inline __half2 __habs2(__half2 x) {
  return {__ushort_as_half(x.x.bits & 0x7fff), __ushort_as_half(x.y.bits & 0x7fff)};
}
inline __half2 __hmax2(__half2 x, __half2 y) {  // of a number and NaN, the number
  const float2 a = __half22float2(x), b = __half22float2(y);
  return __floats2half2_rn(std::fmax(a.x, b.x), std::fmax(a.y, b.y));
}
inline __half2 __hfma2(__half2 x, __half2 y, __half2 z) {
  const float2 a = __half22float2(x), b = __half22float2(y), c = __half22float2(z);
  return __floats2half2_rn(std::fma(a.x, b.x, c.x), std::fma(a.y, b.y, c.y));
}
inline bool __hblt2(__half2 x, __half2 y) {
  const float2 a = __half22float2(x), b = __half22float2(y);
  return a.x < b.x && a.y < b.y;
}
