// Runs of neighbouring channels of images whose channels lie side by side, as float32.
#pragma once

#include <cstdint>

#include "cuda/sm80/storage.cuh"

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

  template <typename T>
  __device__ static Channels load(const T* from) {
    Channels result;
    load_neighbours(from, result.value);
    return result;
  }

  template <typename T>
  __device__ void store(T* to, const Overflow& overflow = {}) const {
    store_neighbours(to, value, overflow);
  }
};

// Whether four neighbouring channels of every position lie together.
inline bool in_fours(const void* images, std::int64_t channels, std::int64_t pitch,
                     ElementType storage = ElementType::float32) {
  return channels % 4 == 0 && pitch % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(images) % (4 * bytes_of(storage)) == 0;
}

}  // namespace cnn_engine::cuda
