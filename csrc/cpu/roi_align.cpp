// roi_align on the CPU: bins are the tasks; pixels and weights of some of a bin's samples are
// tabled once, then read for one channel after another.
#include "ops/roi_align.h"

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr int kRoiSamples = 1024;  // of a table

struct RoiSample {
  int offset[4];
  float weight[4];
};

// Of one dimension: the two pixels around a position and the second's weight; false outside.
bool roi_pixels(double at, int size, int (&pixel)[2], double& second) {
  if (!(at >= -1.0 && at <= size)) return false;
  const double held = at < 0.0 ? 0.0 : at > size - 1 ? size - 1.0 : at;
  pixel[0] = static_cast<int>(held);
  pixel[1] = pixel[0] + 1 < size ? pixel[0] + 1 : pixel[0];
  second = held - pixel[0];
  return true;
}

struct Region {
  double left, top, bin_width, bin_height;
  int down, across;  // samples of a bin

  Region(const RoiAlignShape& p, const float* roi) {
    const double less = p.half_pixel ? 0.5 : 0.0;
    left = roi[0] * p.scale - less;
    top = roi[1] * p.scale - less;
    double width = roi[2] * p.scale - less - left, height = roi[3] * p.scale - less - top;
    if (!p.half_pixel) {
      width = width < 1.0 ? 1.0 : width;
      height = height < 1.0 ? 1.0 : height;
    }
    bin_width = width / p.columns;
    bin_height = height / p.rows;
    const auto count_of = [&](double size) {
      const double up = __builtin_ceil(size);
      return p.samples > 0 ? p.samples : up > 0.0 ? static_cast<int>(up) : 0;
    };
    down = count_of(bin_height);
    across = count_of(bin_width);
  }

  RoiSample sample(const RoiAlignShape& p, int bin, std::int64_t index) const {
    RoiSample found{};
    const double y =
        top + bin / p.columns * bin_height + (index / across + 0.5) * bin_height / down;
    const double x =
        left + bin % p.columns * bin_width + (index % across + 0.5) * bin_width / across;
    int row[2], column[2];
    double v, u;
    if (!roi_pixels(y, p.height, row, v) || !roi_pixels(x, p.width, column, u)) return found;
    for (int k = 0; k < 4; ++k) {
      found.offset[k] = row[k / 2] * p.width + column[k % 2];
      found.weight[k] = static_cast<float>((k / 2 ? v : 1.0 - v) * (k % 2 ? u : 1.0 - u));
    }
    return found;
  }
};

// Samples of a bin, taken into what others of it gave.
template <bool max>
float read_samples(const float* x, const RoiSample* table, int count, float result) {
  for (int i = 0; i < count; ++i) {
    const RoiSample& s = table[i];
    for (int k = 0; k < 4; ++k) {
      // A pixel without weight does not count: it may be an infinity.
      const float part = s.weight[k] != 0.0f ? s.weight[k] * x[s.offset[k]] : 0.0f;
      result = !max ? result + part : result > part ? result : part;
    }
  }
  return result;
}

template <bool max>
void pool_region(const RoiAlignShape& p, const Region& region, const float* x, float* y) {
  RoiSample table[kRoiSamples];
  const int bins = p.rows * p.columns;
  const std::int64_t plane = std::int64_t{p.height} * p.width;
  const std::int64_t samples = std::int64_t{region.down} * region.across;
  if (samples == 0) {
    for (std::int64_t i = 0; i < std::int64_t{p.channels} * bins; ++i) y[i] = 0.0f;
    return;
  }
  // Several bins at a time, or parts of one that has too many samples.
  const int each = static_cast<int>(samples < kRoiSamples ? samples : kRoiSamples);
  const int together = kRoiSamples / each;
  const float start = max ? -std::numeric_limits<float>::infinity() : 0.0f;
  const float inverse = 1.0f / static_cast<float>(samples);
  for (int bin = 0; bin < bins; bin += together) {
    const int some = bins - bin < together ? bins - bin : together;
    for (std::int64_t at = 0; at < samples; at += each) {
      const int count = static_cast<int>(samples - at < each ? samples - at : each);
      for (int b = 0; b < some; ++b) {
        for (int i = 0; i < count; ++i) table[b * count + i] = region.sample(p, bin + b, at + i);
      }
      const bool first = at == 0, last = at + count == samples;
      for (int c = 0; c < p.channels; ++c) {
        float* to = y + std::int64_t{c} * bins + bin;
        for (int b = 0; b < some; ++b) {
          const float result =
              read_samples<max>(x + c * plane, table + b * count, count, first ? start : to[b]);
          to[b] = last && !max ? result * inverse : result;
        }
      }
    }
  }
}

}  // namespace

void roi_align(const float* input, const float* rois, const std::int64_t* images, float* output,
               const RoiAlignShape& shape, int threads) {
  const RoiAlignShape p = shape;
  const std::int64_t plane = std::int64_t{p.height} * p.width;
  const std::int64_t size = std::int64_t{p.channels} * p.rows * p.columns;
  const int side = p.samples > 0 ? p.samples : 2;
  parallel_for(p.rois, size * side * side * 4, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      const Region region(p, rois + index * 4);
      const float* x = input + images[index] * p.channels * plane;
      float* y = output + index * size;
      if (p.max) {
        pool_region<true>(p, region, x, y);
      } else {
        pool_region<false>(p, region, x, y);
      }
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
