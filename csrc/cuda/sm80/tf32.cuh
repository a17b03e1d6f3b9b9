// Floats of which tensor cores read 11 bits.
#pragma once

#include <cstdint>

#include "cuda/sm80/storage.cuh"

namespace cnn_engine::cuda {

// In memory a float; the bits beyond those 11 do not count.
struct Tf32 {
  float value;
};

// The nearest number of 11 bits, and its bits.
__device__ inline std::uint32_t to_tf32_bits(float x) {
  std::uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
__device__ inline float to_tf32(float x) { return __uint_as_float(to_tf32_bits(x)); }

// What tensor cores read of a float.
__device__ inline float read_as_tf32(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

// What x has beyond the bits that tensor cores read of `large`, 13 bits, of which 11 are kept:
// rounded away from zero, which on average makes up for most of what sums lose, as tensor cores cut
// off what does not fit their bits. 1 + 2^-12 lifts whatever lies between two numbers of 11 bits to
// at least their middle, and leaves those numbers what they are.
__device__ inline float beyond_tf32(float x, float large) {
  return to_tf32((x - read_as_tf32(large)) * (1.0f + 0x1p-12f));
}

// A number as two that tensor cores read, `large` as it is. An infinity's large part is a finite
// number of its sign: inf is multiplied by the large parts of other numbers alone.
struct Tf32Parts {
  float large, small;

  __device__ explicit Tf32Parts(float x)
      : large(isinf(x) ? copysignf(1.0f, x) : x), small(beyond_tf32(x, large)) {}
};

// A part of a weight, whose large part is the nearest where that is finite.
__device__ inline float part_of_tf32(float weight, bool small) {
  float large = to_tf32(weight);
  if (isinf(large)) large = isinf(weight) ? copysignf(1.0f, weight) : read_as_tf32(weight);
  return small ? to_tf32(weight - large) : large;
}

__device__ inline float widened(Tf32 x) { return x.value; }
template <>
__device__ inline Tf32 narrowed<Tf32>(float x) {
  return {to_tf32(x)};
}

}  // namespace cnn_engine::cuda
