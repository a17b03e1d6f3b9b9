// Where Winograd's convolution may be used: for each output, by what its own window holds.
//
// A tile's outputs share products, which cancel where an output does not read them, but for their
// rounding. So the error of each is that of the whole tile, and where a window holds little beside
// its tile (zeros, a dark position beside a bright one, NaN), that is more than the window's own
// sum may have:
//
//   |error| <= (16 + K / 8) u S,  S = sum of |x||w| over the K terms of the window.
//
// Such outputs are computed directly. Of a filter, with e(.) the sum of squares and l(.) that of
// sizes, over channels, and w the root mean square, over channels, of its kernel offsets' norm:
//
//   error of Winograd's <= kappa u w sqrt(e(tile))   kappa measured, with signs at random and alike
//   S >= sum over kernel offsets of mean|w| l(x) - 2.5 spread|w| sqrt(e(window))
//
// The latter holds for values whose positions have nothing to do with those of the weights, short
// of two and a half standard deviations; it is negative where few values, or few weights, make up
// the sum. Of kernel offsets that are small for all channels, which images with rows or columns of
// zeros are sensitive to, twice their own mean is taken (of a row or a column of a few channels,
// four times). All filters share the least of each number, as parts of w. Included only by files
// that are compiled once for each instruction set.
#pragma once

#include <cmath>
#include <utility>

#include "cpu/fused/vector.h"
#include "cpu/fused/weight_bound.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Lanes of two vectors: of the second those whose number has the bit `apart`, each with the sum of
// itself and of the lane that is `apart` from it in its own vector.
template <int W, int apart, int... lane>
CNN_ENGINE_INLINE Vec<W> add_lanes(Vec<W> a, Vec<W> b, std::integer_sequence<int, lane...>) {
  constexpr IntVec<W> own = {(lane & apart ? W + lane : lane)...};
  constexpr IntVec<W> other = {((lane & apart ? W + lane : lane) ^ apart)...};
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);  // a blend and a shuffle
}

// Lane i of what is returned is the sum of the lanes of values[i].
template <int W, int apart = 1>
CNN_ENGINE_INLINE Vec<W> lane_sums(Vec<W> (&values)[W]) {
  if constexpr (apart == W) {
    return values[0];
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < W / 2 / apart; ++i) {
      values[i] = add_lanes<W, apart>(values[2 * i], values[2 * i + 1],
                                      std::make_integer_sequence<int, W>());
    }
    return lane_sums<W, apart * 2>(values);
  }
}

CNN_ENGINE_INLINE float absolute(float x) { return std::fabs(x); }

template <typename V>
CNN_ENGINE_INLINE V absolute(V x) {
  typedef std::int32_t Int __attribute__((vector_size(sizeof(V))));
  return reinterpret_cast<V>(reinterpret_cast<Int>(x) & 0x7fffffff);
}

// Squares of what is not zero may be less than the least number.
template <int W>
CNN_ENGINE_INLINE Vec<W> at_least(Vec<W> square, Vec<W> size) {
  return square + (size > 0.0f ? splat<W>(kSomething) : Vec<W>{});
}

// Whether outputs, one or a vector of them, may be Winograd's: sum of factors and l(x) of their
// windows, e(window), and the root of the factor and e(tile).
template <typename V>
CNN_ENGINE_INLINE auto is_inside(const WindowBound& bound, V held, V window, V tile) {
  const V rest = held - tile;
  return (rest > 0.0f) & (rest * rest > bound.spread * window + kLeastSquare);
}

// l(x) and e(x) of the positions of a tile, by columns, and what vectors read past them.
template <int S>
struct TileSums {
  float sizes[S * S + 4] = {}, squares[S * S + 4] = {};
};

// Outputs of a tile of MxM that are not to be Winograd's, a bit each, by rows; of its outputs,
// `rows` by `columns` count. Lanes are rows.
template <int M, int R>
inline unsigned outside_bound(const WindowBound& bound, const TileSums<M + R - 1>& sums, int rows,
                              int columns) {
  constexpr int S = M + R - 1, L = 4;
  static_assert(M <= L && S * S % L == 0);
  Vec<L> all{}, energies{};
#pragma GCC unroll 9
  for (int i = 0; i < S * S; i += L) {
    all += load<L>(sums.sizes + i);
    energies += load<L>(sums.squares + i);
  }
  if (all[0] + all[1] + all[2] + all[3] == 0.0f) return 0;  // zeros alone: exact
  const float energy = (energies[0] + energies[1]) + (energies[2] + energies[3]);
  const Vec<L> tile = splat<L>(std::sqrt(bound.tile * energy));
  Vec<L> parts[S];
#pragma GCC unroll 6
  for (int j = 0; j < S; ++j) {
    parts[j] = load<L>(sums.squares + j * S);
#pragma GCC unroll 3
    for (int r = 1; r < R; ++r) parts[j] += load<L>(sums.squares + j * S + r);
  }
  IntVec<L> found{};
#pragma GCC unroll 4
  for (int j = 0; j < M; ++j) {
    Vec<L> held{}, part{};
#pragma GCC unroll 3
    for (int s = 0; s < R; ++s) {
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) {
        held += bound.kernel_offsets[r * R + s] * load<L>(sums.sizes + (j + s) * S + r);
      }
      part += parts[j + s];
    }
    if (j < columns) found |= ~is_inside(bound, held, part, tile) & (1 << j);
  }
  unsigned outside = 0;
  for (int i = 0; i < rows; ++i) outside |= static_cast<unsigned>(found[i]) << (i * M);
  return outside;
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
