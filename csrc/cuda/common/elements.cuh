// Elements of tensors in memory as float32, float16 or bfloat16: neighbours are read and written at
// once, as float32. For programs too that are compiled at first use.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ops/overflow.h"

namespace cnn_engine::cuda {

__device__ inline float widened(float x) { return x; }
__device__ inline float widened(__half x) { return __half2float(x); }
__device__ inline float widened(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T narrowed(float x);
template <>
__device__ inline float narrowed<float>(float x) {
  return x;
}
template <>
__device__ inline __half narrowed<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 narrowed<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// `width` neighbours, aligned to all of them or to 16 bytes.
template <typename T, int width>
struct alignas(sizeof(T) * width < 16 ? sizeof(T) * width : 16) Neighbours {
  T value[width];
};

template <int width, typename T>
__device__ inline void load_neighbours(const T* from, float (&to)[width]) {
  const auto found = *reinterpret_cast<const Neighbours<T, width>*>(from);
#pragma unroll
  for (int i = 0; i < width; ++i) to[i] = widened(found.value[i]);
}

// Whether a finite number is an infinity in float16: from 65,520, halfway to what would be next.
__device__ inline bool is_past_float16(float value) {
  constexpr unsigned kLeast = 0x477ff000u, kInfinity = 0x7f800000u;
  return (__float_as_uint(value) & 0x7fffffffu) - kLeast < kInfinity - kLeast;
}

__device__ inline void tell(const Overflow& overflow) {
  if (overflow.word != 0) *reinterpret_cast<volatile int*>(overflow.word) = overflow.number;
}

template <int width, typename T>
__device__ inline void store_neighbours(T* to, const float (&from)[width],
                                        const Overflow& overflow) {
  Neighbours<T, width> made;
#pragma unroll
  for (int i = 0; i < width; ++i) made.value[i] = narrowed<T>(from[i]);
  *reinterpret_cast<Neighbours<T, width>*>(to) = made;
  if constexpr (std::is_same_v<T, __half>) {
    bool past = false;
#pragma unroll
    for (int i = 0; i < width; ++i) past |= is_past_float16(from[i]);
    if (past) tell(overflow);
  }
}

}  // namespace cnn_engine::cuda
