// The direct method where many kernel offsets lie outside the image, as those of large dilations
// do: each output is summed over the kernel offsets inside it alone, and nothing is written out
// with a border.
//
// A row of outputs is cut where a column of kernel offsets enters or leaves the image. Included
// only by files that are compiled once for each instruction set.
#pragma once

#include <vector>

#include "cpu/conv2d_nhwc_direct.h"
#include "ops/window.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Kernel offsets [begin, end) of `count` along an axis that lie inside an image of `size`, of which
// the first is at `start`.
struct KernelOffsetsOfAxis {
  int begin, end;

  KernelOffsetsOfAxis(int start, int count, int dilation, int size)
      : begin((first_inside(start, dilation) - start) / dilation),
        end((end_inside(start, count, dilation, size) - start + dilation - 1) / dilation) {
    if (end < begin) end = begin;
  }
  bool operator==(const KernelOffsetsOfAxis& other) const {
    return begin == other.begin && end == other.end;
  }
};

inline KernelOffsetsOfAxis rows_of(const Conv2dShape& p, int i) {
  return {i * p.stride_h - p.pad_top, p.r, p.dilation_h, p.h};
}

// Outputs of a row that have the same columns of kernel offsets inside the image.
struct TrimmedRun {
  int first, count;
  KernelOffsetsOfAxis kernel_offsets;
};

inline std::vector<TrimmedRun> trimmed_runs(const Conv2dShape& p) {
  std::vector<TrimmedRun> runs;
  for (int j = 0; j < p.out_w(); ++j) {
    const KernelOffsetsOfAxis kernel_offsets(j * p.stride_w - p.pad_left, p.s, p.dilation_w, p.w);
    if (runs.empty() || !(runs.back().kernel_offsets == kernel_offsets))
      runs.push_back({j, 0, kernel_offsets});
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
    columns += whole(run.count) * (run.kernel_offsets.end - run.kernel_offsets.begin);
  }
  const std::int64_t made = rows * columns, all = out_h * whole(out_w) * p.r * p.s;
  const Bands bands(p, p.c, 1, false, 1);
  const std::int64_t copied = std::int64_t{bands.in_rows} * bands.width * p.c;
  const std::int64_t macs = std::int64_t{bands.rows} * out_w * p.filter_size() * p.k;
  return 5 * made < 4 * all || (kCopied * copied > macs && 10 * made <= 11 * all);
}

// Floats of scratch memory: of a run's kernel offsets, where they read and their weights.
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
  // Rows of a task, of which what the same kernel offsets read stays in the second-level cache.
  const std::int64_t most = kLargeBandFloats / (row * p.r);
  const bool by_filters = std::int64_t{p.filter_size()} * p.k > std::int64_t{p.n} * p.h * p.w * p.c;
  const TaskSplit split(out_h, most < kLeastRows ? kLeastRows : most, kLeastRows, filters,
                        by_filters, threads, p.n);
  const int shares = split.shares;
  const std::int64_t tasks = p.n * split.tasks * shares;
  const std::int64_t cost =
      std::int64_t{out_h} * out_w * p.filter_size() * p.k / (split.tasks * shares);
  const KernelOffsets<Lane> offsets(p, false);
  const std::vector<TrimmedRun> runs = trimmed_runs(p);
  parallel_for(tasks, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    auto* const kernel_offsets = reinterpret_cast<std::int64_t*>(part.data());
    std::int64_t* const positions = kernel_offsets + offsets.count;
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t task = index / shares % split.tasks, n = index / shares / split.tasks;
      const int share = static_cast<int>(index % shares);
      const int from = share_begin(filters, share, shares);
      const int to = share_begin(filters, share + 1, shares);
      const int first = static_cast<int>(split.first(task));
      const int last = static_cast<int>(split.first(task + 1));
      const std::int64_t position = (n * out_h + first) * out_w;
      for (int g = 0; g < p.groups; ++g) {
        Gemm gemm{nullptr, offsets.count, offsets.parts(), p.stride_w * pitch,
                  nullptr, filters,       call.pitches.y,  call.pitches.residual};
        gemm.weights = call.packed + g * filter_groups(filters) * gemm.group_size();
        const int at = g * filters;
        const float* image = call.input + n * p.h * row + std::int64_t{g} * channels;
        float* y = call.output + position * call.pitches.y + at;
        const float* residual =
            call.residual ? call.residual + position * call.pitches.residual + at : nullptr;
        multiply_runs(gemm, from, to, call.last.at(at), nullptr, [&](const auto& body) {
          for (int i = first; i < last; ++i) {
            const KernelOffsetsOfAxis rows = rows_of(p, i);
            for (const TrimmedRun& run : runs) {
              int count = 0;
              for (int r = rows.begin; r < rows.end; ++r) {
                for (int s = run.kernel_offsets.begin; s < run.kernel_offsets.end; ++s, ++count) {
                  kernel_offsets[count] = r * p.dilation_h * row + s * p.dilation_w * pitch;
                  positions[count] = r * p.s + s;
                }
              }
              const std::int64_t out = std::int64_t{i - first} * out_w + run.first;
              const std::int64_t corner =
                  (std::int64_t{i} * p.stride_h - p.pad_top) * row +
                  (std::int64_t{run.first} * p.stride_w - p.pad_left) * pitch;
              const KernelOffsetsInside inside{kernel_offsets, positions, count};
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
