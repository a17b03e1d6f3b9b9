// What surrounds the products of Winograd's method of conv2d_nhwc: shapes, the transforms of tiles
// and weights, and V and M of a task. See conv2d_nhwc_winograd.h.
#pragma once

#include "cpu/fused/cook_toom.h"
#include "cpu/fused/kernel_transform.h"
#include "cpu/nhwc.h"
#include "cpu/window_bound.h"
#include "ops/conv2d_nhwc.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Filters of a block, of which all that is between the transforms stays in the second-level cache.
constexpr int kWinogradFilters = 64;
// Of U: what is larger is made of the weights as they are read, for some channels at a time, and so
// is that of images of a few tiles. Of 3x3, those are 9 numbers in the place of 16 or 36, and come
// from a cache further away or from memory.
constexpr std::int64_t kWinogradWeights = 256 << 10;
constexpr int kWinogradChannels = 64;
// Of V, with U of its own or made as it is read: that costs less the more tiles it is made for.
constexpr std::int64_t kWinogradFloats = 128 << 10, kWinogradMostFloats = 384 << 10;
constexpr int kLeastTiles = 12, kMostTiles = 64;
// Of a sum, with tiles of 4x4: rounding errors, which the transform back makes larger, are those of
// short sums. With 64 the logits of VGG-16 with batch norm were 3.2 times ONNX Runtime's error off.
constexpr int kWinogradSum = 24;
// Tiles of 4x4 of a task of which U is made in registers, at most, and of those how many together.
constexpr int kFewTiles = 4;
// Channels that lie side by side in their V: [channels][frequencies][tiles][kFewChannels].
constexpr int kFewChannels = 16, kFewStep = kFewTiles * kFewChannels;
// Numbers that say which outputs of a task are computed directly.
constexpr int kTileNotes = kMostTiles + 16;

// All arguments of a call but the shape.
struct Winograd {
  const float* input;
  const float* packed;
  const float* residual;
  float* output;
  Conv2dPitches pitches;
  Activation activation;
  Epilogue epilogue;
};

// Outputs that are computed directly, some together: their windows are written out, a row each, in
// the order of the weights [groups][terms][kFilterGroup].
class DirectOutputs {
 public:
  static constexpr int kRows = 24;
  static std::int64_t floats(std::int64_t terms, int filters) {
    return kRows * (terms + filter_groups(filters) * kFilterGroup);
  }

  // Of the filters [from, to), whose first is a group's first.
  DirectOutputs(const Winograd& call, const float* weights, int terms, int filters, int from,
                int to, float* scratch)
      : call_(call),
        weights_(weights),
        terms_(terms),
        filters_(filters),
        from_(from),
        to_(to),
        windows_(scratch),
        accumulators_(scratch + std::int64_t{kRows} * terms) {}

  float* window() { return windows_ + std::int64_t{rows_} * terms_; }

  // The output at this position, whose window has been written; `any`: whether not all of it is
  // zero.
  void add(std::int64_t position, bool any) {
    if (!any) return finish(position, nullptr);
    at_[rows_++] = position;
    if (rows_ == kRows) compute();
  }

  void compute() {
    if (rows_ == 0) return;
    const std::int64_t zero = 0, pitch = filter_groups(filters_) * kFilterGroup;
    const Gemm gemm{&zero, 1, ChannelParts(terms_, 1), terms_, weights_, filters_, pitch, 0};
    const Epilogue none{nullptr, nullptr, -std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::infinity()};
    multiply_runs(gemm, from_, to_, none, nullptr,
                  [&](const auto& body) { body(windows_, accumulators_, nullptr, rows_); });
    for (int i = 0; i < rows_; ++i) finish(at_[i], accumulators_ + i * pitch);
    rows_ = 0;
  }

 private:
  void finish(std::int64_t position, const float* accumulators) const {
    const Conv2dPitches& pitches = call_.pitches;
    const Epilogue& epilogue = call_.epilogue;
    float* y = call_.output + position * pitches.y;
    const float* residual = call_.residual ? call_.residual + position * pitches.residual : nullptr;
    for (int k = from_; k < to_; k += kWide) {
      const int some = to_ - k;
      Vec<kWide> value{};
      if (accumulators) value = load_some<kWide>(accumulators + k, some);
      if (epilogue.bias) value += load_some<kWide>(epilogue.bias + k, some);
      if (residual) value += load_some<kWide>(residual + k, some);
      store_some<kWide>(y + k, finished(epilogue, value), some);
    }
    call_.activation.apply(y + from_, pitches.y, 1, to_ - from_);
  }

