// Where Winograd's convolution may be used: for each output, by what its own window holds.
//
// A tile's outputs share products, which cancel where an output does not read them, but for their
// rounding. So the error of each is that of the whole tile, and where a window holds little beside
// its tile (zeros, a dark place beside a bright one, NaN), that is more than the window's own sum
// may have:
//
//   |error| <= (16 + K / 8) u S,  S = sum of |x||w| over the K terms of the window.
//
// Such outputs are computed directly. Of a filter, with e(.) the sum of squares and l(.) that of
// sizes, over channels, and w the root mean square, over channels, of its taps' norm:
//
//   error of Winograd's <= kappa u w sqrt(e(tile))   kappa measured, with signs at random and alike
//   S >= sum over taps of mean|w| l(x) - 3 spread|w| sqrt(e(window))
//
// The latter holds for values whose places have nothing to do with those of the weights, short of
// three standard deviations; it is negative where few values, or few weights, make up the sum. Of
// taps that are small for all channels, which images with rows or columns of zeros are sensitive
// to, twice their own mean is taken. All filters share the least of each number, as parts of w.
// Included only by files that are compiled once for each instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/fused/vector.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr int kBoundRows = 16, kBoundColumns = 8, kBoundTaps = 25;
// Channels from which each tap has a mean of its own; of fewer, each row and column of taps.
constexpr int kBoundChannels = 16;
// Of rounding errors, all that is not Winograd's: the sum with the bias, the last rounding.
constexpr double kBoundPart = 0.9;
constexpr double kBoundDeviations = 3.0;
// What windows must allow for Winograd to be tried at all: L1 and L2 norms like those of a
// rectified normal distribution.
constexpr double kUsualPart = 0.32;
// Below these weights and squares, numbers may be rounded as subnormal ones.
constexpr double kLeastWeight = 1e-25;
constexpr float kLeastSquare = 1e-25f;

struct WindowBound {
  float fits;              // 0: the weights are not for Winograd, whatever the values are
  float tile, spread;      // factors of e(tile), squared, and of e(window)
  float taps[kBoundTaps];  // factors of l(x) by tap, where there are so few
  float rows[kBoundRows];  // the same of a row of taps and of a column: their product
  float columns[kBoundColumns];
};
// In floats, where packed weights begin with one.
constexpr int kBoundFloats = (sizeof(WindowBound) / sizeof(float) + 15) / 16 * 16;

inline bool fits_winograd(const float* packed) { return packed[0] != 0.0f; }
inline WindowBound unpacked_bound(const float* packed) {
  WindowBound bound;
  __builtin_memcpy(&bound, packed, sizeof bound);
  return bound;
}

