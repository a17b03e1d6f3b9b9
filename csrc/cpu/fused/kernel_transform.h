// G of Winograd's convolution.
#pragma once

#include "runtime/shape.h"

namespace cnn_engine::cpu::fused {

// G [m + r - 1, r] of Winograd's convolution (cook_toom.h, which the order of the points is to
// match) with so many finite points: the powers of a point over the value there of the polynomial
// that is zero at the other points; for infinity, the last power.
CNN_ENGINE_INLINE void kernel_transform(const double (&points)[7], int finite, int r,
                                        double (&g)[8][5]) {
  for (int i = 0; i < finite; ++i) {
    double value = 1;
    for (int j = 0; j < finite; ++j) value *= i == j ? 1 : points[i] - points[j];
    double power = 1;
    for (int kernel_offset = 0; kernel_offset < r; ++kernel_offset, power *= points[i])
      g[i][kernel_offset] = power / value;
  }
  for (int kernel_offset = 0; kernel_offset < r; ++kernel_offset)
    g[finite][kernel_offset] = kernel_offset == r - 1;
}

// cook_toom.h's points, by how many of them are finite.
constexpr double kPoints[3][7] = {
    {0, 1, -1}, {0, .625, -.625, 1.5, -1.5}, {0, 1, -1, 2, -2, .5, -.5}};

CNN_ENGINE_INLINE const double (&points_of(int finite))[7] { return kPoints[finite / 2 - 1]; }

CNN_ENGINE_INLINE void kernel_transform(int m, int r, double (&g)[8][5]) {
  const int finite = m + r - 2;
  kernel_transform(points_of(finite), finite, r, g);
}

}  // namespace cnn_engine::cpu::fused
