// G of Winograd's convolution, and how its tiles pass on rounding errors.
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
    for (int tap = 0; tap < r; ++tap, power *= points[i]) g[i][tap] = power / value;
  }
  for (int tap = 0; tap < r; ++tap) g[finite][tap] = tap == r - 1;
}

// cook_toom.h's points, by how many of them are finite.
constexpr double kPoints[3][7] = {
    {0, 1, -1}, {0, .625, -.625, 1.5, -1.5}, {0, 1, -1, 2, -2, .5, -.5}};

CNN_ENGINE_INLINE const double (&points_of(int finite))[7] { return kPoints[finite / 2 - 1]; }

CNN_ENGINE_INLINE void kernel_transform(int m, int r, double (&g)[8][5]) {
  const int finite = m + r - 2;
  kernel_transform(points_of(finite), finite, r, g);
}

// How much of the input's square reaches the square of each output's rounding error,
// [output][input] of a side of a tile, with signs at random: the sum over frequencies of the
// squares of A^T's, B^T's and the mean tap's factor.
CNN_ENGINE_INLINE void error_gains(int m, int r, double (&gains)[4][8]) {
  const int finite = m + r - 2;
  const double (&points)[7] = points_of(finite);
  double g[8][5];
  kernel_transform(m, r, g);
  for (int i = 0; i < m; ++i) {
    for (double& gain : gains[i]) gain = 0;
  }
  for (int f = 0; f <= finite; ++f) {
    double row[8] = {1};  // of B^T: the product of x - p over the other points p
    int degree = 0;
    for (int p = 0; p < finite; ++p) {
      if (p == f) continue;
      ++degree;
      for (int j = degree; j >= 0; --j) row[j] = (j > 0 ? row[j - 1] : 0) - points[p] * row[j];
    }
    double taps = 0;
    for (int tap = 0; tap < r; ++tap) taps += g[f][tap] * g[f][tap] / r;
    double power = f < finite ? 1 : 0;
    for (int i = 0; i < m; ++i) {
      if (f == finite && i == m - 1) power = 1;
      for (int j = 0; j <= degree; ++j) gains[i][j] += power * power * taps * row[j] * row[j];
      if (f < finite) power *= points[f];
    }
  }
}

}  // namespace cnn_engine::cpu::fused
