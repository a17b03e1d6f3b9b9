// conv2d + activation + 2x2 max-pool by Winograd's convolution, a few rows of tiles at a time:
//
//   V[f, t, c] = B^T d B of tile t's input; M[f, t, k] = sum over c of V[f, t, c] * U[f, c, k];
//   output of tile t = pool(A^T M A) + bias, activated
//
// SIMD lanes are channels throughout (no shuffles, any image size), except where a first layer has
// fewer channels than lanes: there they are neighbouring tiles (PlanarLayout). The bias and a
// rising activation commute with the maximum, so they are applied once a window. Every tile is
// computed by itself, so results depend neither on the number of threads nor on how tiles are
// grouped.
#include "cpu/fused/activation.h"
#include "cpu/fused/block.h"
#include "cpu/fused/cook_toom.h"
#include "cpu/fused/multiply.h"

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
    for (std::size_t x = 0; x < row; x += L) {
      Vec<L> d[AH], o[AH];
#pragma GCC unroll 8
      for (int i = 0; i < AH; ++i) d[i] = load<L>(top + i * row + x);
      input_transform(d, o);
#pragma GCC unroll 8
      for (int i = 0; i < AH; ++i) store<L>(rows + i * row + x, o[i]);
    }
    for (int i = 0; i < AH; ++i) {
      for (int t = 0; t < s.tiles_x; t += L) {
        const float* from = rows + i * row + t;
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

template <int MH, int R, int W, int L>
void multiply_planar(const ConvStep& s, const float* v, float* out, int tile_row) {
  constexpr int most = kRegisters == 32 ? 2 : 1;
  constexpr int frequencies = (MH + R - 1) * (4 + R - 1);
  for (int k = 0; k < s.k_pitch; k += W) {
    const float* u = s.weight + std::size_t(k) * s.c * frequencies;
    for (int first = 0; first < s.tiles_x; first += L) {
      const float* values = v + std::size_t(first) * s.c * frequencies;
      const int tiles = s.tiles_x - first < L ? s.tiles_x - first : L;
      int t = 0;
      for (; t + most <= tiles; t += most)
        multiply_and_finish<MH, R, W, L, most>(s, values + t, u, out, tile_row, first + t, k);
      for (; t < tiles; ++t)
        multiply_and_finish<MH, R, W, L, 1>(s, values + t, u, out, tile_row, first + t, k);
    }
  }
}

template <int MH, int R, int W, int L>
void run_planar(const ConvStep& s, const float* image, float* out, float* scratch, int begin,
                int end) {
  float* v = scratch + s.v_offset;
  float* rows = scratch + s.p_offset;
  for (int row = begin; row < end; ++row) {
    transform_planar<MH, R, L>(s, image, rows, v, row);
    multiply_planar<MH, R, W, L>(s, v, out, row);
  }
}

template <int R, int W>
void run_planar(const ConvStep& s, const float* image, float* out, float* scratch, int begin,
                int end) {
  if (s.tile_lanes == kWide) return run_planar<4, R, W, kWide>(s, image, out, scratch, begin, end);
  run_planar<4, R, W, kNarrow>(s, image, out, scratch, begin, end);
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
    }
  }
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