  const Winograd& call_;
  const float* weights_;
  int terms_, filters_, from_, to_;
  float* windows_;
  float* accumulators_;
  std::int64_t at_[kRows];
  int rows_ = 0;
};

struct WinogradShape {
  int m, side, frequencies;  // outputs and inputs of a tile's side
  int tiles_x, area;         // tiles of a row, of an image
  std::int64_t tiles;        // of all images
  int c_pitch, k_pitch;
  bool makes_u;  // as it reads the weights
  int together;  // tiles of a task, at most

  WinogradShape(const Conv2dShape& p, Conv2dMethod method)
      : m(method == Conv2dMethod::winograd4 ? 4 : 2), side(m + 2), frequencies(side * side) {
    tiles_x = (p.out_w() + m - 1) / m;
    area = tiles_x * ((p.out_h() + m - 1) / m);
    tiles = std::int64_t{p.n} * area;
    c_pitch = (p.c + kFewChannels - 1) / kFewChannels * kFewChannels;
    k_pitch = filter_groups(p.k) * kFilterGroup;
    makes_u = std::int64_t{frequencies} * p.c * k_pitch > kWinogradWeights ||
              (m == 4 && area <= kFewTiles);
    std::int64_t most = (makes_u ? kWinogradMostFloats : kWinogradFloats) / (frequencies * c_pitch);
    if (most < kLeastTiles) most = kLeastTiles;
    together = static_cast<int>(most > kMostTiles ? kMostTiles : most);
  }
  std::int64_t v_step(int count) const { return std::int64_t{count} * c_pitch + 16; }
  std::int64_t m_step(int count) const {
    return std::int64_t{count < kFewTiles ? kFewTiles : count} * kWinogradFilters + 16;
  }
  // Whether U is made in registers for so many tiles: see multiply_few().
  bool is_few(int count) const { return m == 4 && makes_u && count <= kFewTiles; }
  // Of a frequency's weights, for the channels of a part.
  static constexpr std::int64_t kUStep = kWinogradChannels * kWinogradFilters + 16;
  std::int64_t u_floats() const { return makes_u ? frequencies * kUStep : 0; }
  // Outputs of each tile of a task that are computed directly, their windows and sums.
  std::int64_t direct_floats() const {
    return kTileNotes + DirectOutputs::floats(9 * c_pitch, k_pitch);
  }
  std::int64_t floats() const {
    return frequencies * (v_step(together) + m_step(together)) + c_pitch + u_floats() +
           direct_floats();
  }
  // Of U, where it is packed.
  std::int64_t packed_u(const Conv2dShape& p) const {
    return makes_u ? 0 : std::int64_t{frequencies} * p.c * k_pitch;
  }
  std::int64_t packed(const Conv2dShape& p) const {
    return kBoundFloats + std::int64_t{9} * p.c * k_pitch + packed_u(p);
  }
  // The channels of a sum in parts.
  int parts(const Conv2dShape& p) const {
    return makes_u ? (p.c + kWinogradChannels - 1) / kWinogradChannels : 1;
  }
  int part_begin(const Conv2dShape& p, int part) const {
    return static_cast<int>(std::int64_t{p.c} * part / parts(p));
  }
};

inline std::int64_t winograd_scratch(const Conv2dShape& p, Conv2dMethod method) {
  return WinogradShape(p, method).floats();
}

template <int S, int W>
CNN_ENGINE_INLINE void input_tile(const float* const (&positions)[S * S], int c, int count,
                                  float* v, std::int64_t step) {
  Vec<W> half[S][S];
#pragma GCC unroll 6
  for (int j = 0; j < S; ++j) {
    Vec<W> d[S], o[S];
#pragma GCC unroll 6
    for (int i = 0; i < S; ++i) d[i] = load_some<W>(positions[j * S + i] + c, count);
    input_transform(d, o);
#pragma GCC unroll 6
    for (int i = 0; i < S; ++i) half[i][j] = o[i];
  }
#pragma GCC unroll 6
  for (int i = 0; i < S; ++i) {
    Vec<W> o[S];
    input_transform(half[i], o);
#pragma GCC unroll 6
    for (int j = 0; j < S; ++j) store<W>(v + (i * S + j) * step + c, o[j]);
  }
}

