// Rows of conv2d_nhwc's depthwise convolutions, which expand_depthwise makes too.
#include "cpu/conv2d_nhwc_depthwise.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

template <int W>
CNN_ENGINE_INLINE void finish_depthwise(const DepthwiseRow& d, Vec<W> value, int column, int c) {
  if (d.bias) value += load<W>(d.bias + c);
  if (d.residual) value += load<W>(d.residual + column * d.residual_place + c);
  float* to = d.output + column * d.output_place + c;
  if constexpr (W == 1) {
    *to = finished_one(d.epilogue, value[0]);
  } else {
    store<W>(to, finished(d.epilogue, value));
  }
}

// Outputs [first, first + T) for channels [c, c + W); from(r, j) is where the jth column that they
// read lies in the rth row.
template <int W, int T, int S, int Stride, typename From>
CNN_ENGINE_INLINE void depthwise_block(const DepthwiseRow& d, int first, int c, const From& from) {
  constexpr int J = (T - 1) * Stride + S;
  Vec<W> sum[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) sum[t] = Vec<W>{};
  const float* filter = d.weights + c;
  for (int r = 0; r < d.rows; ++r) {
    Vec<W> weights[S];
#pragma GCC unroll 16
    for (int s = 0; s < S; ++s, filter += d.weight) weights[s] = load<W>(filter);
#pragma GCC unroll 32
    for (int j = 0; j < J; ++j) {
      const Vec<W> x = load<W>(from(r, j) + c);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        const int s = j - t * Stride;
        if (s >= 0 && s < S) sum[t] += x * weights[s];
      }
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) finish_depthwise<W>(d, sum[t], first + t, c);
}

// The same for any number of taps and any steps between them, one output.
template <int W>
CNN_ENGINE_INLINE void depthwise_one(const DepthwiseRow& d, int at, int c) {
  const int left = at * d.stride - d.pad;
  const int begin = first_inside(left, d.dilation);
  const int end = end_inside(left, d.columns, d.dilation, d.width);
  Vec<W> sum{};
  for (int r = 0; r < d.rows; ++r) {
    const float* row = d.input + r * d.row + c;
    const float* filter = d.weights + (r * d.columns + (begin - left) / d.dilation) * d.weight + c;
    for (int x = begin; x < end; x += d.dilation, filter += d.weight) {
      sum += load<W>(row + x * d.place) * load<W>(filter);
    }
  }
  finish_depthwise<W>(d, sum, at, c);
}

// Outputs [first, first + count) of one channel.
[[gnu::noinline]] void depthwise_ones(const DepthwiseRow& d, int first, int count, int c) {
  for (int t = 0; t < count; ++t) depthwise_one<1>(d, first + t, c);
}

// Outputs [first, first + T) of all channels; where these are fewer than a vector, one by one.
template <int T, int S, int Stride, typename From>
CNN_ENGINE_INLINE void depthwise_channels(const DepthwiseRow& d, int first, const From& from) {
  for_channels(d.channels, [&](auto width, int c) {
    constexpr int W = decltype(width)::value;
    if constexpr (W > 1) {
      depthwise_block<W, T, S, Stride>(d, first, c, from);
    } else {
      depthwise_ones(d, first, T, c);
    }
  });
}

template <int T, int S, int Stride>
void depthwise_blocks(const DepthwiseRow& row, int outputs, const float** table) {
  constexpr int J = (T - 1) * Stride + S;
  const DepthwiseRow d = row;  // its own, which no store can change
  for (int at = 0; at < outputs; at += T) {
    const int first = at + T <= outputs ? at : outputs - T;
    const int left = first * Stride - d.pad;
    if (left >= 0 && left + J <= d.width) {
      const float* corner = d.input + left * d.place;
      const auto from = [corner, row = d.row, place = d.place](int r, int j) {
        return corner + r * row + j * place;
      };
      depthwise_channels<T, S, Stride>(d, first, from);
    } else {
      for (int r = 0; r < d.rows; ++r) {
        for (int j = 0; j < J; ++j) {
          const int x = left + j;
          table[r * J + j] = x >= 0 && x < d.width ? d.input + r * d.row + x * d.place : d.zeros;
        }
      }
      const auto from = [=](int r, int j) {
        return table[r * J + j];
      };
      depthwise_channels<T, S, Stride>(d, first, from);
    }
  }
}

// All outputs of a row.
template <int S, int Stride>
void depthwise_row(const DepthwiseRow& d, int outputs, const float** table) {
  if (outputs >= kDepthwiseColumns) {
    depthwise_blocks<kDepthwiseColumns, S, Stride>(d, outputs, table);
  } else if (outputs >= 7) {
    depthwise_blocks<7, S, Stride>(d, outputs, table);
  } else if (outputs >= 4) {
    depthwise_blocks<4, S, Stride>(d, outputs, table);
  } else {
    depthwise_blocks<1, S, Stride>(d, outputs, table);
  }
}

void depthwise_any_row(const DepthwiseRow& d, int outputs, const float**) {
  for (int at = 0; at < outputs; ++at) {
    for_channels(d.channels,
                 [&](auto width, int c) { depthwise_one<decltype(width)::value>(d, at, c); });
  }
}

}  // namespace

DepthwiseRowFunction depthwise_row_of(const Conv2dShape& p) {
  if (p.dilation_w == 1 && p.stride_w == 1 && p.s == 3) return depthwise_row<3, 1>;
  if (p.dilation_w == 1 && p.stride_w == 1 && p.s == 5) return depthwise_row<5, 1>;
  if (p.dilation_w == 1 && p.stride_w == 2 && p.s == 3) return depthwise_row<3, 2>;
  if (p.dilation_w == 1 && p.stride_w == 2 && p.s == 5) return depthwise_row<5, 2>;
  return depthwise_any_row;
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
