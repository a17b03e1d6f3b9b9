// How convolutions that wgmma multiplies end: sums to shared memory, functions, pieces of rows.
#pragma once

#include "cuda/stored.cuh"
#include "cuda/unary.cuh"

namespace cnn_engine::cuda::wgmma {

// What a warpgroup holds, as [columns][pitch] with the rows of D side by side: `thread` of them.
template <int Columns, int Pitch>
__device__ inline void store_sums(float* to, const float (&sums)[Columns / 2], int thread) {
  const int lane = thread % 32, g = lane / 4, t = lane % 4;
  to += 2 * t * Pitch + thread / 32 * 16 + g;
#pragma unroll
  for (int j = 0; j < Columns / 8; ++j) {
    to[8 * j * Pitch] = sums[4 * j];
    to[(8 * j + 1) * Pitch] = sums[4 * j + 1];
    to[8 * j * Pitch + 8] = sums[4 * j + 2];
    to[(8 * j + 1) * Pitch + 8] = sums[4 * j + 3];
  }
}

// The function is looked up once for all values.
template <typename P, int n>
__device__ inline void activate(const P& p, float (&value)[n]) {
  const auto each = [&](const auto& function) {
#pragma unroll
    for (int i = 0; i < n; ++i) value[i] = function(value[i]);
  };
  switch (p.activation) {
    case UnaryFunction::clip:
      return each([&](float x) { return clamp(x, p.alpha, p.beta); });
    case UnaryFunction::relu:
      return each([](float x) { return unary_relu::of(x, 0.0f, 0.0f); });
    case UnaryFunction::hard_swish:
      return each([](float x) { return unary_hard_swish::of(x, 0.0f, 0.0f); });
    case UnaryFunction::swish:
      return each([&](float x) { return unary_swish::of(x, p.alpha, 0.0f); });
    default:
      return each([&](float x) { return unary_of(p.activation, x, p.alpha, p.beta); });
  }
}

// The first `left` of neighbours; all of them at once where they are `whole`.
template <typename From, int n>
__device__ inline void load_piece(const From* from, float (&to)[n], bool whole, int left) {
  if (whole) return load_neighbours<n>(from, to);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (i < left) to[i] = widened(from[i]);
  }
}

template <typename To, int n>
__device__ inline void store_piece(To* to, const float (&from)[n], bool whole, int left,
                                   const Overflow& overflow) {
  if (whole) return store_neighbours<n>(to, from, overflow);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float one[1] = {from[i]};
    if (i < left) store_neighbours<1>(to + i, one, overflow);
  }
}

}  // namespace cnn_engine::cuda::wgmma
