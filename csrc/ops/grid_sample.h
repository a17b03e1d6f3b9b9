// grid_sample: y[n,c,o] = sum over the pixels p around position o of w[n,o,p] * x[n,c,p], with
// positions and weights from a grid: nearest, linear or cubic in each of 1 to 3 dimensions. A
// grid's last dimension is a position, coordinates in the reverse order of x's dimensions; -1 and 1
// are the ends of the image: the centres of its outermost pixels with `align_corners`, else their
// outer edges. What is no number is outside of the image. Of pixels without weight nothing is read.
//
// Layouts: x [N,C,D,H,W], dimensions from the front being 1 where there are fewer; grid [N,O,rank];
// y [N,C,O]; float32, C-contiguous. Coordinates are computed in float64, as whether a pixel counts
// may hang on their last bit.
#pragma once

#include "runtime/shape.h"
#include "runtime/stream.h"

namespace cnn_engine {

enum class GridMode { nearest, linear, cubic };
enum class GridPadding { zeros, border, reflection };

inline const char* name_of(GridMode mode) {
  constexpr const char* kNames[] = {"nearest", "linear", "cubic"};
  return static_cast<int>(mode) < 3 ? kNames[static_cast<int>(mode)] : nullptr;
}
inline const char* name_of(GridPadding padding) {
  constexpr const char* kNames[] = {"zeros", "border", "reflection"};
  return static_cast<int>(padding) < 3 ? kNames[static_cast<int>(padding)] : nullptr;
}

// The pixels of one dimension that count for a position, and their weights: 0 outside of the image.
struct GridPixels {
  int at[4];
  float weight[4];
};

struct GridSampleShape {
  int images, channels;
  int sizes[3];   // D, H, W
  int rank;       // dimensions of the image, the last ones
  int positions;  // O, per image
  GridMode mode;
  GridPadding padding;
  bool align_corners;

  // Pixels that count in each dimension.
  CNN_ENGINE_INLINE int taps() const {
    return mode == GridMode::nearest ? 1 : mode == GridMode::linear ? 2 : 4;
  }
  CNN_ENGINE_INLINE std::int64_t plane() const {
    return std::int64_t{sizes[0]} * sizes[1] * sizes[2];
  }

  // Mirrored at the ends until it lies between them.
  static CNN_ENGINE_INLINE double reflected(double at, double low, double high) {
    const double span = high - low;
    if (span <= 0.0) return low;
    const double turns = 2.0 * span, moved = at - low;
    const double rest = moved - __builtin_floor(moved / turns) * turns;
    return low + (rest > span ? turns - rest : rest);
  }

  CNN_ENGINE_INLINE GridPixels pixels(float coordinate, int size) const {
    const double g = coordinate;
    double low = -0.5, high = size - 0.5, at = ((g + 1.0) * size - 1.0) / 2.0;
    if (align_corners) {
      low = 0.0, high = size - 1.0, at = (g + 1.0) / 2.0 * (size - 1.0);
    }
    constexpr double kFar = 1099511627776.0;  // 2^40
    if (!(__builtin_fabs(at) < __builtin_inf())) at = -4.0;
    at = at < -kFar ? -kFar : at > kFar ? kFar : at;
    if (mode == GridMode::nearest) at = __builtin_rint(at);
    const double last = size - 1.0;
    if (padding == GridPadding::border && mode != GridMode::cubic) {
      at = at < 0.0 ? 0.0 : at > last ? last : at;
    } else if (padding == GridPadding::reflection && (at < low || at > high)) {
      at = reflected(at, low, high);
    }
    GridPixels found{};
    double first = mode == GridMode::nearest ? __builtin_rint(at) : __builtin_floor(at);
    const double t = at - first;
    double weights[4] = {1.0, 0.0, 0.0, 0.0};
    if (mode == GridMode::linear) {
      weights[0] = 1.0 - t, weights[1] = t;
    } else if (mode == GridMode::cubic) {
      constexpr double a = -0.75;
      const double u = 1.0 - t, v = 1.0 + t, w = 2.0 - t;
      weights[0] = ((a * v - 5.0 * a) * v + 8.0 * a) * v - 4.0 * a;
      weights[1] = ((a + 2.0) * t - (a + 3.0)) * t * t + 1.0;
      weights[2] = ((a + 2.0) * u - (a + 3.0)) * u * u + 1.0;
      weights[3] = ((a * w - 5.0 * a) * w + 8.0 * a) * w - 4.0 * a;
      first -= 1.0;
    }
    for (int i = 0; i < taps(); ++i) {
      double pixel = first + i;
      if (padding == GridPadding::border) {
        pixel = pixel < 0.0 ? 0.0 : pixel > last ? last : pixel;
      } else if (padding == GridPadding::reflection && (pixel < low || pixel > high)) {
        pixel = __builtin_trunc(reflected(pixel, low, high));
      }
      const bool inside = pixel >= 0.0 && pixel <= last;
      found.at[i] = inside ? static_cast<int>(pixel) : 0;
      found.weight[i] = inside ? static_cast<float>(weights[i]) : 0.0f;
    }
    return found;
  }

  void validate() const {
    require_at_least("images", images, 0);
    require_at_least("channels", channels, 0);
    require_at_least("positions", positions, 0);
    for (const int size : sizes) require_at_least("size", size, 1);
    if (rank < 1 || rank > 3 || (mode == GridMode::cubic && rank > 2)) {
      throw std::invalid_argument("rank: expected 1 to 3, or 2 for cubic, found " +
                                  std::to_string(rank));
    }
    require_indexable("x", sizes[0], sizes[1], sizes[2]);
  }
};

namespace cpu {
void grid_sample(const float* input,  // [N, C, D, H, W]
                 const float* grid,   // [N, O, rank]
                 float* output,       // [N, C, O]
                 const GridSampleShape& shape, int threads);
}
namespace cuda {
void grid_sample(const float* input,  // [N, C, D, H, W]
                 const float* grid,   // [N, O, rank]
                 float* output,       // [N, C, O]
                 const GridSampleShape& shape, Stream stream);
}
}  // namespace cnn_engine
