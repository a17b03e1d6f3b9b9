// Runs of neighbouring channels, one or four floats, of images whose channels lie side by side.
#pragma once

#include <cstdint>

namespace cnn_engine::cuda {

template <int width>
struct Channels {
  float value[width];

  __device__ static Channels all(float x) {
    Channels result;
#pragma unroll
    for (int i = 0; i < width; ++i) result.value[i] = x;
    return result;
  }

  __device__ static Channels load(const float* from) {
    Channels result;
    if constexpr (width == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      result.value[0] = v.x;
      result.value[1] = v.y;
      result.value[2] = v.z;
      result.value[3] = v.w;
    } else {
      result.value[0] = *from;
    }
    return result;
  }

  __device__ void store(float* to) const {
    if constexpr (width == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(value[0], value[1], value[2], value[3]);
    } else {
      *to = value[0];
    }
  }
};

// Whether four neighbouring channels of every place lie at 16 bytes.
inline bool in_fours(const void* images, std::int64_t channels, std::int64_t pitch) {
  return channels % 4 == 0 && pitch % 4 == 0 && reinterpret_cast<std::uintptr_t>(images) % 16 == 0;
}

}  // namespace cnn_engine::cuda
