// The direct method where many taps lie outside the image, as those of large dilations do: each
// output is summed over the taps inside it alone, and nothing is written out with a border.
//
// A row of outputs is cut where a column of taps enters or leaves the image. Included only by files
// that are compiled once for each instruction set.
#pragma once

#include <vector>

#include "cpu/conv2d_nhwc_direct.h"
#include "ops/window.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Taps [begin, end) of `count` along an axis that lie inside an image of `size`, of which the first
// is at `start`.
struct TapsOfAxis {
  int begin, end;

  TapsOfAxis(int start, int count, int dilation, int size)
      : begin((first_inside(start, dilation) - start) / dilation),
        end((end_inside(start, count, dilation, size) - start + dilation - 1) / dilation) {
    if (end < begin) end = begin;
  }
  bool operator==(const TapsOfAxis& other) const {
    return begin == other.begin && end == other.end;
  }
};

inline TapsOfAxis rows_of(const Conv2dShape& p, int i) {
  return {i * p.stride_h - p.pad_top, p.r, p.dilation_h, p.h};
}

// Outputs of a row that have the same columns of taps inside the image.
struct TrimmedRun {
  int first, count;
  TapsOfAxis taps;
};

inline std::vector<TrimmedRun> trimmed_runs(const Conv2dShape& p) {
  std::vector<TrimmedRun> runs;
  for (int j = 0; j < p.out_w(); ++j) {
    const TapsOfAxis taps(j * p.stride_w - p.pad_left, p.s, p.dilation_w, p.w);
    if (runs.empty() || !(runs.back().taps == taps)) runs.push_back({j, 0, taps});
    ++runs.back().count;
  }
  return runs;
}

// Whether enough products are left out to pay for shorter runs; or hardly more are made, and copies
// of bands would take as long as many products: a band of few rows has most of its input in common
// with the next.
inline bool is_trimmed(const Conv2dShape& p) {
  constexpr std::int64_t kCopied = 64;  // products that take as long as copying a float, or less
  if (!is_padded(p)) return false;
  const int out_h = p.out_h(), out_w = p.out_w();
  // Outputs of a run's tiles, which are hardly fewer for fewer outputs than a tile's.
  const auto whole = [](int count) -> std::int64_t {
    return count < 4 ? 4 : (count + 1) / 2 * 2;
  };
  std::int64_t rows = 0, columns = 0;
  for (int i = 0; i < out_h; ++i) rows += rows_of(p, i).end - rows_of(p, i).begin;
  for (const TrimmedRun& run : trimmed_runs(p)) {
    columns += whole(run.count) * (run.taps.end - run.taps.begin);
  }
  const std::int64_t made = rows * columns, all = out_h * whole(out_w) * p.r * p.s;
  const Bands bands(p, p.c, false, 1);
  const std::int64_t copied = std::int64_t{bands.in_rows} * bands.width * p.c;
  const std::int64_t products = std::int64_t{bands.rows} * out_w * p.taps() * p.k;
  return 5 * made < 4 * all || (kCopied * copied > products && 10 * made <= 11 * all);
}

// Floats of scratch memory: of a run's taps, where they read and their weights.
inline std::int64_t trimmed_scratch(const Conv2dShape& p) {
  return (std::int64_t{4} * p.r * p.s + 15) / 16 * 16;
}

template <typename Call>
void trimmed(const Call& call, const Scratch& scratch, const Conv2dShape& p, int threads) {
  using Lane = typename Call::Lane;
  constexpr int kLeastRows = 2;
  const int out_h = p.out_h(), out_w = p.out_w();
  const int channels = p.group_channels(), filters = p.group_filters();
  const std::int64_t pitch = call.pitches.x, row = p.w * pitch;
  // Rows of a task, of which what the same taps read stays in the second-level cache.
  const std::int64_t most = kLargeBandFloats / (row * p.r);
  const bool by_filters = std::int64_t{p.taps()} * p.k > std::int64_t{p.n} * p.h * p.w * p.c;
  const TaskSplit split(out_h, most < kLeastRows ? kLeastRows : most, kLeastRows, filters,
                        by_filters, threads, p.n);
  const int shares = split.shares;
  const std::int64_t tasks = p.n * split.tasks * shares;
  const std::int64_t cost = std::int64_t{out_h} * out_w * p.taps() * p.k / (split.tasks * shares);
  const Taps<Lane> sums(p, false);
  const std::vector<TrimmedRun> runs = trimmed_runs(p);
  parallel_for(tasks, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    auto* const taps = reinterpret_cast<std::int64_t*>(part.data());
    std::int64_t* const places = taps + sums.count;
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t task = index / shares % split.tasks, n = index / shares / split.tasks;
      const int share = static_cast<int>(index % shares);
      const int from = share_begin(filters, share, shares);
      const int to = share_begin(filters, share + 1, shares);
      const int first = static_cast<int>(split.first(task));
      const int last = static_cast<int>(split.first(task + 1));
      const std::int64_t place = (n * out_h + first) * out_w;
      for (int g = 0; g < p.groups; ++g) {
        Product product{nullptr, sums.count, sums.parts(),   p.stride_w * pitch,
                        nullptr, filters,    call.pitches.y, call.pitches.residual};
        product.weights = call.packed + g * filter_groups(filters) * product.group_size();
        const int at = g * filters;
        const float* image = call.input + n * p.h * row + std::int64_t{g} * channels;
        float* y = call.output + place * call.pitches.y + at;
        const float* residual =
            call.residual ? call.residual + place * call.pitches.residual + at : nullptr;
        multiply_runs(product, from, to, call.last.at(at), nullptr, [&](const auto& body) {
          for (int i = first; i < last; ++i) {
            const TapsOfAxis rows = rows_of(p, i);
            for (const TrimmedRun& run : runs) {
              int count = 0;
              for (int r = rows.begin; r < rows.end; ++r) {
                for (int s = run.taps.begin; s < run.taps.end; ++s, ++count) {
                  taps[count] = r * p.dilation_h * row + s * p.dilation_w * pitch;
                  places[count] = r * p.s + s;
                }
              }
              const std::int64_t out = std::int64_t{i - first} * out_w + run.first;
              const std::int64_t corner =
                  (std::int64_t{i} * p.stride_h - p.pad_top) * row +
                  (std::int64_t{run.first} * p.stride_w - p.pad_left) * pitch;
              const TapsInside inside{taps, places, count};
              body(image + corner, y + out * call.pitches.y,
                   residual ? residual + out * call.pitches.residual : nullptr, run.count, &inside);
            }
          }
        });
        call.activation.apply(y + from, call.pitches.y, std::int64_t{last - first} * out_w,
                              to - from);
      }
    }
  });
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
