// conv2d + activation + 2x2 max-pool by Winograd's convolution, a few rows of tiles at a time:
//
//   V[f, t, c] = B^T d B of tile t's input; M[f, t, k] = sum over c of V[f, t, c] * U[f, c, k];
//   output of tile t = pool(A^T M A) + bias, activated
//
// SIMD lanes are channels throughout (no shuffles, any image size), except where a first layer has
// fewer channels than lanes: there they are neighbouring tiles (PlanarLayout). The bias and a
// rising activation commute with the maximum, so they are applied once a window. Outputs whose
// windows do not allow a tile's rounding errors (window_bound.h) are computed directly after it.
// Every tile is computed by itself, so results depend neither on the number of threads nor on how
// tiles are grouped.
#include "cpu/fused/activation.h"
#include "cpu/fused/block.h"
#include "cpu/fused/cook_toom.h"
#include "cpu/fused/multiply.h"
#include "cpu/window_bound.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Columns first: each is transformed once for the tiles that share it, into [x, i, channels].
template <int MH, int MW, int R, int W>
void transform_input(const ConvStep& s, const float* in, float* columns, float* v, int tile_row) {
  constexpr int AH = MH + R - 1, AW = MW + R - 1;
  const int pitch = s.in.pitch;
  const std::size_t row = std::size_t(s.in.cols) * pitch;
  const float* top = in + std::size_t(tile_row) * MH * row;
  const int width = s.tiles_x * MW + R - 1;
  for (int x = 0; x < width; ++x) {
    for (int c = 0; c < pitch; c += W) {
      Vec<W> d[AH], o[AH];
#pragma GCC unroll 8
      for (int i = 0; i < AH; ++i) d[i] = load<W>(top + i * row + x * pitch + c);
      input_transform(d, o);
#pragma GCC unroll 8
      for (int i = 0; i < AH; ++i) store<W>(columns + (std::size_t(x) * AH + i) * pitch + c, o[i]);
    }
  }
  for (int t = 0; t < s.tiles_x; ++t) {
    for (int i = 0; i < AH; ++i) {
      for (int c = 0; c < pitch; c += W) {
        const float* from = columns + (std::size_t(t) * MW * AH + i) * pitch + c;
        float* to = v + i * AW * s.v_pitch + std::size_t(t) * pitch + c;
        Vec<W> d[AW], o[AW];
#pragma GCC unroll 8
        for (int j = 0; j < AW; ++j) d[j] = load<W>(from + j * AH * pitch);
        input_transform(d, o);
#pragma GCC unroll 8
        for (int j = 0; j < AW; ++j) store<W>(to + j * s.v_pitch, o[j]);
      }
    }
  }
}

// Of a planar image, where column j of a tile of four columns begins in a row.
template <int AW>
struct PlanarColumns {
  std::size_t at[AW];

  explicit PlanarColumns(const PlanarLayout& p) {
    for (int j = 0; j < AW; ++j) {
      const int x = j + 4 * p.margin - p.left;
      at[j] = std::size_t(x % 4) * p.pitch + x / 4;
    }
  }
};

// One row of a planar image to `to`, [tiles / L] of [AW, L], `step` apart: lanes are `L` tiles.
template <int R, int L>
CNN_ENGINE_INLINE void transform_row(const ConvStep& s, const float* row,
                                     const PlanarColumns<R + 3>& columns, float* to,
                                     std::size_t step) {
  constexpr int AW = R + 3;
  for (int t = 0; t < s.tiles_x; t += L, to += step) {
    Vec<L> d[AW], o[AW];
#pragma GCC unroll 8
    for (int j = 0; j < AW; ++j) d[j] = load<L>(row + t + columns.at[j]);
    input_transform(d, o);
#pragma GCC unroll 8
    for (int j = 0; j < AW; ++j) store<L>(to + j * L, o[j]);
  }
}

