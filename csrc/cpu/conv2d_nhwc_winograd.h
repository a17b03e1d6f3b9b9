// Winograd's method of conv2d_nhwc: some tiles of MxM outputs at a time,
//
//   V[f, t, c] = B^T d B of tile t's input;  M[f, t, k] = sum over c of V[f, t, c] * U[f, c, k];
//   output of tile t = activation(A^T M A + bias + residual)
//
// with channels, then filters on SIMD lanes. Every tile is computed by itself, so results depend
// neither on the number of threads nor on how tiles are grouped.
#pragma once

#include "cpu/fused/cook_toom.h"
#include "cpu/fused/kernel_transform.h"
#include "cpu/nhwc.h"
#include "ops/conv2d_nhwc.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr std::int64_t kWinogradFloats = 160 << 10;   // of V and M: most of the second-level cache
constexpr std::int64_t kWinogradWeights = 128 << 10;  // U of more floats is read from further away
constexpr int kMostTiles = 64;

struct WinogradShape {
  int m, side, frequencies;  // outputs and inputs of a tile's side
  int tiles_x, area;         // tiles of a row, of an image
  std::int64_t tiles;        // of all images
  int c_pitch, k_pitch;
  int together;  // tiles of a task

  WinogradShape(const Conv2dShape& p, Conv2dMethod method)
      : m(method == Conv2dMethod::winograd4 ? 4 : 2), side(m + 2), frequencies(side * side) {
    tiles_x = (p.out_w() + m - 1) / m;
    area = tiles_x * ((p.out_h() + m - 1) / m);
    tiles = std::int64_t{p.n} * area;
    c_pitch = (p.c + kNarrow - 1) / kNarrow * kNarrow;
    k_pitch = filter_groups(p.k) * kFilterGroup;
    std::int64_t most = kWinogradFloats / (frequencies * (c_pitch + k_pitch));
    // All of U is read for the tiles of one task.
    const std::int64_t least =
        std::int64_t{frequencies} * p.c * k_pitch > kWinogradWeights ? 24 : 6;
    if (most < least) most = least;
    together = static_cast<int>(most > kMostTiles ? kMostTiles : most);
  }
  std::int64_t v_step(int count) const { return std::int64_t{count} * c_pitch + 16; }
  std::int64_t m_step(int count) const { return std::int64_t{count} * k_pitch + 16; }
  std::int64_t floats() const {
    return frequencies * (v_step(together) + m_step(together)) + c_pitch;
  }
};

inline std::int64_t winograd_scratch(const Conv2dShape& p, Conv2dMethod method) {
  return WinogradShape(p, method).floats();
}

