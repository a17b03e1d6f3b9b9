// Rows of conv2d_nhwc's depthwise convolutions, which expand_depthwise makes too.
#include "cpu/conv2d_nhwc_depthwise.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

template <int W>
CNN_ENGINE_INLINE void finish_depthwise(const DepthwiseRow& d, Vec<W> value, int column, int c) {
  if (d.bias) value += load<W>(d.bias + c);
  if (d.residual) value += load<W>(d.residual + column * d.residual_position + c);
  float* to = d.output + column * d.output_position + c;
  if constexpr (W == 1) {
    *to = finished_one(d.epilogue, value[0]);
  } else {
    store<W>(to, finished(d.epilogue, value));
  }
}

// What the filters of a vector read of the channels beside them: with one channel a group these
// channels, else in each lane the one that is `part` of its filter's group.
template <int W, bool Grouped>
struct Lanes {
  typedef int Index __attribute__((vector_size(W * 4)));
  Index first{};  // lanes of the groups' first channels

  CNN_ENGINE_INLINE explicit Lanes([[maybe_unused]] int group) {
    if constexpr (Grouped && W > 1) {
      int at[W];
      for (int i = 0; i < W; ++i) at[i] = i & -group;
      __builtin_memcpy(&first, at, sizeof first);
    }
  }
  CNN_ENGINE_INLINE Vec<W> load_part(const float* x, [[maybe_unused]] int part) const {
    if constexpr (Grouped && W > 1) {
      return __builtin_shuffle(load<W>(x), first + part);
    } else {
      return load<W>(x);
    }
  }
};

