// conv2d_nhwc with one channel a group: filters on SIMD lanes. Where a group has several filters,
// some rows of the image are first written out with each channel as often as it has filters.
// Groups of a few channels and as many filters go the same way: lanes are exchanged within groups,
// once for each channel of a group.
//
// Several outputs of a row are summed together in registers: an input is loaded once for all of
// them that read it, and so are the weights of a row of kernel offsets. Rows of kernel offsets
// outside the image are left out; columns outside it are read from a row of zeros. Where the
// channels or the columns are no whole number of blocks, the last block begins earlier and writes
// some outputs again. Included only by files that are compiled once for each instruction set.
#pragma once

#include <algorithm>

#include "cpu/channels.h"
#include "cpu/nhwc.h"
#include "ops/conv2d_nhwc.h"
#include "ops/window.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

// A row of outputs, for the channels [0, channels) that the pointers are at.
struct DepthwiseRow {
  const float* input;     // of the image's row of the first kernel offset inside it
  const float* weights;   // of that kernel offset's row
  const float* bias;      // or null
  const float* residual;  // or null
  const float* zeros;     // as many as there are channels
  float* output;
  std::int64_t row, position, weight;               // floats from one to the next
  std::int64_t output_position, residual_position;  // the same, of a row's outputs
  int channels, rows, columns,
      width;  // rows of kernel offsets inside; kernel offsets of a row; of the image
  int stride, dilation, pad;
  int group;  // channels of a group
  Epilogue epilogue;
};

// Makes all outputs of a row. `table`: room for the positions of a block's columns.
using DepthwiseRowFunction = void (*)(const DepthwiseRow&, int outputs, const float** table);
DepthwiseRowFunction depthwise_row_of(const Conv2dShape& shape);

namespace {

// Outputs of a row at once: the sizes of most networks' maps are multiples of 7, and 7 sums, 5
// weights and an input fit 16 registers; twice as many sums fit 32.
constexpr int kDepthwiseColumns = kRegisters == 32 ? 14 : 7;

// Channels for each position of an image from which the expansion before, by six as in most
// networks, has more weights than what it reads and writes.
constexpr int kChannelsPerPosition = 7;

// Whether a thread takes some channels of all rows, rather than some rows.
inline bool by_channels(const Conv2dShape& p) { return p.k > kChannelsPerPosition * p.h * p.w; }

// Bands of an image's output rows, and shares of its channels, which are the same for any number of
// threads: what three rows of a share take stays in the first-level cache while a band is computed.
// Bands come before shares, so that a thread finds the rows that it wrote itself; with so many
// channels for so few positions that the convolution before was shared out by filters, there is
// one.
struct DepthwiseSplit {
  int bands, shares;

  DepthwiseSplit(const Conv2dShape& p, int threads) {
    const int out_h = p.out_h(), wanted = (32 + out_h - 1) / out_h;
    const int most = p.k < 64 ? 1 : p.k / 64;
    shares = wanted < most && p.k == p.c ? wanted : most;
    const int parts = threads == 1 ? 1 : (4 * threads + p.n - 1) / p.n;
    bands = by_channels(p) ? 1 : parts < out_h ? parts : out_h;
    if (by_channels(p) && parts > shares) shares = parts < most ? parts : most;
  }
  // The first filter of a share, or of the one past the last.
  int first(const Conv2dShape& p, int share) const {
    return share == shares ? p.k
                           : static_cast<int>(std::int64_t{p.k} * share / shares / kWide * kWide);
  }
};

inline std::int64_t depthwise_packed(const Conv2dShape& p) {
  return std::int64_t{p.r} * p.group_channels() * p.s * p.k;
}

inline void depthwise_pack(const float* weight,  // [K, C / groups, R, S]
                           float* packed,        // [R, C / groups, S, K]
                           const Conv2dShape& p) {
  const int channels = p.group_channels(), area = p.r * p.s;
  for (int r = 0; r < p.r; ++r) {
    for (int c = 0; c < channels; ++c) {
      for (int s = 0; s < p.s; ++s, packed += p.k) {
        const float* from = weight + std::int64_t{c} * area + r * p.s + s;
        for (int k = 0; k < p.k; ++k) packed[k] = from[std::int64_t{k} * channels * area];
      }
    }
  }
}

// Whether there is a kernel of so many columns, which reads the positions of a block from a table.
inline bool has_table(const Conv2dShape& p) {
  return p.dilation_w == 1 && p.stride_w <= 2 && (p.s == 3 || p.s == 5 || p.s == 7);
}

// Whether groups of several channels and as many filters go this way: vectors hold whole ones, and
// it is faster than their sums one after the other, which it is for more channels where a row of
// kernel offsets is in registers and where a vector's lanes are exchanged by one instruction.
inline bool has_lanes_of_groups(const Conv2dShape& p) {
  const int group = p.group_channels(), most = has_table(p) && p.s == 3 ? kNarrow : kNarrow / 2;
  const bool exchanged = kNarrow > 4;
  return group == p.group_filters() && kNarrow % group == 0 && p.k >= kNarrow &&
         group <= (exchanged ? most : most / 2);
}

constexpr std::int64_t in_lines(std::int64_t floats) { return (floats + 15) / 16 * 16; }

// Floats of the image's rows that are written out at once: they stay in the second-level cache.
// More where that would be few rows beside those that the next ones read again.
constexpr std::int64_t kSpreadFloats = 48 << 10;
// Kernel offsets from which rows are written out with their border: most outputs read some of it.
constexpr int kBorderedKernelOffsets = 25;

// Rows of the image of one share that are written out: with a border, or with each channel as often
// as it has filters.
struct Spread {
  int rows = 0;             // of outputs that read them; 0: nothing is written out
  int left = 0, right = 0;  // columns of the border
  std::int64_t floats = 0;