template <int S, int W>
CNN_ENGINE_INLINE void input_tile(const float* const (&places)[S * S], int c, int count, float* v,
                                  std::int64_t step) {
  Vec<W> half[S][S];
#pragma GCC unroll 6
  for (int j = 0; j < S; ++j) {
    Vec<W> d[S], o[S];
#pragma GCC unroll 6
    for (int i = 0; i < S; ++i) d[i] = load_some<W>(places[i * S + j] + c, count);
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

template <int M>
void winograd_tiles(const float* input, const float* packed, const float* bias,
                    const float* residual, float* output, const Scratch& scratch,
                    const Conv2dShape& p, const WinogradShape& shape, const Conv2dPitches& pitches,
                    const Activation& activation, int threads) {
  constexpr int S = M + 2;
  const int out_h = p.out_h(), out_w = p.out_w();
  std::int64_t tasks = (shape.tiles + shape.together - 1) / shape.together;
  const int shares = filter_shares(tasks, p.k, threads);
  const std::int64_t cost = shape.together * S * S * std::int64_t{p.c} * p.k / shares;
  const Epilogue epilogue = activation.epilogue(bias);
  const std::int64_t zero = 0;
  parallel_for(tasks * shares, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    float* nothing = part.data();  // a place outside the image
    fill_zero(nothing, shape.c_pitch);
    float* v = nothing + shape.c_pitch;
    float* m = v + shape.frequencies * shape.v_step(shape.together);
    std::int64_t written = -1;
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t task = index / shares;
      const int share = static_cast<int>(index % shares);
      const std::int64_t first = shape.tiles * task / tasks;
      const int count = static_cast<int>(shape.tiles * (task + 1) / tasks - first);
      const std::int64_t v_step = shape.v_step(count), m_step = shape.m_step(count);
      if (task != written) {
        for (int t = 0; t < count; ++t) {
          const std::int64_t n = (first + t) / shape.area;
          const int tile = static_cast<int>((first + t) % shape.area);
          const int top = tile / shape.tiles_x * M - p.pad_top;
          const int left = tile % shape.tiles_x * M - p.pad_left;
          const float* places[S * S];
          for (int i = 0; i < S; ++i) {
            for (int j = 0; j < S; ++j) {
              const int y = top + i, x = left + j;
              const bool inside = y >= 0 && y < p.h && x >= 0 && x < p.w;
              places[i * S + j] = inside ? input + ((n * p.h + y) * p.w + x) * pitches.x : nothing;
            }
          }
          float* to = v + std::int64_t{t} * shape.c_pitch;
          int c = 0;
          for (; c + kWide <= p.c; c += kWide) input_tile<S, kWide>(places, c, kWide, to, v_step);
          for (; c < p.c; c += kNarrow) input_tile<S, kNarrow>(places, c, p.c - c, to, v_step);
        }
        written = task;
      }
      const int from = share_begin(p.k, share, shares), to = share_begin(p.k, share + 1, shares);
      const Epilogue nothing_after{nullptr, nullptr, -std::numeric_limits<float>::infinity(),
                                   std::numeric_limits<float>::infinity()};
      Product product{&zero,   1,   ChannelParts(p.c, 1), shape.c_pitch,
                      nullptr, p.k, shape.k_pitch,        0};
      for (int f = 0; f < S * S; ++f) {
        product.weights = packed + std::int64_t{f} * shape.k_pitch * p.c;
        multiply_runs(
            product, from, (to + kFilterGroup - 1) / kFilterGroup * kFilterGroup, nothing_after,
            [&](const auto& body) { body(v + f * v_step, m + f * m_step, nullptr, count); });
      }
      for (int t = 0; t < count; ++t) {
        const std::int64_t n = (first + t) / shape.area;
        const int tile = static_cast<int>((first + t) % shape.area);
        const int top = tile / shape.tiles_x * M, left = tile % shape.tiles_x * M;
        const std::int64_t place = (n * out_h + top) * out_w + left;
        const WinogradOutput at{output + place * pitches.y,
                                residual ? residual + place * pitches.residual : nullptr,
                                std::int64_t{out_w} * pitches.y,
                                pitches.y,
                                std::int64_t{out_w} * pitches.residual,
                                pitches.residual,
                                out_h - top < M ? out_h - top : M,
                                out_w - left < M ? out_w - left : M};
        const float* sums = m + std::int64_t{t} * shape.k_pitch;
        int k = from;
        for (; k + kWide <= to; k += kWide) {
          output_tile<M, kWide>(sums, m_step, at, epilogue, k, kWide);
        }
        for (; k < to; k += kNarrow) {
          output_tile<M, kNarrow>(sums, m_step, at, epilogue, k, to - k);
        }
        for (int i = 0; i < at.rows; ++i) {
          activation.apply(at.y + i * at.row + from, pitches.y, at.columns, to - from);
        }
      }
    }
  });
}

inline void winograd(const float* input, const float* packed, const float* bias,
                     const float* residual, float* output, const Scratch& scratch,
                     const Conv2dShape& p, const Conv2dPitches& pitches, Conv2dMethod method,
                     const Activation& activation, int threads) {
  const WinogradShape shape(p, method);
  if (method == Conv2dMethod::winograd4) {
    winograd_tiles<4>(input, packed, bias, residual, output, scratch, p, shape, pitches, activation,
                      threads);
  } else {
    winograd_tiles<2>(input, packed, bias, residual, output, scratch, p, shape, pitches, activation,
                      threads);
  }
}

// U = G g G^T, in float64 until the end: [frequencies][groups][channels in parts][kFilterGroup].
inline void winograd_pack(const float* weight, float* packed, const Conv2dShape& p,
                          Conv2dMethod method, int threads) {
  const WinogradShape shape(p, method);
  double g[8][5];
  fused::kernel_transform(shape.m, 3, g);
  const int side = shape.side;
  const std::int64_t step = std::int64_t{shape.k_pitch} * p.c;  // of a frequency
  parallel_for(filter_groups(p.k), std::int64_t{p.c} * 16 * 200, threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t group = begin; group < end; ++group) {
                   for (int c = 0; c < p.c; ++c) {
                     float* to = packed + (group * p.c + c) * kFilterGroup;
                     for (int i = 0; i < kFilterGroup; ++i) {
                       const std::int64_t k = group * kFilterGroup + i;
                       if (k >= p.k) {
                         for (int f = 0; f < side * side; ++f) to[f * step + i] = 0.0f;
                         continue;
                       }
                       const float* w = weight + (k * p.c + c) * 9;
                       double half[6][3];
                       for (int a = 0; a < side; ++a) {
                         for (int x = 0; x < 3; ++x) {
                           half[a][x] = g[a][0] * w[x] + g[a][1] * w[3 + x] + g[a][2] * w[6 + x];
                         }
                       }
                       for (int f = 0; f < side * side; ++f) {
                         const double* row = half[f / side];
                         const double* column = g[f % side];
                         to[f * step + i] = static_cast<float>(
                             row[0] * column[0] + row[1] * column[1] + row[2] * column[2]);
                       }
                     }
                   }
                 }
               });
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