// Of weights [filters, channels, r, s]. `tile_part`: e(tile) by e(window) of even values.
inline WindowBound window_bound(const float* weight, int filters, int channels, int r, int s,
                                double kappa, double tile_part) {
  WindowBound bound{};
  const int taps = r * s;
  const double count = double(channels) * taps;
  double spread = 0, mean = 1, tap_part[kBoundTaps], row_part[kBoundRows],
         column_part[kBoundColumns];
  for (double& part : tap_part) part = 1;
  for (double& part : row_part) part = 1;
  for (double& part : column_part) part = 1;
  bool regular = r <= kBoundRows && s <= kBoundColumns, any = false;
  for (int k = 0; k < filters && regular; ++k, weight += std::int64_t{channels} * taps) {
    double sums[kBoundRows * kBoundColumns] = {}, square = 0;
    for (int c = 0; c < channels; ++c) {
      for (int tap = 0; tap < taps; ++tap) {
        const double w = weight[std::int64_t{c} * taps + tap];
        sums[tap] += std::fabs(w);
        square += w * w;
      }
    }
    double sum = 0, rows[kBoundRows] = {}, columns[kBoundColumns] = {};
    for (int tap = 0; tap < taps; ++tap) {
      sum += sums[tap];
      rows[tap / s] += sums[tap];
      columns[tap % s] += sums[tap];
    }
    if (sum == 0) continue;  // exact, whatever it is multiplied by
    any = true;
    const double size = std::sqrt(square / channels), own = sum / count / size;
    regular = size >= kLeastWeight && size < 1e25;  // false for NaN
    const double variance = square / count / (size * size) - own * own;
    const auto lower = [](double& least, double value) {
      if (value < least) least = value;
    };
    if (variance > spread) spread = variance;
    lower(mean, own);
    for (int tap = 0; tap < taps && tap < kBoundTaps; ++tap) {
      lower(tap_part[tap], 2 * sums[tap] * taps / sum);
    }
    for (int i = 0; i < r; ++i) lower(row_part[i], 2 * rows[i] * r / sum);
    for (int j = 0; j < s; ++j) lower(column_part[j], 2 * columns[j] * s / sum);
  }
  if (!regular || !any) return bound;
  const double tile = kappa / (kBoundPart * (16 + count / 8));
  const double deviations = kBoundDeviations * std::sqrt(spread);
  double all = 0;
  for (int i = 0; i < r; ++i) bound.rows[i] = static_cast<float>(mean * row_part[i]);
  for (int j = 0; j < s; ++j) bound.columns[j] = static_cast<float>(column_part[j]);
  for (int tap = 0; tap < taps; ++tap) {
    double part = row_part[tap / s] * column_part[tap % s];
    if (tap < kBoundTaps && channels >= kBoundChannels) part = tap_part[tap];
    if (tap < kBoundTaps) bound.taps[tap] = static_cast<float>(mean * part);
    all += mean * part / taps;
  }
  bound.fits = all * std::sqrt(kUsualPart * count) > deviations + tile * std::sqrt(tile_part);
  bound.tile = static_cast<float>(tile * tile);
  bound.spread = static_cast<float>(deviations * deviations);
  return bound;
}

// Lane i of what is returned is the sum of the lanes of values[i].
template <int W>
CNN_ENGINE_INLINE Vec<W> lane_sums(Vec<W> (&values)[W]) {
  IntVec<W> even, odd;
  for (int i = 0; i < W; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
#pragma GCC unroll 4
  for (int left = W / 2; left > 0; left /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < left; ++i) {
      const Vec<W> a = values[2 * i], b = values[2 * i + 1];
      values[i] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    }
  }
  return values[0];
}

template <typename V>
CNN_ENGINE_INLINE V absolute(V x) {
  return x < 0.0f ? -x : x;
}

// Whether an output may be Winograd's: sum of factors and l(x) of its window, e(window), and the
// root of the factor and e(tile).
CNN_ENGINE_INLINE bool is_inside(const WindowBound& bound, float held, float window, float tile) {
  const float rest = held - tile;
  return rest > 0.0f && rest * rest > bound.spread * window + kLeastSquare;
}

// Outputs of a tile of MxM that are not to be Winograd's, a bit each, by rows. `sizes` and
// `squares` are l(x) and e(x) of the tile's places; of its outputs, `rows` by `columns` count.
template <int M, int R>
inline unsigned outside_bound(const WindowBound& bound, const float (&sizes)[M + R - 1][M + R - 1],
                              const float (&squares)[M + R - 1][M + R - 1], int rows, int columns) {
  constexpr int S = M + R - 1;
  float energy = 0;
  for (int i = 0; i < S; ++i) {
    for (int j = 0; j < S; ++j) energy += squares[i][j];
  }
  float size = 0;
  for (int i = 0; i < S; ++i) {
    for (int j = 0; j < S; ++j) size += sizes[i][j];
  }
  if (size == 0.0f) return 0;  // zeros alone: exact
  const float tile = std::sqrt(bound.tile * energy);
  unsigned found = 0;
  for (int i = 0; i < rows; ++i) {
    float held[M] = {}, part[M] = {};
    for (int r = 0; r < R; ++r) {
      for (int s = 0; s < R; ++s) {
        for (int j = 0; j < M; ++j) {
          held[j] += bound.taps[r * R + s] * sizes[i + r][j + s];
          part[j] += squares[i + r][j + s];
        }
      }
    }
    for (int j = 0; j < columns; ++j) {
      found |= unsigned{!is_inside(bound, held[j], part[j], tile)} << (i * M + j);
    }
  }
  return found;
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
