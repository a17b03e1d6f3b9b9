// Sums of products of 8-bit integers in AMX's tiles: 16 rows by 16 filters, of up to 64 channels an
// instruction. Two tiles of rows by two of filters are in registers; totals pass through the stack
// to what follows them. Included only by files that are compiled for AMX.
#pragma once

#include "cpu/integer_lanes.h"

#if defined(CNN_ENGINE_INTEGER_TILES)

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr int kTileSide = 16;
// Tiles of rows that two groups of filters are multiplied by before the next two.
constexpr int kMostTiles = 64;

// What LDTILECFG loads: tiles 0 to 3 are totals, 4 and 5 rows of x, 6 and 7 weights.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  TileConfig(int x_rows, int units) {
    for (int i = 0; i < 4; ++i) {
      row_bytes[i] = 64;
      rows[i] = static_cast<std::uint8_t>(x_rows);
    }
    for (int i = 4; i < 6; ++i) {
      row_bytes[i] = static_cast<std::uint16_t>(4 * units);
      rows[i] = static_cast<std::uint8_t>(x_rows);
    }
    for (int i = 6; i < 8; ++i) {
      row_bytes[i] = 64;
      rows[i] = static_cast<std::uint8_t>(units);
    }
  }
};

CNN_ENGINE_INLINE void configure(const TileConfig& config) {
  // For the compiler the instruction reads eight bytes: it would leave the others out.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Where a tile's first row is.
struct TileAt {
  const std::int32_t* x;
  std::uint8_t* y;
  const std::uint8_t* residual;  // or null
};

// Weights that are prefetched into the second-level cache while others are multiplied: some lines
// of 64 bytes per step of the sums. Networks of one image read most of their weights once per pass.
struct NextWeights {
  const char* at;
  int lines;

  CNN_ENGINE_INLINE void ask() {
    for (int i = 0; i < lines; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// The product of some tiles of rows and groups of filters.
struct TileGemm {
  const GemmOf<Integer>& p;
  int x_rows, units;  // of a tile

  // Rows of `count` tiles by N groups of filters, whose first is at `w`. Two tiles' totals become
  // outputs while the next two are multiplied.
  template <bool Signed, int N>
  void run(const TileAt* at, int count, const std::int32_t* w, const Requantize& last, int valid,
           NextWeights next) const {
    alignas(64) std::int32_t totals[2][2 * N][kTileSide * kTileSide];
    for (int tile = 0, side = 0; tile < count + 2; tile += 2, side ^= 1) {
      if (tile + 1 < count) {
        sum<Signed, 2, N>(at + tile, w, last.bias, totals[side], next);
      } else if (tile < count) {
        sum<Signed, 1, N>(at + tile, w, last.bias, totals[side], next);
      }
      for (int m = tile - 2; m >= 0 && m < tile && m < count; ++m) {
        const auto* own = totals[side ^ 1] + m % 2 * N;
        requantize_rows<kTileSide, N>(
            last, x_rows, valid,
            [&](int t, int n) { return load_as<IntVec<kTileSide>>(own[n] + t * kTileSide); },
            at[m].residual, p.residual_stride, at[m].y, p.y_stride);
      }
    }
  }

 private:
  template <bool Signed, int M, int N>
  CNN_ENGINE_INLINE void sum(const TileAt* at, const std::int32_t* w, const std::int32_t* bias,
                             std::int32_t (*totals)[kTileSide * kTileSide],
                             NextWeights& next) const {
    // With a stride of 0, the bias is every row.
    _tile_loadd(0, bias, 0);
    if constexpr (N > 1) _tile_loadd(1, bias + kTileSide, 0);
    if constexpr (M > 1) _tile_loadd(2, bias, 0);
    if constexpr (M > 1 && N > 1) _tile_loadd(3, bias + kTileSide, 0);
    const std::int64_t stride = 4 * p.stride, group = p.group_size();
    for (int a = 0; a < p.kernel_offset_count; ++a) {
      for (int c = 0; c < p.parts.channels; c += units, w += units * kFilterGroup) {
        const std::int64_t from = p.kernel_offsets[a] + c;
        _tile_loadd(6, w, 64);
        _tile_loadd(4, at[0].x + from, stride);
        multiply<Signed, 0>();
        if constexpr (N > 1) {
          _tile_loadd(7, w + group, 64);
          multiply<Signed, 1>();
        }
        if constexpr (M > 1) {
          _tile_loadd(5, at[1].x + from, stride);
          multiply<Signed, 2>();
        }
        if constexpr (M > 1 && N > 1) multiply<Signed, 3>();
        next.ask();
      }
    }
    _tile_stored(0, totals[0], 64);
    if constexpr (N > 1) _tile_stored(1, totals[1], 64);
    if constexpr (M > 1) _tile_stored(2, totals[N], 64);
    if constexpr (M > 1 && N > 1) _tile_stored(3, totals[3], 64);
  }

  template <bool Signed, int Total>
  CNN_ENGINE_INLINE static void multiply() {
    if constexpr (Signed) {
      if constexpr (Total == 0) _tile_dpbssd(0, 4, 6);
      if constexpr (Total == 1) _tile_dpbssd(1, 4, 7);
      if constexpr (Total == 2) _tile_dpbssd(2, 5, 6);
      if constexpr (Total == 3) _tile_dpbssd(3, 5, 7);
    } else {
      if constexpr (Total == 0) _tile_dpbusd(0, 4, 6);
      if constexpr (Total == 1) _tile_dpbusd(1, 4, 7);
      if constexpr (Total == 2) _tile_dpbusd(2, 5, 6);
      if constexpr (Total == 3) _tile_dpbusd(3, 5, 7);
    }
  }
};

// Filters [begin, end), whose first is a group's first, for some tiles: weights are read once.
template <bool Signed>
void multiply_tiles(const TileGemm& gemm, const TileAt* at, int count, int begin, int end,
                    const Requantize& epilogue) {
  const GemmOf<Integer>& p = gemm.p;
  // The next two groups of filters are prefetched in equal parts while all tiles are multiplied.
  const int runs = (count + 1) / 2, lines = (2 * gemm.units + runs - 1) / runs;
  for (int k = begin; k < end; k += 2 * kFilterGroup) {
    const std::int32_t* w = p.weights + k / kFilterGroup * p.group_size();
    const auto* then = reinterpret_cast<const char*>(w + 2 * p.group_size());
    const NextWeights next{then, end - k > 2 * kFilterGroup ? lines : 0};
    TileAt moved[kMostTiles];
    for (int i = 0; i < count; ++i) {
      moved[i] = {at[i].x, at[i].y + std::int64_t{k} * p.y_step,
                  at[i].residual ? at[i].residual + k : nullptr};
    }
    if (end - k > kFilterGroup) {
      gemm.run<Signed, 2>(moved, count, w, epilogue.at(k), end - k, next);
    } else {
      gemm.run<Signed, 1>(moved, count, w, epilogue.at(k), end - k, next);
    }
  }
}

// As nhwc.h's, of which all runs have as many rows. Tiles of a run have nearly the same number of
// rows; the last one begins earlier, and computes some outputs again.
template <typename Runs>
void multiply_runs(const GemmOf<Integer>& p, int begin, int end, const Requantize& epilogue,
                   Prefetch*, const Runs& runs) {
  TileAt at[kMostTiles];
  int count = 0;
  TileGemm gemm{p, 0, Integer::tile_units(p.parts.channels)};
  const auto flush = [&] {
    if (epilogue.types.x == ElementType::int8) {
      multiply_tiles<true>(gemm, at, count, begin, end, epilogue);
    } else {
      multiply_tiles<false>(gemm, at, count, begin, end, epilogue);
    }
    count = 0;
  };
  runs([&](const std::int32_t* x, std::uint8_t* y, const std::uint8_t* residual, int rows) {
    const int tiles = (rows + kTileSide - 1) / kTileSide, of_tile = (rows + tiles - 1) / tiles;
    if (gemm.x_rows != of_tile) {
      if (count > 0) flush();
      gemm.x_rows = of_tile;
      configure(TileConfig(of_tile, gemm.units));
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const int last = rows - of_tile, row = tile * of_tile < last ? tile * of_tile : last;
      at[count++] = {x + row * p.stride, y + row * p.y_stride,
                     residual ? residual + row * p.residual_stride : nullptr};
      if (count == kMostTiles) flush();
    }
  });
  if (count > 0) flush();
  _tile_release();
}

// Multiply-adds of whole tiles, four independent ones a round.
std::int64_t burst_of_tiles(std::int64_t rounds) {
  configure(TileConfig(kTileSide, kTileSide));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (std::int64_t i = 0; i < rounds; ++i) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_release();
  return rounds * 4 * kTileSide * kTileSide * kTileSide * Integer::kChannels;
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA

#endif