// The outputs of a tile that lie inside the image.
struct WinogradOutput {
  float* y;
  const float* residual;
  std::int64_t row, pitch, residual_row, residual_pitch;
  int rows, columns;
};

template <int M, int W>
CNN_ENGINE_INLINE void output_tile(const float* m, std::int64_t step, const WinogradOutput& to,
                                   const Epilogue& epilogue, int k, int count) {
  constexpr int S = M + 2;
  Vec<W> half[M][S];
#pragma GCC unroll 6
  for (int j = 0; j < S; ++j) {
    Vec<W> d[S], o[M];
#pragma GCC unroll 6
    for (int i = 0; i < S; ++i) d[i] = load<W>(m + (i * S + j) * step + k);
    output_transform(d, o);
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) half[i][j] = o[i];
  }
  Vec<W> bias{};
  if (epilogue.bias) bias = load_some<W>(epilogue.bias + k, count);
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i) {
    if (i >= to.rows) return;
    Vec<W> o[M];
    output_transform(half[i], o);
#pragma GCC unroll 4
    for (int j = 0; j < M; ++j) {
      if (j >= to.columns) continue;
      Vec<W> value = o[j] + bias;
      if (to.residual) {
        value += load_some<W>(to.residual + i * to.residual_row + j * to.residual_pitch + k, count);
      }
      store_some<W>(to.y + i * to.row + j * to.pitch + k, finished(epilogue, value), count);
    }
  }
}

// A row of o = G w for three kernel offsets, with G's numbers: rows of points that differ in their
// sign share sums.
template <int S, int W>
CNN_ENGINE_INLINE Vec<W> kernel_row(const float (&g)[S][3], int row, const Vec<W> (&w)[3]) {
  if (row == 0) return g[0][0] * w[0];
  if (row == S - 1) return w[2];
  const bool is_plus = row % 2 == 1;
  const float (&plus)[3] = g[is_plus ? row : row - 1];
  const Vec<W> even = plus[0] * w[0] + plus[2] * w[2], odd = plus[1] * w[1];
  return is_plus ? even + odd : even - odd;
}

// U of a group's channels: [frequencies][channels][kFilterGroup] of weights [channels][9][the
// same].
template <int S>
void make_u(const float (&g)[S][3], const float* weights, int channels, float* u) {
  constexpr int W = kWide < kFilterGroup ? kWide : kFilterGroup;
  for (int c = 0; c < channels; ++c, weights += 9 * kFilterGroup, u += kFilterGroup) {
    for (int i = 0; i < kFilterGroup; i += W) {
      Vec<W> half[S][3];
#pragma GCC unroll 3
      for (int x = 0; x < 3; ++x) {
        Vec<W> w[3];
#pragma GCC unroll 3
        for (int y = 0; y < 3; ++y) w[y] = load<W>(weights + (y * 3 + x) * kFilterGroup + i);
#pragma GCC unroll 6
        for (int y = 0; y < S; ++y) half[y][x] = kernel_row<S, W>(g, y, w);
      }
#pragma GCC unroll 6
      for (int y = 0; y < S; ++y) {
#pragma GCC unroll 6
        for (int x = 0; x < S; ++x) {
          store<W>(u + (y * S + x) * WinogradShape::kUStep + i, kernel_row<S, W>(g, x, half[y]));
        }
      }
    }
  }
}

// Positions of a tile that are measured together: two sums of each fit the registers.
template <int S>
constexpr int measured_together() {
  const int registers = kRegisters * 3 / 8, most = kWide < registers ? kWide : registers;
  int count = 2 * S;
  while (count > most || 2 * S % count != 0) --count;
  return count;
}