// The same for a planar image: lanes are positions of one phase, then `L` tiles; V is [tiles / L,
// c, f, L].
template <int R, int L>
void transform_planar(const ConvStep& s, const float* image, float* rows, float* v, int tile_row) {
  constexpr int AH = R + 3, AW = R + 3;
  const PlanarLayout& p = s.image;
  const std::size_t row = std::size_t{4} * p.pitch;
  const PlanarColumns<AW> columns(p);
  const std::size_t step = std::size_t(p.c) * AH * AW * L;
  for (int c = 0; c < p.c; ++c) {
    const float* top = image + c * p.plane() + std::size_t(tile_row) * 4 * row;
    for (std::size_t x = 0; x < row; x += L) {
      Vec<L> d[AH], o[AH];
#pragma GCC unroll 8
      for (int i = 0; i < AH; ++i) d[i] = load<L>(top + i * row + x);
      input_transform(d, o);
#pragma GCC unroll 8
      for (int i = 0; i < AH; ++i) store<L>(rows + i * row + x, o[i]);
    }
    for (int i = 0; i < AH; ++i) {
      transform_row<R, L>(s, rows + i * row, columns, v + (c * AH + i) * AW * L, step);
    }
  }
}

// Tiles of rows share their input's transform: V is [tiles / L, c, rows, AW, L] of some of them.
template <int R>
constexpr int kRowsOfV = kRowsTogether * 2 + R - 1;

template <int R, int L>
void transform_rows(const ConvStep& s, const float* image, float* v, int tile_row, int tile_rows) {
  constexpr int AW = R + 3;
  const PlanarLayout& p = s.image;
  const std::size_t row = std::size_t{4} * p.pitch;
  const PlanarColumns<AW> columns(p);
  const std::size_t step = std::size_t(p.c) * kRowsOfV<R> * AW * L;
  for (int c = 0; c < p.c; ++c) {
    const float* from = image + c * p.plane() + std::size_t(tile_row) * 2 * row;
    float* to = v + std::size_t(c) * kRowsOfV<R> * AW * L;
    for (int i = 0; i < tile_rows * 2 + R - 1; ++i, from += row, to += AW * L) {
      transform_row<R, L>(s, from, columns, to, step);
    }
  }
}

// The rest of one tile, `half` being A^T M: its rows, the pool, the bias and the activation.
template <int MH, int MW, int R, int W, bool pool>
[[gnu::noinline]] void finish_tile(const ConvStep& s, const Vec<W> (&half)[MH][MW + R - 1],
                                   float* out, int tile_row, int tile, int k) {
  Vec<W> y[MH][MW];
#pragma GCC unroll 4
  for (int i = 0; i < MH; ++i) output_transform(half[i], y[i]);
  const Vec<W> bias = load<W>(s.bias + k);
  constexpr int step = pool ? 2 : 1;
  const int left = tile * MW / step, top = tile_row * MH / step;
#pragma GCC unroll 4
  for (int i = 0; i < MH / step; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < MW / step; ++j) {
      if (top + i >= s.out.h || left + j >= s.out.w) continue;
      Vec<W> value = y[i * step][j * step];
      if (pool) {
        value = maximum(
            maximum(value, y[i * step][j * step + step - 1]),
            maximum(y[i * step + step - 1][j * step], y[i * step + step - 1][j * step + step - 1]));
      }
      store<W>(out + s.out.at(top + i, left + j) + k, activated<W>(s.activation, value + bias));
    }
  }
}

// Channels in wide vectors, and what is left in narrow ones: body(width, first channel).
template <typename Body>
CNN_ENGINE_INLINE void for_vectors(int pitch, const Body& body) {
  int c = 0;
  for (; c + kWide <= pitch; c += kWide) body(std::integral_constant<int, kWide>(), c);
  if (kNarrow == kWide) return;
  for (; c < pitch; c += kNarrow) body(std::integral_constant<int, kNarrow>(), c);
}

