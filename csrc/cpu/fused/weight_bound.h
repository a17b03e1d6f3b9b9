// What window_bound.h needs to know of weights.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "runtime/shape.h"

namespace cnn_engine::cpu::fused {

constexpr int kBoundRows = 16, kBoundColumns = 8, kBoundTaps = 25;
// Channels from which each tap has a mean of its own; of fewer, each row and column of taps.
constexpr int kBoundChannels = 16;
// Of rounding errors, all that is not Winograd's: the sum with the bias, the last rounding.
constexpr double kBoundPart = 0.9;
constexpr double kBoundDeviations = 2.5;
// What windows must allow for Winograd to be tried at all: L1 and L2 norms like those of a
// rectified normal distribution.
constexpr double kUsualPart = 0.32;
// Below these weights and squares, numbers may be rounded as subnormal ones.
constexpr double kLeastWeight = 1e-25;
constexpr float kLeastSquare = 1e-25f;
// Added to squares of what is not zero, which may be less than the least number.
constexpr float kSomething = 1e-30f;

struct WindowBound {
  float fits;              // 0: the weights are not for Winograd, whatever the values are
  float tile, spread;      // factors of e(tile), squared, and of e(window)
  float taps[kBoundTaps];  // factors of l(x) by tap, where there are so few
  float rows[kBoundRows];  // the same of a row of taps and of a column: their product
  float columns[kBoundColumns];
};
// In floats, where packed weights begin with one.
constexpr int kBoundFloats = (sizeof(WindowBound) / sizeof(float) + 15) / 16 * 16;

CNN_ENGINE_INLINE bool fits_winograd(const float* packed) { return packed[0] != 0.0f; }
CNN_ENGINE_INLINE WindowBound unpacked_bound(const float* packed) {
  WindowBound bound;
  __builtin_memcpy(&bound, packed, sizeof bound);
  return bound;
}

// What tiles and windows of a kernel have in common.
struct TileError {
  double kappa;
  double tile_part;           // e(tile) by e(window) of even values
  double usual = kUsualPart;  // see there
  double deviations = kBoundDeviations;
  bool squares = false;  // of both errors, squares are added up
  int step = 1;          // 2: before a 2x2 pool, see window_bound()
  bool grey = false;     // channels are alike, so that deviations of a place's weights add up
};

// Of weights [filters, channels, r, s]. The error of a pooled output is within the largest bound of
// its four windows, which is at least their mean: that of a window of one row and column more, with
// the mean of four places of |w|.
CNN_ENGINE_INLINE WindowBound window_bound(const float* weight, int filters, int channels, int r,
                                           int s, const TileError& error) {
  WindowBound bound{};
  const int taps = r * s, step = error.step;
  const int height = r + step - 1, width = s + step - 1;
  const double count = double(channels) * taps;
  double spread = 0, mean = 1, tap_part[kBoundTaps], row_part[kBoundRows],
         column_part[kBoundColumns];
  for (double& part : tap_part) part = 1;
  for (double& part : row_part) part = 1;
  for (double& part : column_part) part = 1;
  bool regular = height <= kBoundRows && width <= kBoundColumns, any = false;
  // What each row and each column has of a mean: 1, and less at the border of pooled windows.
  double row_share[kBoundRows] = {}, column_share[kBoundColumns] = {}, shares = 0;
  for (int i = 0; i < r && regular; ++i) {
    for (int a = 0; a < step; ++a) row_share[i + a] += 1.0 / step;
  }
  for (int j = 0; j < s && regular; ++j) {
    for (int a = 0; a < step; ++a) column_share[j + a] += 1.0 / step;
  }
  for (int i = 0; i < height && regular; ++i) {
    for (int j = 0; j < width; ++j) {
      const double share = row_share[i] * column_share[j];
      shares += share * share;
    }
  }
  for (int k = 0; k < filters && regular; ++k, weight += std::int64_t{channels} * taps) {
    double sums[kBoundRows * kBoundColumns] = {}, square = 0, share_square = 0, product = 0;
    for (int c = 0; c < channels; ++c) {
      double means[kBoundRows * kBoundColumns] = {};
      for (int tap = 0; tap < taps; ++tap) {
        const double w = weight[std::int64_t{c} * taps + tap];
        square += w * w;
        for (int a = 0; a < step; ++a) {
          double* to = means + (tap / s + a) * width + tap % s;
          for (int b = 0; b < step; ++b) to[b] += std::fabs(w) / (step * step);
        }
      }
      for (int place = 0; place < height * width; ++place) {
        sums[place] += means[place];
        share_square += means[place] * means[place];
        product += means[place] * row_share[place / width] * column_share[place % width];
      }
    }
    double sum = 0, rows[kBoundRows] = {}, columns[kBoundColumns] = {};
    for (int place = 0; place < height * width; ++place) {
      sum += sums[place];
      rows[place / width] += sums[place];
      columns[place % width] += sums[place];
    }
    if (sum == 0) continue;  // exact, whatever it is multiplied by
    any = true;
    const double size = std::sqrt(square / channels), own = sum / count / size;
    regular = size >= kLeastWeight && size < 1e25;  // false for NaN
    const double places = double(channels) * height * width;
    double variance = (share_square / (size * size) - 2 * own * product / size) / places +
                      own * own * shares / (height * width);
    if (error.grey) {
      double grey = 0;
      for (int place = 0; place < height * width; ++place) {
        const double share = row_share[place / width] * column_share[place % width];
        const double more = sums[place] / size - own * channels * share;
        grey += more * more / places;
      }
      if (grey > variance) variance = grey;
    }
    const auto lower = [](double& least, double value) {
      if (value < least) least = value;
    };
    if (variance > spread) spread = variance;
    lower(mean, own);
    for (int tap = 0; tap < taps && tap < kBoundTaps && step == 1; ++tap) {
      lower(tap_part[tap], 2 * sums[tap] * taps / sum);
    }
    for (int i = 0; i < height; ++i) lower(row_part[i], 4 * rows[i] * r / (sum * row_share[i]));
    for (int j = 0; j < width; ++j) {
      lower(column_part[j], 4 * columns[j] * s / (sum * column_share[j]));
    }
  }
  if (!regular || !any) return bound;
  const double tile = error.kappa / (kBoundPart * (16 + count / 8));
  const double deviations = error.deviations * std::sqrt(spread);
  double all = 0;
  for (int i = 0; i < height; ++i) {
    row_part[i] *= row_share[i];
    bound.rows[i] = static_cast<float>(mean * row_part[i]);
  }
  for (int j = 0; j < width; ++j) {
    column_part[j] *= column_share[j];
    bound.columns[j] = static_cast<float>(column_part[j]);
  }
  for (int place = 0; place < height * width; ++place) {
    double part = row_part[place / width] * column_part[place % width];
    if (step == 1 && place < kBoundTaps) {
      if (channels >= kBoundChannels) part = tap_part[place];
      bound.taps[place] = static_cast<float>(mean * part);
    }
    all += mean * part;
  }
  all *= std::sqrt(error.usual * channels / (height * width));  // by the root of e(window)
  const double most = tile * std::sqrt(error.tile_part);
  const double needed = error.squares ? std::hypot(deviations, most) : deviations + most;
  bound.fits = all > needed;
  bound.tile = static_cast<float>(tile * tile);
  bound.spread = static_cast<float>(deviations * deviations);
  return bound;
}

}  // namespace cnn_engine::cpu::fused