  explicit Spread(const Conv2dShape& p) {
    const bool bordered = !has_table(p) && p.dilation_w == 1 && p.group_channels() == 1 &&
                          p.r * p.s >= kBorderedKernelOffsets;
    if (p.k == p.c && !bordered) return;
    if (bordered) {
      left = p.pad_left;
      right = p.pad_right;
    }
    const DepthwiseSplit split(p, 1);
    const std::int64_t channels = p.k / split.shares + 2 * kWide + 2 * p.group_filters();
    const std::int64_t row = channels * (left + p.w + right);
    const std::int64_t window = std::int64_t{p.dilation_h} * (p.r - 1) + 1;
    const std::int64_t least = 2 * window / p.stride_h + 1;
    const std::int64_t possible = (kSpreadFloats / row - window) / p.stride_h + 1;
    rows = static_cast<int>(std::min(std::max(possible, least), std::int64_t{p.out_h()}));
    const std::int64_t read = (rows - 1) * std::int64_t{p.stride_h} + window;
    floats = in_lines(std::min(read, std::int64_t{p.h}) * row);
  }
};

// Where the rows that Spread says are written, behind zeros and the positions of a block's columns.
inline std::int64_t depthwise_spread(const Conv2dShape& p) {
  const std::int64_t zeros = in_lines(p.k);
  if (!has_table(p)) return zeros;
  const int positions = p.r * ((kDepthwiseColumns - 1) * p.stride_w + p.s);
  return zeros + in_lines(std::int64_t{2} * positions);
}

// Floats of each thread, in whole cache lines.
inline std::int64_t depthwise_scratch(const Conv2dShape& p) {
  return depthwise_spread(p) + Spread(p).floats;
}

// Where the positions of a block's columns are written.
inline const float** depthwise_table(float* scratch, const Conv2dShape& p) {
  return reinterpret_cast<const float**>(scratch + in_lines(p.k));
}

// What all rows of a call have in common; zeros are written to the scratch memory.
inline DepthwiseRow depthwise_rows(float* scratch, const Conv2dShape& p,
                                   const Conv2dPitches& pitches, const Activation& activation) {
  fill_zero(scratch, in_lines(p.k));
  DepthwiseRow d{};
  d.zeros = scratch;
  d.row = std::int64_t{p.w} * pitches.x * p.dilation_h;
  d.position = pitches.x;
  d.weight = p.k;
  d.output_position = pitches.y;
  d.residual_position = pitches.residual;
  d.columns = p.s;
  d.width = p.w;
  d.stride = p.stride_w;
  d.dilation = p.dilation_w;
  d.pad = p.pad_left;
  d.group = p.group_channels();
  d.epilogue = activation.epilogue(nullptr);
  return d;
}

// Sets what a row of outputs reads, of images whose row `first` is at `rows`.
CNN_ENGINE_INLINE void depthwise_at(DepthwiseRow& d, const Conv2dShape& p, int i, const float* rows,
                                    std::int64_t first, const float* packed) {
  const int top = i * p.stride_h - p.pad_top;
  const int y = first_inside(top, p.dilation_h);
  const int y_end = end_inside(top, p.r, p.dilation_h, p.h);
  d.rows = y_end > y ? (y_end - y + p.dilation_h - 1) / p.dilation_h : 0;
  d.input = rows + (y - first) * d.width * d.position;
  d.weights = packed + std::int64_t{(y - top) / p.dilation_h} * d.group * p.s * p.k;
}

// sums[c] = the sum of a row's positions [columns, pitch], in float32 of a few at a time.
inline void sum_row(const float* row, std::int64_t pitch, int columns, int channels, double* sums) {
  constexpr int kTogether = 16;
  for_channels(channels, [&](auto width, int c) {
    constexpr int W = decltype(width)::value;
    typedef double Sum __attribute__((vector_size(W * 8)));
    Sum sum{};
    for (int j = 0; j < columns;) {
      const int end = columns - j < kTogether ? columns : j + kTogether;
      Vec<W> even{}, odd{};
      for (; j + 1 < end; j += 2) {
        even += load<W>(row + j * pitch + c);
        odd += load<W>(row + (j + 1) * pitch + c);
      }
      if (j < end) even += load<W>(row + j++ * pitch + c);
      sum += __builtin_convertvector(even + odd, Sum);
    }
    __builtin_memcpy(sums + c, &sum, sizeof sum);
  });
}

// Writes the channels [first, end) of rows of the image, each as often as it has filters, and zeros
// beside them.
inline void spread_rows(const float* from, std::int64_t pitch, const Conv2dShape& p,
                        const Spread& spread, std::int64_t rows, int first, int end, float* to) {
  const int filters = p.group_filters(), channels = end - first;
  const int position = channels * filters;
  for (std::int64_t i = 0; i < rows; ++i) {
    fill_zero(to, spread.left * position);
    to += std::int64_t{spread.left} * position;
    for (int j = 0; j < p.w; ++j, from += pitch) {
      if (filters == 1) {
        __builtin_memcpy(to, from + first, sizeof(float) * channels);
        to += channels;
      } else if (filters == 2) {
        for (int c = first; c < end; ++c, to += 2) to[0] = to[1] = from[c];
      } else {
        for (int c = first; c < end; ++c) {
          for (int f = 0; f < filters; ++f) *to++ = from[c];
        }
      }
    }
    fill_zero(to, spread.right * position);
    to += std::int64_t{spread.right} * position;
  }
}

// `sums`: where those of y's rows go, [N, OH, K], or null.
inline void depthwise(const float* input, const float* packed, const float* bias,
                      const float* residual, float* output, const Scratch& scratch,
                      const Conv2dShape& p, const Conv2dPitches& pitches,
                      const Activation& activation, int threads, double* sums = nullptr) {
  const int out_h = p.out_h(), out_w = p.out_w(), filters = p.group_filters();
  const DepthwiseSplit split(p, threads);
  const int shares = split.shares;
  const auto run_row = depthwise_row_of(p);
  const Spread spread(p);
  const std::int64_t tasks = std::int64_t{p.n} * split.bands * shares;
  const std::int64_t outputs = std::int64_t{p.n} * p.k * out_h * out_w;
  const std::int64_t cost = outputs / tasks * (p.filter_size() + 4) / kNarrow;
  parallel_for(tasks, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    const float** table = depthwise_table(part.data(), p);
    float* const written = part.data() + depthwise_spread(p);
    DepthwiseRow d = depthwise_rows(part.data(), p, pitches, activation);
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t image = index / (std::int64_t{split.bands} * shares);
      const int band = static_cast<int>(index / shares % split.bands);
      const int share = static_cast<int>(index % shares);
      const int k = split.first(p, share);
      d.channels = split.first(p, share + 1) - k;
      d.bias = bias ? bias + k : nullptr;
      const int first = static_cast<int>(std::int64_t{out_h} * band / split.bands);
      const int last = static_cast<int>(std::int64_t{out_h} * (band + 1) / split.bands);
      const float* rows = input + image * p.h * p.w * pitches.x + k;
      int top = 0;
      for (int i = first; i < last; ++i) {
        if (spread.rows > 0 && (i - first) % spread.rows == 0) {
          const int some = i + spread.rows < last ? spread.rows : last - i;
          const int start = i * p.stride_h - p.pad_top;
          const int under = start + (some - 1) * p.stride_h + p.dilation_h * (p.r - 1) + 1;
          const int c = k / filters, c_end = (k + d.channels + filters - 1) / filters;
          top = start < 0 ? 0 : start;
          const std::int64_t count = (under < p.h ? under : p.h) - top;
          spread_rows(input + (image * p.h + top) * p.w * pitches.x, pitches.x, p, spread, count, c,
                      c_end, written);
          d.position = std::int64_t{c_end - c} * filters;
          d.width = spread.left + p.w + spread.right;
          d.pad = p.pad_left - spread.left;
          d.row = d.width * d.position * p.dilation_h;
          rows = written + (k - c * filters);
        }
        depthwise_at(d, p, i, rows, top, packed + k);
        const std::int64_t row = image * out_h + i, at = row * out_w;
        d.residual = residual ? residual + at * pitches.residual + k : nullptr;
        d.output = output + at * pitches.y + k;
        run_row(d, out_w, table);
        activation.apply(d.output, pitches.y, out_w, d.channels);
        if (sums) sum_row(d.output, pitches.y, out_w, d.channels, sums + row * p.k + k);
      }
    }
  });
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