template <int MH, int MW, int R, bool pool>
void transform_output(const ConvStep& s, const float* m, float* out, int tile_row) {
  constexpr int AH = MH + R - 1, AW = MW + R - 1;
  for (int t = 0; t < s.tiles_x; ++t) {
    for_vectors(s.k_pitch, [&](auto lanes, int k) __attribute__((always_inline)) {
      constexpr int W = decltype(lanes)::value;
      const float* from = m + std::size_t(t) * s.k_pitch + k;
      Vec<W> half[MH][AW];
#pragma GCC unroll 8
      for (int j = 0; j < AW; ++j) {
        Vec<W> d[AH], o[MH];
#pragma GCC unroll 8
        for (int i = 0; i < AH; ++i) d[i] = load<W>(from + (i * AW + j) * s.m_pitch);
        output_transform(d, o);
#pragma GCC unroll 4
        for (int i = 0; i < MH; ++i) half[i][j] = o[i];
      }
      finish_tile<MH, MW, R, W, pool>(s, half, out, tile_row, t, k);
    });
  }
}

// A planar image has so few channels that its products M are best used where they are made, a
// column of frequencies at a time for `T` tiles, instead of being stored. V is [c, f, L], U is [c,
// f, W]: every address is a constant away from one of two pointers.
template <int MH, int R, int W, int L, int T>
CNN_ENGINE_INLINE void multiply_and_finish(const ConvStep& s, const float* v, const float* u,
                                           float* out, int tile_row, int tile, int k) {
  constexpr int MW = 4;
  constexpr int AH = MH + R - 1, AW = MW + R - 1;
  Vec<W> half[T][MH][AW];
#pragma GCC unroll 8
  for (int j = 0; j < AW; ++j) {
    Vec<W> m[T][AH] = {};
    const float* weights = u + j * W;
    const float* values = v + j * L;
    for (int c = 0; c < s.c; ++c, weights += AH * AW * W, values += AH * AW * L) {
#pragma GCC unroll 8
      for (int i = 0; i < AH; ++i) {
        const Vec<W> weight = load<W>(weights + i * AW * W);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) m[t][i] += weight * values[i * AW * L + t];
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      Vec<W> o[MH];
      output_transform(m[t], o);
#pragma GCC unroll 4
      for (int i = 0; i < MH; ++i) half[t][i][j] = o[i];
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    if (s.pool) {
      finish_tile<MH, MW, R, W, true>(s, half[t], out, tile_row, tile + t, k);
    } else {
      finish_tile<MH, MW, R, W, false>(s, half[t], out, tile_row, tile + t, k);
    }
  }
}

// The same for tiles of rows: each row of outputs sums up those of V that it reads.
template <int R, int W, int L, int T>
CNN_ENGINE_INLINE void multiply_along_rows(const ConvStep& s, const float* v, const float* u,
                                           float* out, int tile_row, int tile, int k) {
  constexpr int MH = 2, MW = 4, AW = MW + R - 1;
  Vec<W> half[T][MH][AW];
#pragma GCC unroll 8
  for (int j = 0; j < AW; ++j) {
    Vec<W> m[T][MH] = {};
    const float* weights = u + j * W;
    const float* values = v + j * L;
    for (int c = 0; c < s.c; ++c, weights += R * AW * W, values += kRowsOfV<R> * AW * L) {
#pragma GCC unroll 5
      for (int r = 0; r < R; ++r) {
        const Vec<W> weight = load<W>(weights + r * AW * W);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
          for (int i = 0; i < MH; ++i) m[t][i] += weight * values[(i + r) * AW * L + t];
        }
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int i = 0; i < MH; ++i) half[t][i][j] = m[t][i];
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    if (s.pool) {
      finish_tile<MH, MW, R, W, true>(s, half[t], out, tile_row, tile + t, k);
    } else {
      finish_tile<MH, MW, R, W, false>(s, half[t], out, tile_row, tile + t, k);
    }
  }
}

// `v` is where the tiles' rows begin, and what of it is one channel of `L` tiles is `channel`.
template <int MH, int R, int W, int L>
void multiply_planar(const ConvStep& s, const float* v, int channel, float* out, int tile_row) {
  constexpr bool along_rows = MH < 4;
  constexpr int most = (kRegisters == 32 ? 2 : 1) * (along_rows ? 2 : 1);
  constexpr int weights = (along_rows ? R : MH + R - 1) * (4 + R - 1);
  const auto some = [&](auto size, const float* values, const float* u, int tile, int k) {
    constexpr int T = decltype(size)::value;
    if constexpr (along_rows) {
      multiply_along_rows<R, W, L, T>(s, values, u, out, tile_row, tile, k);
    } else {
      multiply_and_finish<MH, R, W, L, T>(s, values, u, out, tile_row, tile, k);
    }
  };
  for (int k = 0; k < s.k_pitch; k += W) {
    const float* u = s.weight + std::size_t(k) * s.c * weights;
    for (int first = 0; first < s.tiles_x; first += L) {
      const float* values = v + std::size_t(first) * s.c * (channel / L);
      const int tiles = s.tiles_x - first < L ? s.tiles_x - first : L;
      int t = 0;
      for (; t + most <= tiles; t += most) {
        some(std::integral_constant<int, most>(), values + t, u, first + t, k);
      }
      for (; t < tiles; ++t) some(std::integral_constant<int, 1>(), values + t, u, first + t, k);
    }
  }
}

// What window_bound.h asks of the rows of tiles that one call comes to, and what it leaves out.
// Lanes are the outputs of a row, pooled ones where there is a pool; what lanes past the last tile
// hold does not count. Outputs that are left out wait until there are enough to share the reading
// of weights; their windows are read where they lie.
template <int MH, int MW, int R, bool pool>
class Measured {
 public:
  static constexpr int AH = MH + R - 1, AW = MW + R - 1;

  Measured(const ConvStep& s, const float* in, float* out, float* scratch, int begin)
      : s_(s),
        in_(in),
        out_(out),
        rows_(scratch + s.b_offset),
        sizes_(rows_ + 3 * AH * s.sums_pitch + kBefore),
        runs_(s),
        begin_(begin),
        next_(begin * MH) {
    if (!s.planar) {
      __builtin_memset(sizes_ - kBefore, 0, 2 * step * s.sums_pitch * sizeof(float));
    }
  }

  // Finds the outputs of rows of tiles, which Winograd's have been written to, that are not to be,
  // and computes them.
  void finish(int end) {
    for (; begin_ < end; ++begin_) {
      const int top = begin_ * MH;
      for (; next_ < top + AH; ++next_) measure(next_);
      for (int x = 0; x < s_.tiles_x * MW / step; x += W) take(top / step, x, outside(top, x));
    }
    flush();
  }

 private:
  static constexpr int W = kWide;
  static constexpr int step = pool ? 2 : 1;    // of outputs and, in what is measured, of columns
  static constexpr int windows = step * step;  // of an output
  static constexpr int span = R + step - 1;    // of all its windows

  float* row(int y) const { return rows_ + y % AH * 3 * s_.sums_pitch; }

  // Of zeros alone Winograd's outputs are exact.
  static CNN_ENGINE_INLINE IntVec<W> fails(Vec<W> held, Vec<W> tile) {
    return ~(held * held - tile >= kLeastSquare) & (tile != 0.0f);
  }

  // A row of windows: the sum of factors and l(x), that of factors and e(x), and e(window).
  void measure(int y) {
    float* to = row(y);
    if (y < s_.in.top || y >= s_.in.top + s_.in.h) {
      __builtin_memset(to, 0, 3 * s_.sums_pitch * sizeof(float));
      return;
    }
    const float* sizes = sizes_;
    const float* squares = sizes + step * s_.sums_pitch;
    if (s_.planar) {
      sizes = in_ + s_.image.sums_at(y);
      squares = sizes + s_.image.squares();
    } else if (s_.in.pitch % kWide == 0 && s_.in.w > kNarrow) {
      measure_positions<kWide>(y);
    } else {
      measure_positions<kNarrow>(y);
    }
    const auto at = [&](int k) {
      return (k & (step - 1)) * s_.sums_pitch + (k >> (step - 1));
    };
    const TileBound& bound = s_.bound;
    for (int x = 0; x < s_.tiles_x * MW / step; x += W) {
      Vec<W> held = {}, tile = {}, part = {};
#pragma GCC unroll 6
      for (int k = 0; k < span; ++k) held += bound.window.columns[k] * load<W>(sizes + at(k) + x);
      // A tile's first column acts on its first outputs alone, the last on the last.
      constexpr int before = MW - step, one = before > 0 ? 1 : 0;
#pragma GCC unroll 16
      for (int k = one - before; k < AW - one; ++k) {
        const Vec<W> square = load<W>(squares + at(k) + x);
        tile += load<W>(bound.columns[kBefore + k]) * square;
        if (k >= 0 && k < span) part += square;
      }
      store<W>(to + x, held);
      store<W>(to + s_.sums_pitch + x, tile);
      store<W>(to + 2 * s_.sums_pitch + x, part);
    }
  }

  // l(x) and e(x) of a row's pixels, `L` at once: lanes are columns dealt out by `step`.
  template <int L>
  void measure_positions(int y) {
    const Layout& p = s_.in;
    const float* row = in_ + std::size_t(y) * p.cols * p.pitch;
    for (int first = p.left & -step; first < p.left + p.w; first += L) {
      Vec<L> l[L], e[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        const int column = first + i * step % L + i * step / L;
        const int x = column < p.cols ? column : p.cols - 1;
        const float* from = row + std::size_t(x) * p.pitch;
        Vec<L> value = load<L>(from);
        l[i] = absolute(value);
        e[i] = value * value;
        for (int c = L; c < p.pitch; c += L) {
          value = load<L>(from + c);
          l[i] += absolute(value);
          e[i] += value * value;
        }
      }
      Vec<L> sums[2] = {lane_sums<L>(l), lane_sums<L>(e)};
      sums[1] = at_least<L>(sums[1], sums[0]);
      for (int i = 0; i < 2; ++i) {
        float* to = sizes_ + i * step * s_.sums_pitch + first / step;
        const auto* from = reinterpret_cast<const char*>(&sums[i]);
        for (int phase = 0; phase < step; ++phase, to += s_.sums_pitch) {
          __builtin_memcpy(to, from + phase * (L / step) * sizeof(float), L / step * sizeof(float));
        }
      }
    }
  }

  // Of a row of outputs from `first`: those outside the bound, a bit for each of the tiles' rows.
  IntVec<W> outside(int top, int first) const {
    const TileBound& bound = s_.bound;
    const float* rows[AH];
    for (int i = 0; i < AH; ++i) rows[i] = row(top + i) + first;
    IntVec<W> found = {};
    constexpr int outputs = MH / step;
#pragma GCC unroll 4
    for (int i = 0; i < outputs; ++i) {
      Vec<W> held = {}, part = {};
#pragma GCC unroll 6
      for (int r = 0; r < span; ++r) {
        held += bound.window.rows[r] * load<W>(rows[i * step + r]);
        part += load<W>(rows[i * step + r] + 2 * s_.sums_pitch);
      }
      Vec<W> tile = bound.window.spread * part;
#pragma GCC unroll 8
      for (int r = 0; r < AH; ++r) {
        if ((r == 0 && i > 0) || (r == AH - 1 && i < outputs - 1)) continue;
        tile += bound.rows[i][r] * load<W>(rows[r] + s_.sums_pitch);
      }
      found |= fails(held, tile) & (1 << i);
    }
    return found;
  }

  // Computes those that wait.
  void flush() {
    if (count_ == 0) return;
    if (s_.lanes == kWide) {
      compute<kWide>();
    } else {
      compute<kNarrow>();
    }
    count_ = 0;
  }

  // Has outputs that are found, in rows from `top` and columns from `first` on, wait.
  void take(int top, int first, IntVec<W> found) {
    std::uint64_t pairs[W / 2], any = 0;
    __builtin_memcpy(pairs, &found, sizeof found);
    for (int i = 0; i < W / 2; ++i) any |= pairs[i];
    if (any == 0) return;
    std::int32_t rows[W];
    __builtin_memcpy(rows, &found, sizeof found);
    for (int j = 0; j < W && first + j < s_.out.w; ++j) {
      for (int i = 0; i < MH / step; ++i) {
        if ((rows[j] >> i & 1) == 0 || top + i >= s_.out.h) continue;
        windows_[count_] = in_ + runs_.at((top + i) * step, (first + j) * step);
        positions_[count_++] = s_.out.at(top + i, first + j);
        if (count_ == kDirectOutputs) flush();
      }
    }
  }

  template <int L>
  [[gnu::noinline]] void compute() {
    const float* u = s_.direct;
    for (int k = 0; k < s_.k_pitch;) {
      const int block = block_size((s_.k_pitch - k) / L);
      if (block == 3) compute_block<L, 3>(u, k);
      if (block == 2) compute_block<L, 2>(u, k);
      if (block == 1) compute_block<L, 1>(u, k);
      u += std::size_t(R) * R * s_.c * block * L;
      k += block * L;
    }
  }

  // Of channels from `k`, in vectors of `L`: three narrow ones are a wide one and a narrow one
  // where the CPU has both (multiply.h).
  template <int L, int B>
  void compute_block(const float* u, int k) {
    constexpr bool is_mixed = B == 3 && L == kNarrow && kWide == 2 * kNarrow;
    constexpr int A = is_mixed ? kWide : L, N = is_mixed ? 1 : B;
    int first = 0;
    const auto some = [&](auto size) {
      compute_windows<A, N, is_mixed, decltype(size)::value>(u, k, first);
      first += decltype(size)::value / windows;
    };
    while (kRegisters == 32 && (count_ - first) * windows > 4) {
      some(std::integral_constant<int, 8>());
    }
    while (first < count_) some(std::integral_constant<int, 4>());
  }

  // T windows from the output `first` on, past the last of which the last is read again. Blocks are
  // N vectors of A channels and, where it `has_rest`, a narrow one.
  template <int A, int N, bool has_rest, int T>
  [[gnu::noinline]] void compute_windows(const float* w, int k, int first) {
    constexpr int block = N * A + (has_rest ? kNarrow : 0);
    const float* from[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const int output = first + t / windows, window = t % windows;
      from[t] = windows_[output < count_ ? output : count_ - 1] + window / 2 * runs_.row +
                window % 2 * runs_.column;
    }
    Vec<A> acc[T][N] = {};
    Vec<kNarrow> rest[T] = {};
    for (int i = 0; i < runs_.outer; ++i) {
      for (int j = 0; j < runs_.inner; ++j) {
        const std::ptrdiff_t begin = i * runs_.outer_step + j * runs_.inner_step;
        for (std::ptrdiff_t c = begin; c < begin + runs_.length; ++c, w += block) {
          Vec<A> weights[N];
#pragma GCC unroll 3
          for (int b = 0; b < N; ++b) weights[b] = load<A>(w + b * A);
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) {
            Vec<A> value = splat<A>(from[t][c]);
            if constexpr (has_rest) {
              keep(value);
              Vec<kNarrow> half;
              __builtin_memcpy(&half, &value, sizeof half);
              rest[t] += load<kNarrow>(w + N * A) * half;
            }
#pragma GCC unroll 3
            for (int b = 0; b < N; ++b) acc[t][b] += weights[b] * value;
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t += windows) {
      if (first + t / windows >= count_) break;
      float* to = out_ + positions_[first + t / windows] + k;
#pragma GCC unroll 3
      for (int b = 0; b < N; ++b) {
        Vec<A> value = acc[t][b];
        for (int a = 1; a < windows; ++a) value = maximum(value, acc[t + a][b]);
        value += load<A>(s_.bias + k + b * A);
        store<A>(to + b * A, activated<A>(s_.activation, value));
      }
      if constexpr (has_rest) {
        Vec<kNarrow> value = rest[t];
        for (int a = 1; a < windows; ++a) value = maximum(value, rest[t + a]);
        value += load<kNarrow>(s_.bias + k + N * A);
        store<kNarrow>(to + N * A, activated<kNarrow>(s_.activation, value));
      }
    }
  }

  // What of the input a window is: outer x inner runs of `length` numbers side by side, in the
  // order of pack_direct's weights.
  struct Runs {
    std::ptrdiff_t row, column;  // between two windows, below and beside each other
    std::ptrdiff_t outer_step, inner_step;
    int outer, inner, length;
    std::size_t first;

    explicit Runs(const ConvStep& s) {
      if (s.planar) {
        row = inner_step = s.image.plain_pitch();
        column = 1;
        outer_step = row * s.image.rows;
        outer = s.c, inner = R, length = R;
        first = s.image.plain();
        return;
      }
      row = outer_step = std::ptrdiff_t{s.in.cols} * s.in.pitch;
      column = inner_step = s.in.pitch;
      const bool is_dense = s.in.pitch == s.c;
      outer = R, inner = is_dense ? 1 : R, length = is_dense ? R * s.c : s.c;
      first = 0;
    }
    std::size_t at(int y, int x) const { return first + y * row + x * column; }
  };

  const ConvStep& s_;
  const float* in_;
  float* out_;
  float* rows_;   // [AH] of what measure() sums up
  float* sizes_;  // [2, step] l(x) of a row's pixels, and e(x)
  const Runs runs_;
  const float* windows_[kDirectOutputs];   // of outputs that wait: the first
  std::size_t positions_[kDirectOutputs];  // where they go
  int count_ = 0;                          // of them
  int begin_;                              // row of tiles
  int next_;                               // row to measure
};

// Computes those outputs of some rows of tiles again that are not to be Winograd's.
template <int MH, int MW, int R>
[[gnu::noinline]] void finish_windows(const ConvStep& s, const float* in, float* out,
                                      float* scratch, int begin, int end) {
  if (s.pool) {
    Measured<MH, MW, R, true>(s, in, out, scratch, begin).finish(end);
  } else {
    Measured<MH, MW, R, false>(s, in, out, scratch, begin).finish(end);
  }
}

template <int R, int W, int L>
void run_planar(const ConvStep& s, const float* image, float* out, float* scratch, int begin,
                int end) {
  float* v = scratch + s.v_offset;
  if (s.along_rows()) {
    for (int first = begin; first < end; first += kRowsTogether) {
      const int rows = end - first < kRowsTogether ? end - first : kRowsTogether;
      transform_rows<R, L>(s, image, v, first, rows);
      for (int i = 0; i < rows; ++i) {
        multiply_planar<2, R, W, L>(s, v + i * 2 * (R + 3) * L, kRowsOfV<R> * (R + 3) * L, out,
                                    first + i);
      }
    }
    return finish_windows<2, 4, R>(s, image, out, scratch, begin, end);
  }
  for (int row = begin; row < end; ++row) {
    transform_planar<R, L>(s, image, scratch + s.p_offset, v, row);
    multiply_planar<4, R, W, L>(s, v, (R + 3) * (R + 3) * L, out, row);
  }
  finish_windows<4, 4, R>(s, image, out, scratch, begin, end);
}

template <int R, int W>
void run_planar(const ConvStep& s, const float* image, float* out, float* scratch, int begin,
                int end) {
  if (s.tile_lanes == kWide) {
    return run_planar<R, W, kWide>(s, image, out, scratch, begin, end);
  }
  run_planar<R, W, kNarrow>(s, image, out, scratch, begin, end);
}

template <int W, int B>
void multiply_frequencies(const ConvStep& s, const float* v, const float* u, float* m,
                          int frequencies, int tiles) {
  for (int f = 0; f < frequencies; ++f) {
    multiply<W, B>(v + f * s.v_pitch, s.v_channels, 1, u + std::size_t(f) * s.c * B * W, s.c,
                   m + f * s.m_pitch, s.k_pitch, tiles);
  }
}

// The same for the last block where it has 20 channels.
void multiply_frequencies_20(const ConvStep& s, const float* v, const float* u, float* m,
                             int frequencies, int tiles) {
  for (int f = 0; f < frequencies; ++f) {
    multiply_20(v + f * s.v_pitch, s.v_channels, u + std::size_t(f) * s.c * 20, s.c,
                m + f * s.m_pitch, s.k_pitch, tiles);
  }
}

template <int MH, int MW, int R, int W>
void run(const ConvStep& s, const float* in, float* out, float* scratch, int begin, int end) {
  constexpr int frequencies = (MH + R - 1) * (MW + R - 1);
  float* v = scratch + s.v_offset;
  float* m = scratch + s.m_offset;
  float* columns = scratch + s.p_offset;
  for (int row = begin; row < end; row += s.group_rows) {
    const int rows = end - row < s.group_rows ? end - row : s.group_rows;
    for (int r = 0; r < rows; ++r) {
      float* to = v + std::size_t(r) * s.tiles_x * s.v_channels;
      if (s.in.pitch % kWide == 0) {
        transform_input<MH, MW, R, kWide>(s, in, columns, to, row + r);
      } else {
        transform_input<MH, MW, R, kNarrow>(s, in, columns, to, row + r);
      }
    }
    const float* u = s.weight;
    const int tiles = rows * s.tiles_x;
    for (int k = 0; k < s.k_pitch;) {
      const int block = block_size((s.k_pitch - k) / W);
      if (s.ends_in_20 && k + block * W == s.k_pitch) {
        multiply_frequencies_20(s, v, u, m + k, frequencies, tiles);
        break;
      }
      if (block == 3) multiply_frequencies<W, 3>(s, v, u, m + k, frequencies, tiles);
      if (block == 2) multiply_frequencies<W, 2>(s, v, u, m + k, frequencies, tiles);
      if (block == 1) multiply_frequencies<W, 1>(s, v, u, m + k, frequencies, tiles);
      u += std::size_t(frequencies) * s.c * block * W;
      k += block * W;
    }
    for (int r = 0; r < rows; ++r) {
      const float* from = m + std::size_t(r) * s.tiles_x * s.k_pitch;
      if (s.pool) {
        transform_output<MH, MW, R, true>(s, from, out, row + r);
      } else {
        transform_output<MH, MW, R, false>(s, from, out, row + r);
      }
    }
  }
  finish_windows<MH, MW, R>(s, in, out, scratch, begin, end);
}

template <int W>
void run_tiles(const ConvStep& s, const float* in, float* out, float* scratch, int begin, int end) {
  const auto run_with = [&](auto function) {
    function(s, in, out, scratch, begin, end);
  };
  if (s.planar) return run_with(s.r == 5 ? run_planar<5, W> : run_planar<3, W>);
  if (s.r == 3) return run_with(s.tile_h == 4 ? run<4, 4, 3, W> : run<2, 2, 3, W>);
  if (s.tile_h == 2) return run_with(run<2, 2, 5, W>);
  run_with(s.tile_w == 4 ? run<4, 4, 5, W> : run<4, 2, 5, W>);
}

}  // namespace

void fused_winograd(const ConvStep& s, const float* in, float* out, float* scratch, int begin,
                    int end) {
  if (s.lanes == kWide) return run_tiles<kWide>(s, in, out, scratch, begin, end);
  run_tiles<kNarrow>(s, in, out, scratch, begin, end);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
