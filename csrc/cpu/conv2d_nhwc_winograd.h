// Winograd's method of conv2d_nhwc: some tiles of MxM outputs at a time,
//
//   V[f, t, c] = B^T d B of tile t's input;  M[f, t, k] = sum over c of V[f, t, c] * U[f, c, k];
//   output of tile t = activation(A^T M A + bias + residual)
//
// with channels, then filters on SIMD lanes. Filters are taken in blocks and, where U does not fit
// the second-level cache, channels in parts, for which U = G w G^T is made of the weights as they
// are read. Outputs whose windows do not allow a tile's rounding errors (window_bound.h) are
// computed directly after it. Every tile is computed by itself, so results depend neither on the
// number of threads nor on how tiles are grouped.
#pragma once

#include "cpu/conv2d_nhwc_winograd_tiles.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Channels in sums of nearly the same length: body(first, past the last).
template <typename Body>
CNN_ENGINE_INLINE void for_partial_sums(int channels, int most, const Body& body) {
  const int sums = (channels + most - 1) / most;
  for (int sum = 0; sum < sums; ++sum) body(channels * sum / sums, channels * (sum + 1) / sums);
}

// M of `count` tiles and of the filters [from, to), a block of those up to `last`; u is where U is
// made.
template <int M>
void multiply_tiles(const Winograd& call, const Conv2dShape& p, const WinogradShape& shape,
                    const KernelTransform<M>& transform, const float* v, int count, int from,
                    int to, int last, float* u, float* m) {
  constexpr int kFrequencies = (M + 2) * (M + 2);
  const std::int64_t v_step = shape.v_step(count), m_step = shape.m_step(count), zero = 0;
  const int groups = filter_groups(to - from), parts = shape.parts(p);
  // Of a group, in the memory of the packed weights or of a frequency of U.
  const std::int64_t group_size = std::int64_t{p.c} * kFilterGroup;
  const auto part_begin = [&](int part) {
    return shape.part_begin(p, part);
  };
  const auto weights_of = [&](int filter, int c) {
    return call.packed + (filter / kFilterGroup * group_size + std::int64_t{c} * kFilterGroup) * 9;
  };
  NhwcTile tile;
  tile.x_stride = shape.c_pitch;
  tile.kernel_offsets = &zero;
  tile.kernel_offset_count = 1;
  tile.y_stride = kWinogradFilters;
  tile.last = nullptr;
  for (int part = 0; part < parts; ++part) {
    const int c = part_begin(part);
    const bool is_last = part + 1 == parts;
    const int channels = part_begin(part + 1) - c;
    const float* weights = call.packed + from / kFilterGroup * group_size;
    std::int64_t u_step = shape.k_pitch / kFilterGroup * group_size;
    tile.group_size = group_size;
    Prefetch prefetch{nullptr, 0, 0, 0};
    if (shape.makes_u) {
      tile.group_size = std::int64_t{channels} * kFilterGroup;
      for (int i = 0; i < groups; ++i) {
        make_u<M + 2>(transform.g, weights_of(from + i * kFilterGroup, c), channels,
                      u + i * tile.group_size);
      }
      weights = u;
      u_step = WinogradShape::kUStep;
      if (!is_last) {
        const std::int64_t next = part_begin(part + 2) - part_begin(part + 1);
        prefetch = {weights_of(from, part_begin(part + 1)), next * 9, group_size * 9, groups};
      } else if (to < last) {
        const int next = filter_groups(last - to);
        prefetch = {weights_of(to, 0), std::int64_t{part_begin(1)} * 9, group_size * 9,
                    next < groups ? next : groups};
      }
    }
    for (int f = 0; f < kFrequencies; ++f) {
      for_filter_blocks(
          0, groups * kFilterGroup,
          [&](int k, const NhwcTileFunction* functions, int most, int valid) {
            const float* w =
                weights + f * u_step + k / kFilterGroup * tile.group_size + k % kFilterGroup;
            tile.valid = valid;
            for_partial_sums(channels, M == 4 ? kWinogradSum : channels, [&](int begin, int end) {
              tile.channels = end - begin;
              tile.w = w + begin * kFilterGroup;
              tile.first = part == 0 && begin == 0;
              multiply_rows(tile, functions, most, v + f * v_step + c + begin, m + f * m_step + k,
                            count, prefetch, nullptr);
            });
          });
    }
  }
}

// Frequencies whose sums, of kFewTiles tiles, fill the registers.
constexpr int kFewFrequencies = kRegisters == 32 ? 6 : 3;

