// conv2d_nhwc with one channel and one filter a group: channels on SIMD lanes.
//
// Several outputs of a row are summed together in registers: an input is loaded once for all of
// them that read it, and so are the weights of a row of taps. Rows of taps outside the image are
// left out; columns outside it are read from a row of zeros. Where the channels or the columns are
// no whole number of blocks, the last block begins earlier and writes some outputs again. Included
// only by files that are compiled once for each instruction set.
#pragma once

#include "cpu/channels.h"
#include "cpu/nhwc.h"
#include "ops/conv2d_nhwc.h"
#include "ops/window.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

// A row of outputs, for the channels [0, channels) that the pointers are at.
struct DepthwiseRow {
  const float* input;     // of the image's row of the first tap inside it
  const float* weights;   // of that tap's row
  const float* bias;      // or null
  const float* residual;  // or null
  const float* zeros;     // as many as there are channels
  float* output;
  std::int64_t row, place, weight;            // floats from one to the next
  std::int64_t output_place, residual_place;  // the same, of a row's outputs
  int channels, rows, columns, width;         // rows of taps inside; taps of a row; of the image
  int stride, dilation, pad;
  Epilogue epilogue;
};

// Makes all outputs of a row. `table`: room for the places of a block's columns.
using DepthwiseRowFunction = void (*)(const DepthwiseRow&, int outputs, const float** table);
DepthwiseRowFunction depthwise_row_of(const Conv2dShape& shape);

namespace {

// Outputs of a row at once: the sizes of most networks' maps are multiples of 7, and 7 sums, 5
// weights and an input fit 16 registers; twice as many sums fit 32.
constexpr int kDepthwiseColumns = kRegisters == 32 ? 14 : 7;

// Channels for each place of an image from which the expansion before, by six as in most networks,
// has more weights than what it reads and writes.
constexpr int kChannelsAPlace = 7;

// Whether a thread takes some channels of all rows, rather than some rows.
inline bool by_channels(const Conv2dShape& p) { return p.c > kChannelsAPlace * p.h * p.w; }

// Bands of an image's output rows, and shares of its channels, which are the same for any number of
// threads: what three rows of a share take stays in the first-level cache while a band is computed.
// Bands come before shares, so that a thread finds the rows that it wrote itself; with so many
// channels for so few places that the convolution before was shared out by filters, there is one.
struct DepthwiseSplit {
  int bands, shares;

  DepthwiseSplit(const Conv2dShape& p, int threads) {
    const int out_h = p.out_h(), wanted = (32 + out_h - 1) / out_h;
    const int most = p.c < 64 ? 1 : p.c / 64;
    shares = wanted < most ? wanted : most;
    const int parts = threads == 1 ? 1 : (4 * threads + p.n - 1) / p.n;
    bands = by_channels(p) ? 1 : parts < out_h ? parts : out_h;
    if (by_channels(p) && parts > shares) shares = parts < most ? parts : most;
  }
};

inline std::int64_t depthwise_packed(const Conv2dShape& p) { return std::int64_t{p.r} * p.s * p.c; }

inline void depthwise_pack(const float* weight,  // [K, 1, R, S]
                           float* packed,        // [R, S, K]
                           const Conv2dShape& p) {
  const int area = p.r * p.s;
  for (int t = 0; t < area; ++t) {
    for (int k = 0; k < p.k; ++k) packed[std::int64_t{t} * p.k + k] = weight[k * area + t];
  }
}

// Of each thread: zeros, and the places of a block's columns, in whole cache lines.
inline std::int64_t depthwise_scratch(const Conv2dShape& p) {
  const std::int64_t zeros = (p.c + 15) / 16 * 16;
  if (p.stride_w > 2 || p.s > 5) return zeros;
  const int places = p.r * ((kDepthwiseColumns - 1) * p.stride_w + p.s);
  return zeros + (std::int64_t{2} * places + 15) / 16 * 16;
}

// Where the places of a block's columns are written.
inline const float** depthwise_table(float* scratch, const Conv2dShape& p) {
  return reinterpret_cast<const float**>(scratch + (p.c + 15) / 16 * 16);
}

// What all rows of a call have in common; zeros are written to the scratch memory.
inline DepthwiseRow depthwise_rows(float* scratch, const Conv2dShape& p,
                                   const Conv2dPitches& pitches, const Activation& activation) {
  fill_zero(scratch, (p.c + 15) / 16 * 16);
  DepthwiseRow d{};
  d.zeros = scratch;
  d.row = std::int64_t{p.w} * pitches.x * p.dilation_h;
  d.place = pitches.x;
  d.weight = p.c;
  d.output_place = pitches.y;
  d.residual_place = pitches.residual;
  d.columns = p.s;
  d.width = p.w;
  d.stride = p.stride_w;
  d.dilation = p.dilation_w;
  d.pad = p.pad_left;
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
  d.input = rows + (y - first) * p.w * d.place;
  d.weights = packed + std::int64_t{(y - top) / p.dilation_h} * p.s * p.c;
}

// sums[c] = the sum of a row's places [columns, pitch], in float32 of a few at a time.
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

// `sums`: where those of y's rows go, [N, OH, K], or null.
inline void depthwise(const float* input, const float* packed, const float* bias,
                      const float* residual, float* output, const Scratch& scratch,
                      const Conv2dShape& p, const Conv2dPitches& pitches,
                      const Activation& activation, int threads, double* sums = nullptr) {
  const int out_h = p.out_h(), out_w = p.out_w();
  const DepthwiseSplit split(p, threads);
  const int shares = split.shares;
  const auto run_row = depthwise_row_of(p);
  const std::int64_t tasks = std::int64_t{p.n} * split.bands * shares;
  const std::int64_t outputs = std::int64_t{p.n} * p.c * out_h * out_w;
  const std::int64_t cost = outputs / tasks * (p.r * p.s + 4) / kNarrow;
  parallel_for(tasks, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    const float** table = depthwise_table(part.data(), p);
    DepthwiseRow d = depthwise_rows(part.data(), p, pitches, activation);
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t image = index / (std::int64_t{split.bands} * shares);
      const int band = static_cast<int>(index / shares % split.bands);
      const int share = static_cast<int>(index % shares);
      const int c = static_cast<int>(std::int64_t{p.c} * share / shares / kWide * kWide);
      const int c_end =
          share + 1 == shares
              ? p.c
              : static_cast<int>(std::int64_t{p.c} * (share + 1) / shares / kWide * kWide);
      d.channels = c_end - c;
      d.bias = bias ? bias + c : nullptr;
      const int last = static_cast<int>(std::int64_t{out_h} * (band + 1) / split.bands);
      for (int i = static_cast<int>(std::int64_t{out_h} * band / split.bands); i < last; ++i) {
        depthwise_at(d, p, i, input + image * p.h * p.w * pitches.x + c, 0, packed + c);
        const std::int64_t row = image * out_h + i, at = row * out_w;
        d.residual = residual ? residual + at * pitches.residual + c : nullptr;
        d.output = output + at * pitches.y + c;
        run_row(d, out_w, table);
        activation.apply(d.output, pitches.y, out_w, d.channels);
        if (sums) sum_row(d.output, pitches.y, out_w, d.channels, sums + row * p.k + c);
      }
    }
  });
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