// Outputs [first, first + T) for channels [c, c + W); from(r, j) is where the jth column that they
// read lies in the rth row.
template <int W, int T, int S, int Stride, bool Grouped, typename From>
CNN_ENGINE_INLINE void depthwise_block(const DepthwiseRow& d, int first, int c, const From& from) {
  constexpr int J = (T - 1) * Stride + S;
  const Lanes<W, Grouped> lanes(d.group);
  const int parts = Grouped ? d.group : 1;
  Vec<W> sum[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) sum[t] = Vec<W>{};
  const float* filter = d.weights + c;
  for (int r = 0; r < d.rows; ++r) {
    for (int part = 0; part < parts; ++part) {
      Vec<W> weights[S];
#pragma GCC unroll 16
      for (int s = 0; s < S; ++s, filter += d.weight) weights[s] = load<W>(filter);
#pragma GCC unroll 32
      for (int j = 0; j < J; ++j) {
        const Vec<W> x = lanes.load_part(from(r, j) + c, part);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const int s = j - t * Stride;
          if (s >= 0 && s < S) sum[t] += x * weights[s];
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) finish_depthwise<W>(d, sum[t], first + t, c);
}

// The same for any number of kernel offsets and any steps between them. Kernel offsets that lie
// outside the image for all of these outputs are left out; for some of them, zeros are read.
template <int W, int T, bool Grouped>
CNN_ENGINE_INLINE void depthwise_kernel_offsets(const DepthwiseRow& d, int first, int c) {
  const Lanes<W, Grouped> lanes(d.group);
  const int parts = Grouped ? d.group : 1;
  const std::int64_t left = std::int64_t{first} * d.stride - d.pad;
  const std::int64_t span = std::int64_t{T - 1} * d.stride, step = d.stride * d.position;
  int begin = 0, end = d.columns;
  while (begin < end && left + span + std::int64_t{begin} * d.dilation < 0) ++begin;
  while (begin < end && left + std::int64_t{end - 1} * d.dilation >= d.width) --end;
  constexpr int Q = 4;  // kernel offsets side by side, for all of which an input is loaded once
  const bool side_by_side = d.stride == 1 && d.dilation == 1;
  Vec<W> sum[T] = {};
  for (int index = 0; index < d.rows * parts; ++index) {
    const int part = Grouped ? index % parts : 0;
    const float* row = d.input + (Grouped ? index / parts : index) * d.row + c;
    const float* filter = d.weights + (std::int64_t{index} * d.columns + begin) * d.weight + c;
    int s = begin;
    for (; side_by_side && left + s >= 0 && s + Q <= end && left + s + T + Q - 1 <= d.width;
         s += Q) {
      Vec<W> weights[Q];
#pragma GCC unroll 4
      for (int q = 0; q < Q; ++q, filter += d.weight) weights[q] = load<W>(filter);
      const float* x = row + (left + s) * d.position;
#pragma GCC unroll 32
      for (int j = 0; j < T + Q - 1; ++j, x += d.position) {
        const Vec<W> value = lanes.load_part(x, part);
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) {
          if (j >= q && j - q < T) sum[j - q] += value * weights[q];
        }
      }
    }
    for (; s < end; ++s, filter += d.weight) {
      const Vec<W> weights = load<W>(filter);
      const std::int64_t at = left + std::int64_t{s} * d.dilation;
      if (at >= 0 && at + span < d.width) {
        const float* x = row + at * d.position;
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sum[t] += lanes.load_part(x + t * step, part) * weights;
      } else {
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const std::int64_t column = at + t * d.stride;
          const bool inside = column >= 0 && column < d.width;
          const float* x = inside ? row + column * d.position : d.zeros + c;
          sum[t] += lanes.load_part(x, part) * weights;
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) finish_depthwise<W>(d, sum[t], first + t, c);
}

// Outputs [first, first + count) of one channel.
[[gnu::noinline]] void depthwise_ones(const DepthwiseRow& d, int first, int count, int c) {
  for (int t = 0; t < count; ++t) depthwise_kernel_offsets<1, 1, false>(d, first + t, c);
}

// Outputs [first, first + T) of all channels; where these are fewer than a vector, one by one.
template <int T, int S, int Stride, bool Grouped, typename From>
CNN_ENGINE_INLINE void depthwise_channels(const DepthwiseRow& d, int first, const From& from) {
  for_channels(d.channels, [&](auto width, int c) {
    constexpr int W = decltype(width)::value;
    if constexpr (W > 1) {
      depthwise_block<W, T, S, Stride, Grouped>(d, first, c, from);
    } else {
      depthwise_ones(d, first, T, c);
    }
  });
}

template <int T, int S, int Stride, bool Grouped>
void depthwise_blocks(const DepthwiseRow& row, int outputs, const float** table) {
  constexpr int J = (T - 1) * Stride + S;
  const DepthwiseRow d = row;  // its own, which no store can change
  for (int at = 0; at < outputs; at += T) {
    const int first = at + T <= outputs ? at : outputs - T;
    const int left = first * Stride - d.pad;
    if (left >= 0 && left + J <= d.width) {
      const float* corner = d.input + left * d.position;
      const auto from = [corner, row = d.row, position = d.position](int r, int j) {
        return corner + r * row + j * position;
      };
      depthwise_channels<T, S, Stride, Grouped>(d, first, from);
    } else {
      for (int r = 0; r < d.rows; ++r) {
        for (int j = 0; j < J; ++j) {
          const int x = left + j;
          table[r * J + j] = x >= 0 && x < d.width ? d.input + r * d.row + x * d.position : d.zeros;
        }
      }
      const auto from = [=](int r, int j) {
        return table[r * J + j];
      };
      depthwise_channels<T, S, Stride, Grouped>(d, first, from);
    }
  }
}

template <int T, bool Grouped>
void depthwise_any_blocks(const DepthwiseRow& row, int outputs, const float**) {
  const DepthwiseRow d = row;
  for (int at = 0; at < outputs; at += T) {
    const int first = at + T <= outputs ? at : outputs - T;
    for_channels(d.channels, [&](auto width, int c) {
      constexpr int W = decltype(width)::value;
      if constexpr (W > 1) {
        depthwise_kernel_offsets<W, T, Grouped>(d, first, c);
      } else {
        depthwise_ones(d, first, T, c);
      }
    });
  }
}

// All outputs of a row, by blocks of as many as it has.
template <DepthwiseRowFunction most, DepthwiseRowFunction seven, DepthwiseRowFunction four,
          DepthwiseRowFunction one>
void depthwise_by_blocks(const DepthwiseRow& d, int outputs, const float** table) {
  if (outputs >= kDepthwiseColumns) return most(d, outputs, table);
  if (outputs >= 7) return seven(d, outputs, table);
  if (outputs >= 4) return four(d, outputs, table);
  one(d, outputs, table);
}

template <int S, int Stride, bool Grouped = false>
constexpr DepthwiseRowFunction depthwise_row =
    depthwise_by_blocks<depthwise_blocks<kDepthwiseColumns, S, Stride, Grouped>,
                        depthwise_blocks<7, S, Stride, Grouped>,
                        depthwise_blocks<4, S, Stride, Grouped>,
                        depthwise_blocks<1, S, Stride, Grouped>>;

template <bool Grouped>
constexpr DepthwiseRowFunction any_depthwise_row =
    depthwise_by_blocks<depthwise_any_blocks<kDepthwiseColumns, Grouped>,
                        depthwise_any_blocks<7, Grouped>, depthwise_any_blocks<4, Grouped>,
                        depthwise_any_blocks<1, Grouped>>;

}  // namespace

DepthwiseRowFunction depthwise_row_of(const Conv2dShape& p) {
  const bool by_ones = p.stride_w == 1;
  if (p.group_channels() > 1) {
    if (!has_table(p) || p.s != 3) return any_depthwise_row<true>;
    return by_ones ? depthwise_row<3, 1, true> : depthwise_row<3, 2, true>;
  }
  if (!has_table(p)) return any_depthwise_row<false>;
  if (p.s == 3) return by_ones ? depthwise_row<3, 1> : depthwise_row<3, 2>;
  if (p.s == 5) return by_ones ? depthwise_row<5, 1> : depthwise_row<5, 2>;
  return by_ones ? depthwise_row<7, 1> : depthwise_row<7, 2>;
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
