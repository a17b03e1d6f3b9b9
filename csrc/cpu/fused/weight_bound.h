// What window_bound.h needs to know of weights.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "runtime/shape.h"

namespace cnn_engine::cpu::fused {

constexpr int kBoundRows = 16, kBoundColumns = 8, kBoundKernelOffsets = 25;
// Channels from which each kernel offset has a mean of its own; of fewer, each row and column of
// kernel offsets.
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
  float fits;          // 0: the weights are not for Winograd, whatever the values are
  float tile, spread;  // factors of e(tile), squared, and of e(window)
  float kernel_offsets[kBoundKernelOffsets];  // factors of l(x) by kernel offset, where there are
                                              // so few
  float rows[kBoundRows];  // the same of a row of kernel offsets and of a column: their product
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
  bool grey = false;     // channels are alike, so that deviations of a position's weights add up
};

// Of weights [filters, channels, r, s]. The error of a pooled output is within the largest bound of
// its four windows, which is at least their mean: that of a window of one row and column more, with
// the mean of four positions of |w|.
CNN_ENGINE_INLINE WindowBound window_bound(const float* weight, int filters, int channels, int r,
                                           int s, const TileError& error) {
  WindowBound bound{};
  const int kernel_offsets = r * s, step = error.step;
  const int height = r + step - 1, width = s + step - 1;
  const double count = double(channels) * kernel_offsets;
  double spread = 0, mean = 1, kernel_offset_part[kBoundKernelOffsets], row_part[kBoundRows],
         column_part[kBoundColumns];
  for (double& part : kernel_offset_part) part = 1;
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
  for (int k = 0; k < filters && regular; ++k, weight += std::int64_t{channels} * kernel_offsets) {
    double sums[kBoundRows * kBoundColumns] = {}, square = 0, share_square = 0, product = 0;
    for (int c = 0; c < channels; ++c) {
      double means[kBoundRows * kBoundColumns] = {};
      for (int kernel_offset = 0; kernel_offset < kernel_offsets; ++kernel_offset) {
        const double w = weight[std::int64_t{c} * kernel_offsets + kernel_offset];
        square += w * w;
        for (int a = 0; a < step; ++a) {
          double* to = means + (kernel_offset / s + a) * width + kernel_offset % s;
          for (int b = 0; b < step; ++b) to[b] += std::fabs(w) / (step * step);
        }
      }
      for (int position = 0; position < height * width; ++position) {
        sums[position] += means[position];
        share_square += means[position] * means[position];
        product += means[position] * row_share[position / width] * column_share[position % width];
      }
    }
    double sum = 0, rows[kBoundRows] = {}, columns[kBoundColumns] = {};
    for (int position = 0; position < height * width; ++position) {
      sum += sums[position];
      rows[position / width] += sums[position];
      columns[position % width] += sums[position];
    }
    if (sum == 0) continue;  // exact, whatever it is multiplied by
    any = true;
    const double size = std::sqrt(square / channels), own = sum / count / size;
    regular = size >= kLeastWeight && size < 1e25;  // false for NaN
    const double positions = double(channels) * height * width;
    double variance = (share_square / (size * size) - 2 * own * product / size) / positions +
                      own * own * shares / (height * width);
    if (error.grey) {
      double grey = 0;
      for (int position = 0; position < height * width; ++position) {
        const double share = row_share[position / width] * column_share[position % width];
        const double more = sums[position] / size - own * channels * share;
        grey += more * more / positions;
      }
      if (grey > variance) variance = grey;
    }
    const auto lower = [](double& least, double value) {
      if (value < least) least = value;
    };
    if (variance > spread) spread = variance;
    lower(mean, own);
    for (int kernel_offset = 0;
         kernel_offset < kernel_offsets && kernel_offset < kBoundKernelOffsets && step == 1;
         ++kernel_offset) {
      lower(kernel_offset_part[kernel_offset], 2 * sums[kernel_offset] * kernel_offsets / sum);
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
  for (int position = 0; position < height * width; ++position) {
    double part = row_part[position / width] * column_part[position % width];
    if (step == 1 && position < kBoundKernelOffsets) {
      if (channels >= kBoundChannels) part = kernel_offset_part[position];
      bound.kernel_offsets[position] = static_cast<float>(mean * part);
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
