// The direct method where many taps lie outside the image, as those of large dilations do: each
// output is summed over the taps inside it alone, and nothing is written out with a border.
//
// A row of outputs is cut where a column of taps enters or leaves the image. Included only by files
// that are compiled once for each instruction set.
#pragma once

#include "cpu/conv2d_nhwc_direct.h"
#include "ops/window.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Outputs of a row that have the same columns of taps inside the image.
struct TrimmedRun {
  int first, count;  // of outputs
  int begin, end;    // of taps

  // The run from output j on.
  TrimmedRun(const Conv2dShape& p, int j) : first(j) {
    const auto taps_of = [&](int output) {
      const int left = output * p.stride_w - p.pad_left;
      begin = (first_inside(left, p.dilation_w) - left) / p.dilation_w;
      const int last = end_inside(left, p.s, p.dilation_w, p.w);
      end = last > left ? (last - left + p.dilation_w - 1) / p.dilation_w : 0;
      if (end < begin) end = begin;
    };
    taps_of(j);
    const int own_begin = begin, own_end = end, out_w = p.out_w();
    while (++j < out_w) {
      taps_of(j);
      if (begin != own_begin || end != own_end) break;
    }
    begin = own_begin;
    end = own_end;
    count = j - first;
  }
};

// Rows of taps of output row i inside the image.
struct TrimmedRows {
  int begin, end;

  TrimmedRows(const Conv2dShape& p, int i) {
    const int top = i * p.stride_h - p.pad_top;
    begin = (first_inside(top, p.dilation_h) - top) / p.dilation_h;
    const int last = end_inside(top, p.r, p.dilation_h, p.h);
    end = last > top ? (last - top + p.dilation_h - 1) / p.dilation_h : 0;
    if (end < begin) end = begin;
  }
};

// Whether enough products are left out to pay for shorter runs, each of which is some whole tiles.
inline bool is_trimmed(const Conv2dShape& p) {
  constexpr std::int64_t kTile = 6;  // outputs
  if (!is_padded(p)) return false;
  const int out_h = p.out_h(), out_w = p.out_w();
  const auto whole = [](int count) {
    return (count + kTile - 1) / kTile * kTile;
  };
  std::int64_t rows = 0, columns = 0;
  for (int i = 0; i < out_h; ++i) {
    const TrimmedRows taps(p, i);
    rows += taps.end - taps.begin;
  }
  for (int j = 0; j < out_w;) {
    const TrimmedRun run(p, j);
    columns += whole(run.count) * (run.end - run.begin);
    j += run.count;
  }
  return 5 * rows * columns < 4 * out_h * whole(out_w) * p.r * p.s;
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
            const TrimmedRows rows(p, i);
            for (int j = 0; j < out_w;) {
              const TrimmedRun run(p, j);
              int count = 0;
              for (int r = rows.begin; r < rows.end; ++r) {
                for (int s = run.begin; s < run.end; ++s, ++count) {
                  taps[count] = r * p.dilation_h * row + s * p.dilation_w * pitch;
                  places[count] = r * p.s + s;
                }
              }
              const std::int64_t out = std::int64_t{i - first} * out_w + j;
              const std::int64_t corner = (std::int64_t{i} * p.stride_h - p.pad_top) * row +
                                          (std::int64_t{j} * p.stride_w - p.pad_left) * pitch;
              const TapsInside inside{taps, places, count};
              body(image + corner, y + out * call.pitches.y,
                   residual ? residual + out * call.pitches.residual : nullptr, run.count, &inside);
              j += run.count;
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