// M of some frequencies of a row, from First on, of kFewTiles tiles, W filters and the channels
// [begin, end). Meanwhile the same share of the weights that are `next` floats further is asked
// for.
template <int S, int Row, int First, int W>
void multiply_row(const float (&g)[S][3], const float* weights, std::int64_t next, int begin,
                  int end, const float* v, float* m, std::int64_t m_step) {
  constexpr int kLine = (Row * S + First) * 9 / (S * S);
  constexpr int kLines = (Row * S + First + kFewFrequencies) * 9 / (S * S) - kLine;
  Vec<W> sum[kFewFrequencies][kFewTiles] = {};
  v += (Row * S + First) * kFewStep;
  weights += std::int64_t{begin} * 9 * kFilterGroup;
  for (int c = begin; c < end; ++c, weights += 9 * kFilterGroup) {
    for (int i = 0; i < kLines; ++i) {
      __builtin_prefetch(weights + next + (kLine + i) * kFilterGroup, 0, 2);
    }
    Vec<W> half[3];
#pragma GCC unroll 3
    for (int x = 0; x < 3; ++x) {
      Vec<W> w[3];
#pragma GCC unroll 3
      for (int y = 0; y < 3; ++y) w[y] = load<W>(weights + (y * 3 + x) * kFilterGroup);
      half[x] = kernel_row<S, W>(g, Row, w);
    }
    const auto at = static_cast<unsigned>(c);
    const float* x = v + at / kFewChannels * (S * S * kFewStep) + at % kFewChannels;
#pragma GCC unroll 6
    for (int f = 0; f < kFewFrequencies; ++f) {
      const Vec<W> u = kernel_row<S, W>(g, First + f, half);
#pragma GCC unroll 4
      for (int t = 0; t < kFewTiles; ++t) sum[f][t] += u * x[f * kFewStep + t * kFewChannels];
    }
  }
  m += (Row * S + First) * m_step;
#pragma GCC unroll 6
  for (int f = 0; f < kFewFrequencies; ++f, m += m_step) {
#pragma GCC unroll 4
    for (int t = 0; t < kFewTiles; ++t) {
      float* to = m + t * kWinogradFilters;
      store<W>(to, begin == 0 ? sum[f][t] : sum[f][t] + load<W>(to));
    }
  }
}

// The same as multiply_tiles() for a few tiles, whose products take less time than U takes to the
// second-level cache and back: it is made in registers, of weights that stay in the first-level
// cache for all rows of frequencies.
inline void multiply_few(const Winograd& call, const Conv2dShape& p, const WinogradShape& shape,
                         const KernelTransform<4>& transform, const float* v, int from, int to,
                         float* m) {
  constexpr int S = 6, W = kWide < kFilterGroup ? kWide : kFilterGroup;
  const std::int64_t group_size = std::int64_t{p.c} * 9 * kFilterGroup;
  const int parts = shape.parts(p);
  for (int k = from; k < to; k += W) {
    const float* weights = call.packed + k / kFilterGroup * group_size + k % kFilterGroup;
    const std::int64_t next = k / kFilterGroup + 1 < filter_groups(p.k) ? group_size : 0;
    for (int part = 0; part < parts; ++part) {
      const int c = shape.part_begin(p, part);
      for_partial_sums(shape.part_begin(p, part + 1) - c, kWinogradSum, [&](int begin, int end) {
        const auto multiply = [&](auto row, auto first) {
          multiply_row<S, row(), first(), W>(transform.g, weights, next, c + begin, c + end, v,
                                             m + k - from, shape.m_step(kFewTiles));
        };
        const auto multiply_all = [&](auto row) {
          multiply(row, std::integral_constant<int, 0>());
          if constexpr (kFewFrequencies < S) {
            multiply(row, std::integral_constant<int, kFewFrequencies>());
          }
        };
        multiply_all(std::integral_constant<int, 0>());
        multiply_all(std::integral_constant<int, 1>());
        multiply_all(std::integral_constant<int, 2>());
        multiply_all(std::integral_constant<int, 3>());
        multiply_all(std::integral_constant<int, 4>());
        multiply_all(std::integral_constant<int, 5>());
      });
    }
  }
}

template <int M>
void multiply(const Winograd& call, const Conv2dShape& p, const WinogradShape& shape,
              const KernelTransform<M>& transform, const float* v, int count, int from, int to,
              int last, float* u, float* m) {
  if constexpr (M == 4) {
    if (shape.is_few(count)) return multiply_few(call, p, shape, transform, v, from, to, m);
  }
  multiply_tiles<M>(call, p, shape, transform, v, count, from, to, last, u, m);
}