// TileSums of the positions of a tile, columns from `first` on.
template <int S>
void measure_positions(const float* const (&positions)[S * S], int channels, int first,
                       TileSums<S>& sums) {
  constexpr int W = kWide, N = measured_together<S>();
  for (int from = first * S; from < S * S; from += N) {
    Vec<W> size[W] = {}, square[W] = {};
    const float* const* x = positions + from;
    const auto add = [&](int c, int some) __attribute__((always_inline)) {
#pragma GCC unroll 12
      for (int i = 0; i < N; ++i) {
        const Vec<W> value = load_some<W>(x[i] + c, some);
        size[i] += absolute(value);
        square[i] += value * value;
      }
    };
    int c = 0;
    for (; c + W <= channels; c += W) add(c, W);
    if (c < channels) add(c, channels - c);
    const Vec<W> l = lane_sums<W>(size), e = lane_sums<W>(square);
    __builtin_memcpy(sums.sizes + from, &l, N * sizeof(float));
    __builtin_memcpy(sums.squares + from, &e, N * sizeof(float));
  }
}

// The inputs of tile `index` of all images, by columns: `nothing` outside the image.
template <int M>
void find_positions(const Winograd& call, const Conv2dShape& p, const WinogradShape& shape,
                    std::int64_t index, const float* nothing,
                    const float* (&positions)[(M + 2) * (M + 2)]) {
  constexpr int S = M + 2;
  const std::int64_t n = index / shape.area;
  const int tile = static_cast<int>(index % shape.area);
  const int top = tile / shape.tiles_x * M - p.pad_top;
  const int left = tile % shape.tiles_x * M - p.pad_left;
  for (int i = 0; i < S; ++i) {
    for (int j = 0; j < S; ++j) {
      const int y = top + i, x = left + j;
      const bool inside = y >= 0 && y < p.h && x >= 0 && x < p.w;
      const std::int64_t position = (n * p.h + y) * p.w + x;
      positions[j * S + i] = inside ? call.input + position * call.pitches.x : nothing;
    }
  }
}

// V of tiles [first, first + count), and the outputs of each that are computed directly: whether
// any is not.
template <int M>
bool write_tiles(const Winograd& call, const Conv2dShape& p, const WinogradShape& shape,
                 const WindowBound& bound, std::int64_t first, int count, const float* nothing,
                 float* v, unsigned* direct) {
  constexpr int S = M + 2;
  const bool is_few = shape.is_few(count);
  const std::int64_t step = is_few ? kFewStep : shape.v_step(count);
  // From the end of some channels to those that follow.
  const std::int64_t apart = is_few ? S * S * kFewStep - kFewChannels : 0;
  const float* positions[S * S];
  TileSums<S> sums;
  bool any = false;
  for (int t = 0; t < (is_few ? kFewTiles : count); ++t) {
    if (t < count) {
      find_positions<M>(call, p, shape, first + t, nothing, positions);
      const int tile = static_cast<int>((first + t) % shape.area);
      // The tile before has the first columns.
      const bool beside = t > 0 && tile % shape.tiles_x > 0;
      if (beside) {
        __builtin_memcpy(sums.sizes, sums.sizes + M * S, 2 * S * sizeof(float));
        __builtin_memcpy(sums.squares, sums.squares + M * S, 2 * S * sizeof(float));
      }
      measure_positions<S>(positions, p.c, beside ? 2 : 0, sums);
      int rows = p.out_h() - tile / shape.tiles_x * M;
      int columns = p.out_w() - tile % shape.tiles_x * M;
      if (rows > M) rows = M;
      if (columns > M) columns = M;
      direct[t] = outside_bound<M, 3>(bound, sums, rows, columns);
      any |= __builtin_popcount(direct[t]) < rows * columns;
    } else {
      for (const float*& position : positions) position = nothing;
    }
    float* to = v + t * (is_few ? kFewChannels : std::int64_t{shape.c_pitch});
    int c = 0;
    for (; c + kWide <= p.c; c += kWide) {
      input_tile<S, kWide>(positions, c, kWide, to + c / kFewChannels * apart, step);
    }
    for (; c < p.c; c += kNarrow) {
      input_tile<S, kNarrow>(positions, c, p.c - c, to + c / kFewChannels * apart, step);
    }
  }
  return any;
}

