// Rows of weights in the types that linear_rows.h packs them as.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ops/conv2d_nhwc.h"

namespace cnn_engine::cuda {

// 16 bytes, asked for where this stands, kept in the second-level cache as `policy` says (mma.cuh).
__device__ inline uint4 load_hinted(const void* from, std::uint64_t policy) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from), "l"(policy)
               : "memory");
  return value;
}

// Weights that a thread reads at a time.
template <typename T, int width>
struct Weights;

template <typename T>
struct Weights<T, 1> {
  T value;
  __device__ void load(const T* from) { value = *from; }
  __device__ void unpack(float (&to)[1]) const { to[0] = static_cast<float>(value); }
};

template <>
struct Weights<float, 4> {
  float4 value;
  __device__ void load(const float* from) { value = __ldcs(reinterpret_cast<const float4*>(from)); }
  __device__ void load_at_once(const void* from, std::uint64_t policy) {
    const uint4 bits = load_hinted(from, policy);
    value = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
             __uint_as_float(bits.w)};
  }
  // Not unpacked before here, which would take more registers.
  __device__ void pin() {
    asm volatile("" : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w));
  }
  __device__ void unpack(float (&to)[4]) const {
    to[0] = value.x;
    to[1] = value.y;
    to[2] = value.z;
    to[3] = value.w;
  }
};

template <typename T>
struct Weights<T, 8> {
  uint4 value;
  __device__ void load(const T* from) { value = __ldcs(reinterpret_cast<const uint4*>(from)); }
  __device__ void load_at_once(const void* from, std::uint64_t policy) {
    value = load_hinted(from, policy);
  }
  __device__ void pin() {
    asm volatile("" : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w));
  }
  __device__ void unpack(float (&to)[8]) const {
    const T* values = reinterpret_cast<const T*>(&value);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(values[i]);
  }
};

// Calls body(a null pointer to the type that weights are kept as).
template <typename Body>
void with_row_type(ElementType compute_type, const Body& body) {
  switch (compute_type) {
    case ElementType::float32:
    case ElementType::tf32:
      return body(static_cast<float*>(nullptr));
    case ElementType::float16:
      return body(static_cast<__half*>(nullptr));
    case ElementType::bfloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    default:
      refuse(compute_type);
  }
}

}  // namespace cnn_engine::cuda
