// The tiles of nhwc.h. Included by one file of an instruction set.
#pragma once

#include "cpu/nhwc.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// What follows the sums of a tile of whole vectors, whose first output is `output`. Of what is
// asked for each vector, what most convolutions need is asked once: it takes as long as the rest.
template <int W, int B, int T, typename Lane>
CNN_ENGINE_INLINE void finish_tile(const TileOf<Lane>& p, const Vec<W> (&sum)[T][B], float* output,
                                   const float* residual) {
  const float* added = residual ? residual : output;
  const auto each = [&](const auto& finish) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      Vec<W> bias{};
      if (p.last && p.last->bias) bias = load<W>(p.last->bias + b * W);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        float* y = output + t * p.y_stride + b * W;
        store<W>(y, finish(sum[t][b], y, bias, added + t * p.residual_stride + b * W));
      }
    }
  };
  using Sum = const Vec<W>&;
  if (!p.last) {
    if (p.first) return each([](Sum value, const float*, Sum, const float*) { return value; });
    return each([](Sum value, const float* y, Sum, const float*) { return value + load<W>(y); });
  }
  const Epilogue last = *p.last;
  if (!last.hard_swish && last.highest == std::numeric_limits<float>::infinity()) {
    const Vec<W> lowest = splat<W>(last.lowest);
    const auto plain = [&](const auto& total) {
      if (!residual) {
        return each([&](Sum value, const float* y, Sum bias, const float*) {
          return raised(lowest, total(value, y) + bias);
        });
      }
      each([&](Sum value, const float* y, Sum bias, const float* add) {
        return raised(lowest, total(value, y) + bias + load<W>(add));
      });
    };
    if (p.first) return plain([](Sum value, const float*) { return value; });
    return plain([](Sum value, const float* y) { return value + load<W>(y); });
  }
  each([&](Vec<W> value, const float* y, Sum bias, const float* add) {
    if (!p.first) value += load<W>(y);
    value += bias;
    if (residual) value += load<W>(add);
    return finished(last, value);
  });
}

// What follows the sums [rows, width] of a tile of which the first filters alone are there.
template <typename Lane>
void finish_some(const TileOf<Lane>& p, const float* sums, int rows, int width, float* output,
                 const float* residual) {
  for (int t = 0; t < rows; ++t) {
    float* y = output + t * p.y_stride;
    for (int k = 0; k < p.valid; ++k) {
      float value = sums[t * width + k];
      if (!p.first) value += y[k];
      if (const Epilogue* last = p.last) {
        if (last->bias) value += last->bias[k];
        if (residual) value += residual[t * p.residual_stride + k];
        value = finished_one(*last, value);
      }
      y[k] = value;
    }
  }
}
template <int W, int B, int T, typename Lane>
CNN_ENGINE_INLINE void finish_edge(const TileOf<Lane>& p, const Vec<W> (&sum)[T][B], float* output,
                                   const float* residual) {
  float sums[T * B * W];
  for (int t = 0; t < T; ++t) {
    for (int b = 0; b < B; ++b) store<W>(sums + (t * B + b) * W, sum[t][b]);
  }
  finish_some(p, sums, T, B * W, output, residual);
}

template <typename Lane, int W, int B, int T>
void nhwc_tile(const TileOf<Lane>& p) {
  using Unit = typename Lane::Unit;
  using Sum = typename Lane::template Sum<W>;
  const Unit* input = p.x;
  const typename Lane::Residual* residual = p.residual;
  typename Lane::Output* output = p.y;
  for (int tile = 0; tile < p.tiles; ++tile) {
    Sum sum[T][B] = {};
    const Unit* w = p.w;
    const float* ahead = p.ahead->take(std::int64_t{p.tap_count} * p.channels);
    const int ahead_step = ahead ? kFilterGroup : 0;
    if (!ahead) ahead = reinterpret_cast<const float*>(w);
    for (int a = 0; a < p.tap_count; ++a) {
      const Unit* x = input + p.taps[a];
      for (int c = 0; c < p.channels; ++c, ++x, w += kFilterGroup) {
        __builtin_prefetch(ahead, 0, 2);
        ahead += ahead_step;
        Sum weights[B];
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) {
          weights[b] = load_as<Sum>(w + b * W / kFilterGroup * p.group_size + b * W % kFilterGroup);
        }
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          const Unit value = x[t * p.x_stride];
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) Lane::multiply_add(sum[t][b], weights[b], value);
        }
      }
    }
    if (p.valid >= B * W) {
      finish_tile<W, B, T>(p, sum, output, residual);
    } else {
      finish_edge<W, B, T>(p, sum, output, residual);
    }
    input += T * p.x_stride;
    output += T * p.y_stride;
    if (residual) residual += T * p.residual_stride;
  }
}

// Numbers of rows that there are tiles of.
using NhwcRowCounts = std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 8, 12>;

template <typename Lane, int W, int B, int... T>
constexpr void fill_tiles(TileFunction<Lane> (&to)[kNhwcMostRows + 1],
                          std::integer_sequence<int, T...>) {
  ((to[T] = T > kNhwcRows<B> ? nullptr : nhwc_tile < Lane, W, B, T <= kNhwcRows<B> ? T : 1 >), ...);
}

template <typename Lane>
constexpr TilesOf<Lane> make_tiles() {
  TilesOf<Lane> made;
  fill_tiles<Lane, kWide, 1>(made.wide[1], NhwcRowCounts());
  fill_tiles<Lane, kWide, 2>(made.wide[2], NhwcRowCounts());
  if constexpr (kNhwcVectors == 4) {
    fill_tiles<Lane, kWide, 3>(made.wide[3], NhwcRowCounts());
    fill_tiles<Lane, kWide, 4>(made.wide[4], NhwcRowCounts());
  }
  fill_tiles<Lane, kNarrow, 1>(made.narrow, NhwcRowCounts());
  return made;
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
