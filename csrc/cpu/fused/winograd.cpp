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

// The same for a planar image: lanes are places of one phase, then `L` tiles; V is [tiles / L, c,
// f, L].
template <int MH, int R, int L>
void transform_planar(const ConvStep& s, const float* image, float* rows, float* v, int tile_row) {
  constexpr int MW = 4;
  constexpr int AH = MH + R - 1, AW = MW + R - 1;
  const PlanarLayout& p = s.image;
  const std::size_t row = std::size_t{4} * p.pitch;
  std::size_t place[AW];  // of a tile's column j
  for (int j = 0; j < AW; ++j) {
    const int x = j + 4 * p.margin - s.in.left;  // in.left is the padding
    place[j] = std::size_t(x % 4) * p.pitch + x / 4;
  }
  for (int c = 0; c < p.c; ++c) {
    const float* top = image + (std::size_t(c) * p.rows + std::size_t(tile_row) * MH) * row;
    constexpr bool along_rows = MH < MW;
    for (std::size_t x = 0; x < row && !along_rows; x += L) {
      Vec<L> d[AH], o[AH];
#pragma GCC unroll 8
      for (int i = 0; i < AH; ++i) d[i] = load<L>(top + i * row + x);
      input_transform(d, o);
#pragma GCC unroll 8
      for (int i = 0; i < AH; ++i) store<L>(rows + i * row + x, o[i]);
    }
    for (int i = 0; i < AH; ++i) {
      for (int t = 0; t < s.tiles_x; t += L) {
        const float* from = (along_rows ? top : rows) + i * row + t;
        float* to = v + (std::size_t(t) * p.c + std::size_t(c) * L) * (AH * AW) + i * AW * L;
        Vec<L> d[AW], o[AW];
#pragma GCC unroll 8
        for (int j = 0; j < AW; ++j) d[j] = load<L>(from + place[j]);
        input_transform(d, o);
#pragma GCC unroll 8
        for (int j = 0; j < AW; ++j) store<L>(to + j * L, o[j]);
      }
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

// The same for tiles of rows: V's rows are the image's, and each row of outputs sums up those it
// reads.
template <int MH, int R, int W, int L, int T>
CNN_ENGINE_INLINE void multiply_along_rows(const ConvStep& s, const float* v, const float* u,
                                           float* out, int tile_row, int tile, int k) {
  constexpr int MW = 4;
  constexpr int AH = MH + R - 1, AW = MW + R - 1;
  Vec<W> half[T][MH][AW];
#pragma GCC unroll 8
  for (int j = 0; j < AW; ++j) {
    Vec<W> m[T][MH] = {};
    const float* weights = u + j * W;
    const float* values = v + j * L;
    for (int c = 0; c < s.c; ++c, weights += R * AW * W, values += AH * AW * L) {
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

template <int MH, int R, int W, int L>
void multiply_planar(const ConvStep& s, const float* v, float* out, int tile_row) {
  constexpr bool along_rows = MH < 4;
  constexpr int most = (kRegisters == 32 ? 2 : 1) * (along_rows ? 2 : 1);
  constexpr int frequencies = (MH + R - 1) * (4 + R - 1);  // of V
  constexpr int weights = (along_rows ? R : MH + R - 1) * (4 + R - 1);
  const auto some = [&](auto size, const float* values, const float* u, int tile, int k) {
    constexpr int T = decltype(size)::value;
    if constexpr (along_rows) {
      multiply_along_rows<MH, R, W, L, T>(s, values, u, out, tile_row, tile, k);
    } else {
      multiply_and_finish<MH, R, W, L, T>(s, values, u, out, tile_row, tile, k);
    }
  };
  for (int k = 0; k < s.k_pitch; k += W) {
    const float* u = s.weight + std::size_t(k) * s.c * weights;
    for (int first = 0; first < s.tiles_x; first += L) {
      const float* values = v + std::size_t(first) * s.c * frequencies;
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
// Columns are dealt out by what is left of them modulo MW, so that lanes are tiles; what lanes past
// the last tile hold does not count. Outputs that are left out wait until there are enough to share
// the reading of weights.
template <int MH, int MW, int R>
class Measured {
 public:
  static constexpr int AH = MH + R - 1, AW = MW + R - 1;

  Measured(const ConvStep& s, const float* in, float* out, float* scratch, int begin)
      : s_(s),
        in_(in),
        out_(out),
        pitch_(s.sums_pitch),
        terms_(s.r * s.s * s.c),
        rows_(scratch + s.b_offset),
        sizes_(rows_ + AH * s.measured_row()),
        squares_(sizes_ + MW * pitch_),
        windows_(scratch + s.b_offset + s.measured()),
        next_(begin * MH) {}

  // Finds the outputs of a row of tiles, which Winograd's have been written to, that are not to be.
  void finish(int tile_row) {
    const int top = tile_row * MH;
    for (; next_ < top + AH; ++next_) measure(next_);
    for (int first = 0; first < s_.tiles_x; first += W) {
      const IntVec<W> found = outside(top, first);
      for (int i = 0; i < W && first + i < s_.tiles_x; ++i) {
        if (found[i] != 0) add(top, first + i, found[i]);
      }
    }
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

 private:
  static constexpr int W = kNarrow;

  float* row(int y) const { return rows_ + y % AH * s_.measured_row(); }

  // l(x) and e(x) of one row's places, then what each output and each tile reads of them.
  void measure(int y) {
    for (int phase = 0; phase < MW; ++phase) {
      if (s_.planar) {
        measure_planar(y, phase);
      } else {
        measure_places(y, phase);
      }
    }
    float* held = row(y);
    float* part = held + MW * pitch_;
    float* tiles = part + MW * pitch_;
    const WindowBound& bound = s_.bound;
    for (int t = 0; t < s_.tiles_x; t += W) {
      Vec<W> size[AW], square[AW], tile = {};
#pragma GCC unroll 8
      for (int k = 0; k < AW; ++k) {
        const int at = k % MW * pitch_ + k / MW + t;
        size[k] = load<W>(sizes_ + at);
        square[k] = load<W>(squares_ + at);
        tile += square[k];
      }
      store<W>(tiles + t, tile);
#pragma GCC unroll 4
      for (int j = 0; j < MW; ++j) {
        Vec<W> sum = {}, squares = {};
#pragma GCC unroll 5
        for (int k = 0; k < R; ++k) {
          sum += bound.columns[k] * size[j + k];
          squares += square[j + k];
        }
        store<W>(held + j * pitch_ + t, sum);
        store<W>(part + j * pitch_ + t, squares);
      }
    }
  }

  // Of one phase, what tiles read.
  int places() const { return s_.tiles_x + (AW - 1) / MW; }

  template <int L>
  void store_places(int phase, int first, Vec<L> size, Vec<L> square) {
    store<L>(sizes_ + phase * pitch_ + first, size);
    store<L>(squares_ + phase * pitch_ + first,
             square + (size > 0.0f ? splat<L>(kSomething) : Vec<L>{}));
  }

  void measure_planar(int y, int phase) {
    const PlanarLayout& p = s_.image;
    const int x = phase + 4 * p.margin - s_.in.left;  // in.left is the padding
    const float* row = in_ + (std::size_t(y) * 4 + x % 4) * p.pitch + x / 4;
    const std::size_t channel = std::size_t(p.rows) * 4 * p.pitch;
    for (int first = 0; first < places(); first += kWide) {
      Vec<kWide> size = {}, square = {};
      for (int c = 0; c < p.c; ++c) {
        const auto value = load<kWide>(row + c * channel + first);
        size += absolute(value);
        square += value * value;
      }
      store_places<kWide>(phase, first, size, square);
    }
  }

  void measure_places(int y, int phase) {
    const Layout& p = s_.in;
    const float* row = in_ + std::size_t(y) * p.cols * p.pitch;
    for (int first = 0; first < places(); first += W) {
      Vec<W> l[W] = {}, e[W] = {};
#pragma GCC unroll 8
      for (int i = 0; i < W; ++i) {
        const int x = phase + MW * (first + i);
        const float* from = row + std::size_t(x < p.cols ? x : p.cols - 1) * p.pitch;
        for (int c = 0; c < p.pitch; c += W) {
          const Vec<W> value = load<W>(from + c);
          l[i] += absolute(value);
          e[i] += value * value;
        }
      }
      store_places<W>(phase, first, lane_sums<W>(l), lane_sums<W>(e));
    }
  }

  // Of tiles from `first`: their outputs that are outside the bound, a bit each, by rows.
  IntVec<W> outside(int top, int first) const {
    const WindowBound& bound = s_.bound;
    const float* rows[AH];
    Vec<W> energy = {};
    for (int i = 0; i < AH; ++i) {
      rows[i] = row(top + i) + first;
      energy += load<W>(rows[i] + 2 * MW * pitch_);
    }
    Vec<W> tile;
    for (int i = 0; i < W; ++i) tile[i] = std::sqrt(bound.tile * energy[i]);
    IntVec<W> found = {};
    for (int i = 0; i < MH; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < MW; ++j) {
        Vec<W> held = {}, part = {};
#pragma GCC unroll 5
        for (int r = 0; r < R; ++r) {
          held += bound.rows[r] * load<W>(rows[i + r] + j * pitch_);
          part += load<W>(rows[i + r] + (MW + j) * pitch_);
        }
        found |= ~is_inside(bound, held, part, tile) & (1 << (i * MW + j));
      }
    }
    return found & (energy != 0.0f);  // of zeros alone: exact
  }

  // Outputs of tile t that are found, or that are pooled with one that is.
  void add(int top, int t, int found) {
    const int step = s_.pool ? 2 : 1;
    const int pooled = s_.pool ? 3 | 3 << MW : 1;
    for (int i = 0; i < MH; i += step) {
      for (int j = 0; j < MW; j += step) {
        if ((found >> (i * MW + j) & pooled) == 0) continue;
        if ((top + i) / step >= s_.out.h || (t * MW + j) / step >= s_.out.w) continue;
        if (count_ == kDirectWindows) flush();
        for (int a = 0; a < step * step; ++a, ++count_) {
          places_[count_][0] = top + i + a / step;
          places_[count_][1] = t * MW + j + a % step;
          write_window(places_[count_][0], places_[count_][1], windows_ + count_ * terms_);
        }
      }
    }
  }

  template <int L>
  [[gnu::noinline]] void compute() {
    const int step = s_.pool ? 2 : 1;
    float* sums = windows_ + kDirectWindows * terms_;
    const float* u = s_.direct;
    const int count = (count_ + 3) / 4 * 4;  // fours take no longer than one
    for (int k = 0; k < s_.k_pitch;) {
      const int block = block_size((s_.k_pitch - k) / L);
      const auto some = [&](auto size) {
        constexpr int B = decltype(size)::value;
        multiply<L, B>(windows_, terms_, 1, u, terms_, sums + k, s_.k_pitch, count);
      };
      if (block == 3) some(std::integral_constant<int, 3>());
      if (block == 2) some(std::integral_constant<int, 2>());
      if (block == 1) some(std::integral_constant<int, 1>());
      u += std::size_t(terms_) * block * L;
      k += block * L;
    }
    for (int i = 0; i < count_; i += step * step) {
      float* to = out_ + s_.out.at(places_[i][0] / step, places_[i][1] / step);
      for (int k = 0; k < s_.k_pitch; k += L) {
        Vec<L> value = load<L>(sums + i * s_.k_pitch + k);
        for (int a = 1; a < step * step; ++a) {
          value = maximum(value, load<L>(sums + (i + a) * s_.k_pitch + k));
        }
        store<L>(to + k, activated<L>(s_.activation, value + load<L>(s_.bias + k)));
      }
    }
  }

  // [r][s][c]
  void write_window(int y, int x, float* to) const {
    if (!s_.planar) {
      const Layout& p = s_.in;
      // Channels without a gap make a row one run.
      const int runs = p.pitch == s_.c ? 1 : R, count = p.pitch == s_.c ? R * s_.c : s_.c;
      for (int i = y; i < y + R; ++i) {
        const float* from = in_ + (std::size_t(i) * p.cols + x) * p.pitch;
        for (int run = 0; run < runs; ++run, from += p.pitch, to += count) {
          __builtin_memcpy(to, from, count * sizeof(float));
        }
      }
      return;
    }
    const PlanarLayout& p = s_.image;
    std::size_t places[R];
    for (int j = 0; j < R; ++j) {
      const int at = x + j + 4 * p.margin - s_.in.left;
      places[j] = std::size_t(at % 4) * p.pitch + at / 4;
    }
    const std::size_t row = std::size_t{4} * p.pitch;
    const float* from = in_ + y * row;
#pragma GCC unroll 1
    for (int i = 0; i < R; ++i, from += row, to += R * s_.c) {
#pragma GCC unroll 1
      for (int c = 0; c < s_.c; ++c) {
        const float* channel = from + c * p.rows * row;
#pragma GCC unroll 5
        for (int j = 0; j < R; ++j) to[j * s_.c + c] = channel[places[j]];
      }
    }
  }

  const ConvStep& s_;
  const float* in_;
  float* out_;
  const int pitch_, terms_;
  float* rows_;     // [AH] of: [MW][tiles] of l(x) by output, the same of e(x), [tiles] of e(x)
  float* sizes_;    // [MW][tiles and more], of one row's places
  float* squares_;  // the same
  float* windows_;  // [kDirectWindows][terms] that wait, and their sums
  int places_[kDirectWindows][2];
  int count_ = 0;  // of them
  int next_;       // row to measure
};

template <int MH, int R, int W, int L>
void run_planar(const ConvStep& s, const float* image, float* out, float* scratch, int begin,
                int end) {
  float* v = scratch + s.v_offset;
  float* rows = scratch + s.p_offset;
  Measured<MH, 4, R> measured(s, image, out, scratch, begin);
  for (int row = begin; row < end; ++row) {
    transform_planar<MH, R, L>(s, image, rows, v, row);
    multiply_planar<MH, R, W, L>(s, v, out, row);
    measured.finish(row);
  }
  measured.flush();
}

template <int R, int W, int L>
void run_planar(const ConvStep& s, const float* image, float* out, float* scratch, int begin,
                int end) {
  if (s.along_rows()) return run_planar<2, R, W, L>(s, image, out, scratch, begin, end);
  run_planar<4, R, W, L>(s, image, out, scratch, begin, end);
}

template <int R, int W>
void run_planar(const ConvStep& s, const float* image, float* out, float* scratch, int begin,
                int end) {
  if (s.tile_lanes == kWide) return run_planar<R, W, kWide>(s, image, out, scratch, begin, end);
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

template <int MH, int MW, int R, int W>
void run(const ConvStep& s, const float* in, float* out, float* scratch, int begin, int end) {
  constexpr int frequencies = (MH + R - 1) * (MW + R - 1);
  float* v = scratch + s.v_offset;
  float* m = scratch + s.m_offset;
  float* columns = scratch + s.p_offset;
  Measured<MH, MW, R> measured(s, in, out, scratch, begin);
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
      measured.finish(row + r);
    }
  }
  measured.flush();
}

template <int W>
void run_tiles(const ConvStep& s, const float* in, float* out, float* scratch, int begin, int end) {
  if (s.planar) {
    if (s.r == 5) return run_planar<5, W>(s, in, out, scratch, begin, end);
    return run_planar<3, W>(s, in, out, scratch, begin, end);
  }
  if (s.r == 5) {
    if (s.tile_h == 4 && s.tile_w == 4) return run<4, 4, 5, W>(s, in, out, scratch, begin, end);
    if (s.tile_h == 4) return run<4, 2, 5, W>(s, in, out, scratch, begin, end);
    return run<2, 2, 5, W>(s, in, out, scratch, begin, end);
  }
  if (s.tile_h == 4) return run<4, 4, 3, W>(s, in, out, scratch, begin, end);
  return run<2, 2, 3, W>(s, in, out, scratch, begin, end);
}

}  // namespace

void fused_winograd(const ConvStep& s, const float* in, float* out, float* scratch, int begin,
                    int end) {
  if (s.lanes == kWide) return run_tiles<kWide>(s, in, out, scratch, begin, end);
  run_tiles<kNarrow>(s, in, out, scratch, begin, end);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