// Outputs of tiles [first, first + count) and filters [from, to), of M for these filters.
template <int M>
void read_tiles(const Winograd& call, const Conv2dShape& p, const WinogradShape& shape,
                std::int64_t first, int count, const float* m, int from, int to) {
  const int out_h = p.out_h(), out_w = p.out_w();
  const Conv2dPitches& pitches = call.pitches;
  const std::int64_t step = shape.m_step(count);
  for (int t = 0; t < count; ++t) {
    const std::int64_t n = (first + t) / shape.area;
    const int tile = static_cast<int>((first + t) % shape.area);
    const int top = tile / shape.tiles_x * M, left = tile % shape.tiles_x * M;
    const std::int64_t position = (n * out_h + top) * out_w + left;
    const WinogradOutput at{call.output + position * pitches.y,
                            call.residual ? call.residual + position * pitches.residual : nullptr,
                            std::int64_t{out_w} * pitches.y,
                            pitches.y,
                            std::int64_t{out_w} * pitches.residual,
                            pitches.residual,
                            out_h - top < M ? out_h - top : M,
                            out_w - left < M ? out_w - left : M};
    const float* accumulators = m + t * kWinogradFilters - from;
    int k = from;
    for (; k + kWide <= to; k += kWide) {
      output_tile<M, kWide>(accumulators, step, at, call.epilogue, k, kWide);
    }
    for (; k < to; k += kNarrow) {
      output_tile<M, kNarrow>(accumulators, step, at, call.epilogue, k, to - k);
    }
    for (int i = 0; i < at.rows; ++i) {
      call.activation.apply(at.y + i * at.row + from, pitches.y, at.columns, to - from);
    }
  }
}

// Writes the window of 3x3 positions in the order of the weights; returns whether any value is not
// zero.
template <int S>
bool write_window(const float* const* positions, int channels, bool kernel_offsets_first,
                  float* to) {
  std::uint32_t any = 0;  // bits, but for the sign
  for (int kernel_offset = 0; kernel_offset < 9; ++kernel_offset) {
    const float* from = positions[kernel_offset % 3 * S + kernel_offset / 3];
    for (int c = 0; c < channels; ++c) {
      std::uint32_t bits;
      __builtin_memcpy(&bits, from + c, sizeof bits);
      any |= bits << 1;
    }
    if (kernel_offsets_first) {
      __builtin_memcpy(to + kernel_offset * channels, from, sizeof(float) * channels);
    } else {
      for (int c = 0; c < channels; ++c) to[c * 9 + kernel_offset] = from[c];
    }
  }
  return any != 0;
}

// Computes the outputs of tiles [first, first + count) that are not Winograd's directly.
template <int M>
void write_direct(const Winograd& call, const Conv2dShape& p, const WinogradShape& shape,
                  std::int64_t first, int count, const float* nothing, const unsigned* direct,
                  DirectOutputs outputs) {
  constexpr int S = M + 2;
  const int out_h = p.out_h(), out_w = p.out_w();
  for (int t = 0; t < count; ++t) {
    if (direct[t] == 0) continue;
    const float* positions[S * S];
    find_positions<M>(call, p, shape, first + t, nothing, positions);
    const std::int64_t n = (first + t) / shape.area;
    const int tile = static_cast<int>((first + t) % shape.area);
    const int top = tile / shape.tiles_x * M, left = tile % shape.tiles_x * M;
    for (int i = 0; i < M * M; ++i) {
      if (!(direct[t] >> i & 1)) continue;
      const float* const* window = positions + i % M * S + i / M;
      const bool any = write_window<S>(window, p.c, !shape.makes_u, outputs.window());
      outputs.add((n * out_h + top + i / M) * out_w + left + i % M, any);
    }
  }
  outputs.compute();
}

// G of the kernels' transform, in float32.
template <int M>
struct KernelTransform {
  float g[M + 2][3];

  KernelTransform() {
    double exact[8][5];
    fused::kernel_transform(M, 3, exact);
    for (int i = 0; i < M + 2; ++i) {
      for (int kernel_offset = 0; kernel_offset < 3; ++kernel_offset)
        g[i][kernel_offset] = static_cast<float>(exact[i][kernel_offset]);
    }
  }
};

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
