// Rows of weights in the types that linear_rows.h packs them as.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/conv2d_nhwc.h"

namespace cnn_engine::cuda {

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
  __device__ void unpack(float (&to)[8]) const {
    const T* values = reinterpret_cast<const T*>(&value);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(values[i]);
  }
};

// Calls body(a null pointer to the type that weights are kept as).
template <typename Body>
void with_row_type(Conv2dOperands operands, const Body& body) {
  switch (operands) {
    case Conv2dOperands::float32:
    case Conv2dOperands::tf32:
      return body(static_cast<float*>(nullptr));
    case Conv2dOperands::float16:
      return body(static_cast<__half*>(nullptr));
    case Conv2dOperands::bfloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
  }
}

}  // namespace cnn_engine::cuda
