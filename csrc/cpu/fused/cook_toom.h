// Winograd's form of convolution, Y = A^T [(G g G^T) * (B^T d B)] A, in one dimension at a time,
// after Cook and Toom: m outputs of r kernel offsets from m + r - 1 products instead of m * r.
//
// The points of evaluation, in the order of the frequencies, are 0, 1, -1, 2, -2, 1/2, -1/2,
// infinity for 8 products, 0, A, -A, B, -B, infinity for 6 and 0, 1, -1, infinity for 4: of the
// sets tried, those with the least rounding error (docs/explanation/numerics.md): of 6, a
// quarter of that of 1 and 1/2. A row of B^T for the point p is the polynomial that is zero at
// every other point, for infinity the one that is zero at all; A^T holds the powers of p; all
// scaling is in G, which pack.cpp computes in double precision. Included only by files that are
// compiled once for each instruction set.
#pragma once

#include "cpu/fused/vector.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Their powers and products are exact.
constexpr float kPointA = 0.625f, kPointB = 1.5f;
constexpr float kSquareA = kPointA * kPointA, kSquareB = kPointB * kPointB;

// o = B^T d
template <typename V>
CNN_ENGINE_INLINE void input_transform(const V (&d)[8], V (&o)[8]) {
  o[0] = (d[6] - d[0]) + 5.25f * (d[2] - d[4]);
  const V even1 = (d[6] + d[2]) - 4.25f * d[4];
  const V odd1 = (d[5] + d[1]) - 4.25f * d[3];
  o[1] = even1 + odd1;
  o[2] = even1 - odd1;
  const V even2 = (d[6] - 1.25f * d[4]) + 0.25f * d[2];
  const V odd2 = (d[5] - 1.25f * d[3]) + 0.25f * d[1];
  o[3] = even2 + 2.0f * odd2;
  o[4] = even2 - 2.0f * odd2;
  const V even3 = (d[6] - 5.0f * d[4]) + 4.0f * d[2];
  const V odd3 = (d[5] - 5.0f * d[3]) + 4.0f * d[1];
  o[5] = even3 + 0.5f * odd3;
  o[6] = even3 - 0.5f * odd3;
  o[7] = (d[7] - d[1]) + 5.25f * (d[3] - d[5]);
}

template <typename V>
CNN_ENGINE_INLINE void input_transform(const V (&d)[6], V (&o)[6]) {
  o[0] = (d[4] - (kSquareA + kSquareB) * d[2]) + kSquareA * kSquareB * d[0];
  const V even1 = d[4] - kSquareB * d[2];
  const V odd1 = d[3] - kSquareB * d[1];
  o[1] = even1 + kPointA * odd1;
  o[2] = even1 - kPointA * odd1;
  const V even2 = d[4] - kSquareA * d[2];
  const V odd2 = d[3] - kSquareA * d[1];
  o[3] = even2 + kPointB * odd2;
  o[4] = even2 - kPointB * odd2;
  o[5] = (d[5] - (kSquareA + kSquareB) * d[3]) + kSquareA * kSquareB * d[1];
}

template <typename V>
CNN_ENGINE_INLINE void input_transform(const V (&d)[4], V (&o)[4]) {
  o[0] = d[2] - d[0];
  o[1] = d[2] + d[1];
  o[2] = d[2] - d[1];
  o[3] = d[3] - d[1];
}

// y = A^T m
template <typename V>
CNN_ENGINE_INLINE void output_transform(const V (&m)[8], V (&y)[4]) {
  const V sum1 = m[1] + m[2], difference1 = m[1] - m[2];
  const V sum2 = m[3] + m[4], difference2 = m[3] - m[4];
  const V sum3 = m[5] + m[6], difference3 = m[5] - m[6];
  y[0] = (m[0] + sum1) + (sum2 + sum3);
  y[1] = (difference1 + 2.0f * difference2) + 0.5f * difference3;
  y[2] = (sum1 + 4.0f * sum2) + 0.25f * sum3;
  y[3] = (difference1 + m[7]) + 8.0f * difference2 + 0.125f * difference3;
}

template <typename V>
CNN_ENGINE_INLINE void output_transform(const V (&m)[6], V (&y)[4]) {
  const V sum1 = m[1] + m[2], difference1 = kPointA * (m[1] - m[2]);
  const V sum2 = m[3] + m[4], difference2 = kPointB * (m[3] - m[4]);
  y[0] = (m[0] + sum1) + sum2;
  y[1] = difference1 + difference2;
  y[2] = kSquareA * sum1 + kSquareB * sum2;
  y[3] = (kSquareA * difference1 + m[5]) + kSquareB * difference2;
}

template <typename V>
CNN_ENGINE_INLINE void output_transform(const V (&m)[6], V (&y)[2]) {
  y[0] = (m[0] + (m[1] + m[2])) + (m[3] + m[4]);
  y[1] = (kPointA * (m[1] - m[2]) + m[5]) + kPointB * (m[3] - m[4]);
}

template <typename V>
CNN_ENGINE_INLINE void output_transform(const V (&m)[4], V (&y)[2]) {
  y[0] = m[0] + (m[1] + m[2]);
  y[1] = m[3] + (m[1] - m[2]);
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