template <int M>
void winograd_tiles(const Winograd& call, const Scratch& scratch, const Conv2dShape& p,
                    const WinogradShape& shape, const WindowBound& bound, const float* weights,
                    int threads) {
  const KernelTransform<M> transform;
  // U is made for each task: no more tasks than needed where filters are enough for the threads.
  const bool enough = shape.makes_u && p.k > shape.tiles && p.k / kShareFilters >= threads;
  const int least = enough ? shape.together : kLeastTiles;
  const TaskSplit split(shape.tiles, shape.together, least, p.k, p.k > shape.tiles, threads);
  const std::int64_t macs = shape.tiles * shape.frequencies * std::int64_t{p.c} * p.k;
  const std::int64_t units = split.tasks * split.shares;
  parallel_for(units, macs / units, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    float* nothing = part.data();  // a position outside the image
    float* u = nothing + shape.c_pitch;
    float* v = u + shape.u_floats();
    float* m = v + shape.frequencies * shape.v_step(shape.together);
    float* windows = m + shape.frequencies * shape.m_step(shape.together);
    auto* direct = reinterpret_cast<unsigned*>(windows);  // by tile; then whether any is not
    windows += kTileNotes;
    for (std::int64_t index = begin; index < end; ++index) {
      const int task = static_cast<int>(index / split.shares);
      const int share = static_cast<int>(index % split.shares);
      const std::int64_t first = split.first(task);
      const int count = static_cast<int>(split.first(task + 1) - first);
      if (part.holds() != task) {
        fill_zero(nothing, shape.c_pitch);
        direct[kMostTiles] =
            write_tiles<M>(call, p, shape, bound, first, count, nothing, v, direct);
        part.holds() = task;
      }
      const int begin_k = share_begin(p.k, share, split.shares);
      const int last = share_begin(p.k, share + 1, split.shares);
      for (int from = begin_k, to; from < last && direct[kMostTiles]; from = to) {
        to = from + kWinogradFilters < last ? from + kWinogradFilters : last;
        multiply<M>(call, p, shape, transform, v, count, from, to, last, u, m);
        read_tiles<M>(call, p, shape, first, count, m, from, to);
      }
      write_direct<M>(call, p, shape, first, count, nothing, direct,
                      DirectOutputs(call, weights, 9 * p.c, p.k, begin_k, last, windows));
    }
  });
}

inline void winograd(Winograd call, const Scratch& scratch, const Conv2dShape& p,
                     Conv2dMethod method, int threads) {
  const WinogradShape shape(p, method);
  const WindowBound bound = unpacked_bound(call.packed);
  const float* weights = call.packed + kBoundFloats;
  call.packed = shape.makes_u ? weights : weights + std::int64_t{9} * p.c * shape.k_pitch;
  if (method == Conv2dMethod::winograd4) {
    winograd_tiles<4>(call, scratch, p, shape, bound, weights, threads);
  } else {
    winograd_tiles<2>(call, scratch, p, shape, bound, weights, threads);
  }
}

// kappa of window_bound.h: with signs at random, and what sums of one sign add to it. Sums with
// tiles of 4x4 are short.
inline WindowBound winograd_bound(const float* weight, const Conv2dShape& p, Conv2dMethod method) {
  const bool large = method == Conv2dMethod::winograd4;
  const double kappa = kProductRounding * (large ? 12 + 1.6 * std::sqrt(p.c) : 4 + 0.5 * p.c);
  return window_bound(weight, p.k, p.c, 3, 3, {kappa, large ? 4.4 : 1.8});
}

// The bound, and the weights [groups][channels][9][kFilterGroup], of which U is made as they are
// read; else [groups][9][channels][kFilterGroup], and U = G g G^T, in float64 until the end:
// [frequencies][groups][channels][kFilterGroup].
inline void winograd_pack(const float* weight, float* packed, const WindowBound& bound,
                          const Conv2dShape& p, Conv2dMethod method, int threads) {
  const WinogradShape shape(p, method);
  double g[8][5];
  fused::kernel_transform(shape.m, 3, g);
  const int side = shape.side;
  const std::int64_t step = std::int64_t{shape.k_pitch} * p.c;  // of a frequency
  const std::int64_t cost = std::int64_t{p.c} * 16 * 200;
  __builtin_memcpy(packed, &bound, sizeof bound);
  float* weights = packed + kBoundFloats;
  float* all_u = weights + step * 9;
  parallel_for(filter_groups(p.k), cost, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t group = begin; group < end; ++group) {
      for (int c = 0; c < p.c; ++c) {
        const std::int64_t position = group * p.c + c;
        for (int i = 0; i < kFilterGroup; ++i) {
          const std::int64_t k = group * kFilterGroup + i;
          float none[9] = {};
          const float* w = k < p.k ? weight + (k * p.c + c) * 9 : none;
          float* to = weights + position * 9 * kFilterGroup + i;
          if (shape.makes_u) {
            for (int kernel_offset = 0; kernel_offset < 9; ++kernel_offset)
              to[kernel_offset * kFilterGroup] = w[kernel_offset];
            continue;
          }
          to = weights + (group * 9 * p.c + c) * kFilterGroup + i;
          for (int kernel_offset = 0; kernel_offset < 9; ++kernel_offset)
            to[std::int64_t{kernel_offset} * p.c * kFilterGroup] = w[kernel_offset];
          float* u = all_u + position * kFilterGroup + i;
          double half[6][3];
          for (int a = 0; a < side; ++a) {
            for (int x = 0; x < 3; ++x) {
              half[a][x] = g[a][0] * w[x] + g[a][1] * w[3 + x] + g[a][2] * w[6 + x];
            }
          }
          for (int f = 0; f < side * side; ++f) {
            const double* row = half[f / side];
            const double* column = g[f % side];
            u[f * step] =
                static_cast<float>(row[0] * column[0] + row[1] * column[1] + row[2] * column[2]);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
