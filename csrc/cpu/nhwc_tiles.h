// The tiles of nhwc.h. Included by one file of an instruction set.
#pragma once

#include "cpu/nhwc.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// What follows the sums of a tile, whose first output is `output`; `whole`: all filters of its
// vectors are there. Of what is asked for each vector, what most convolutions need is asked once:
// it takes as long as the rest.
template <int W, int B, int T, bool whole, typename Lane>
CNN_ENGINE_INLINE void tile_epilogue(const TileOf<Lane>& p, const Vec<W> (&sum)[T][B],
                                     float* output, const float* residual) {
  const float* added = residual ? residual : output;
  const auto each = [&](const auto& finish) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const int count = p.valid - b * W;
      if (!whole && count <= 0) break;
      const auto get = [count](const float* from) {
        return whole ? load<W>(from) : load_some<W>(from, count);
      };
      Vec<W> bias{};
      if (p.last && p.last->bias) bias = get(p.last->bias + b * W);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        float* y = output + t * p.y_stride + b * W;
        const float* add = added + t * p.residual_stride + b * W;
        const Vec<W> made =
            finish(sum[t][b], bias, [&] { return get(y); }, [&] { return get(add); });
        whole ? store<W>(y, made) : store_some<W>(y, made, count);
      }
    }
  };
  using Sum = const Vec<W>&;
  if (!p.last) {
    if (p.first) return each([](Sum value, Sum, const auto&, const auto&) { return value; });
    return each([](Sum value, Sum, const auto& y, const auto&) { return value + y(); });
  }
  const Epilogue last = *p.last;
  if (!last.hard_swish && last.highest == std::numeric_limits<float>::infinity()) {
    const Vec<W> lowest = splat<W>(last.lowest);
    const auto plain = [&](const auto& total) {
      if (!residual) {
        return each([&](Sum value, Sum bias, const auto& y, const auto&) {
          return raised(lowest, total(value, y) + bias);
        });
      }
      each([&](Sum value, Sum bias, const auto& y, const auto& add) {
        return raised(lowest, total(value, y) + bias + add());
      });
    };
    if (p.first) return plain([](Sum value, const auto&) { return value; });
    return plain([](Sum value, const auto& y) { return value + y(); });
  }
  each([&](Vec<W> value, Sum bias, const auto& y, const auto& add) {
    if (!p.first) value += y();
    value += bias;
    if (residual) value += add();
    return finished(last, value);
  });
}
template <int W, int B, int T, typename Lane>
CNN_ENGINE_INLINE void finish_tile(const TileOf<Lane>& p, const Vec<W> (&sum)[T][B], float* output,
                                   const float* residual) {
  tile_epilogue<W, B, T, true>(p, sum, output, residual);
}
// Of a tile of which the first filters alone are there. Masks inlined beside the products would
// take registers from the accumulators of every tile.
template <int W, int B, int T, typename Lane>
[[gnu::noinline]] void masked_epilogue(const TileOf<Lane>& p, const float* accumulators,
                                       float* output, const float* residual) {
  Vec<W> sum[T][B];
  for (int i = 0; i < T * B; ++i) sum[i / B][i % B] = load<W>(accumulators + i * W);
  tile_epilogue<W, B, T, false>(p, sum, output, residual);
}
template <int W, int B, int T, typename Lane>
CNN_ENGINE_INLINE void finish_edge(const TileOf<Lane>& p, const Vec<W> (&sum)[T][B], float* output,
                                   const float* residual) {
  float accumulators[T * B * W];
  // Unrolled: an index that is not known would keep the accumulators of every tile in memory.
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) store<W>(accumulators + (t * B + b) * W, sum[t][b]);
  }
  masked_epilogue<W, B, T>(p, accumulators, output, residual);
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
    const float* prefetch = p.prefetch->take(std::int64_t{p.kernel_offset_count} * p.channels);
    const int prefetch_step = prefetch ? kFilterGroup : 0;
    if (!prefetch) prefetch = reinterpret_cast<const float*>(w);
    for (int a = 0; a < p.kernel_offset_count; ++a) {
      const Unit* x = input + p.kernel_offsets[a];
      if (p.positions) w = p.w + p.positions[a] * p.channels * kFilterGroup;
      for (int c = 0; c < p.channels; ++c, ++x, w += kFilterGroup) {
        __builtin_prefetch(prefetch, 0, 2);
        prefetch += prefetch_step;
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
using NhwcRowCounts = std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 7, 8, 12, 14>;

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
