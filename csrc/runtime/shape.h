// What the operators' shape structs share: how their members are compiled, and how they say no.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

// Shape members are used from host code built for several instruction sets and from device code.
// They are always inlined, so that no out-of-line copy built for AVX-512 can be picked by the
// linker for a caller that runs on a CPU without it.
#if defined(__CUDACC__)
#define CNN_ENGINE_INLINE __host__ __device__ __forceinline__
#else
#define CNN_ENGINE_INLINE inline __attribute__((always_inline))
#endif

namespace cnn_engine {

// Throws std::invalid_argument unless lowest <= value <= the largest int.
inline void require_at_least(const char* name, std::int64_t value, std::int64_t lowest) {
  constexpr std::int64_t highest = std::numeric_limits<int>::max();
  if (value < lowest || value > highest) {
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(lowest) +
                                " to " + std::to_string(highest) + ", found " +
                                std::to_string(value));
  }
}

// Throws std::invalid_argument when one image's tensor would not be indexable with 32 bits.
inline void require_indexable(const char* name, std::int64_t a, std::int64_t b, std::int64_t c) {
  constexpr std::int64_t highest = std::numeric_limits<int>::max();
  if (a != 0 && b != 0 && c != 0 && (b > highest / c || a > highest / (b * c))) {
    throw std::invalid_argument(std::string(name) + ": expected at most " +
                                std::to_string(highest) + " elements an image, found " +
                                std::to_string(a) + " x " + std::to_string(b) + " x " +
                                std::to_string(c));
  }
}

}  // namespace cnn_engine
