// One launch of quantized_conv2d as wgmma multiplies: what it computes, its tiles, and its packed
// weights.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "ops/quantized_conv2d_wgmma.h"

namespace cnn_engine::cuda::quantized_wgmma {

constexpr int kUnitFilters = 64;  // of a unit of packed weights

constexpr int divided(std::int64_t count, int by) {
  return static_cast<int>((count + by - 1) / by);
}

// 64 positions for each group, a warpgroup, and so many filters; blocks that a multiprocessor has.
struct TileShape {
  int groups, columns, blocks;
};
constexpr TileShape kTiles[] = {{1, 64, 4}, {2, 64, 2}, {2, 128, 2}, {2, 256, 1}};
constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

constexpr int threads_of(const TileShape& tile) { return 128 * tile.groups + 64; }
constexpr int stage_bytes(const TileShape& tile, int row_bytes) {
  return (64 * tile.groups + tile.columns) * row_bytes;
}
// What a block has beside its stages: filters' biases and scales.
constexpr int bytes_beside(const TileShape& tile) { return 8 * tile.columns; }

// Bytes of K of a step, all of one kernel offset: 64 where 128 would multiply many zeros.
constexpr int row_bytes_of(int channels) {
  const int left = channels % 128;
  return channels <= 192 && left > 0 && left <= 64 ? 64 : 128;
}

struct Gemm {
  const char* weights;
  const std::int32_t* bias;
  const float* scale;
  const std::int32_t* border;  // null: positions at the border have the bias of others
  const std::uint8_t *residual, *table;
  void* y;
  Conv2dShape shape;  // of this part of the batch
  QuantizedTypes types;
  int y_pitch, residual_pitch;
  int out_h, out_w;
  int rows;  // positions of the output
  int padded_filters;
  bool tiled;     // rows of channels: the copy engine need not know of images
  bool sixteens;  // y is of 8 bits, and it and the residual are read and written 16 bytes at once
  int chunks;     // steps of a kernel offset's channels
  int steps, stages, tiles, filter_tiles;
};

// Which of a unit's 64 filters is row n of its packed weights, so that a lane's sums of a position
// (wgmma.cuh) are of sixteen neighbours.
constexpr int filter_of(int n) { return n % 8 / 2 * 16 + n / 8 * 2 + n % 2; }

// Packed weights, made on the host, K filled up to sixty-fours with zeros:
//
//   bias [K]                     less x_zero times the sum of the filter's weights
//   scale [K]
//   border [R + 1][S + 1][K]     with padding: x_zero times the sum of the weights of offsets
//   before
//                                (r, s) in both
//   weights                      [K / 64][steps][64 filters][bytes of a row], swizzled
template <typename Byte>
class Packed {
 public:
  Packed(Byte* memory, const Conv2dShape& p) : memory_(memory), p_(p) {}

  int filters() const { return divided(p_.k, kUnitFilters) * kUnitFilters; }
  int row_bytes() const { return row_bytes_of(p_.c); }
  int chunks() const { return divided(p_.c, row_bytes()); }
  int steps() const { return p_.r * p_.s * chunks(); }
  bool is_padded() const { return p_.pad_top + p_.pad_left + p_.pad_bottom + p_.pad_right > 0; }

  template <typename T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  std::int64_t scale() const { return std::int64_t{4} * filters(); }
  std::int64_t border() const { return 2 * scale(); }
  std::int64_t weights() const {
    return border() + (is_padded() ? scale() * (p_.r + 1) * (p_.s + 1) : 0);
  }
  std::int64_t bytes() const { return weights() + std::int64_t{filters()} * steps() * row_bytes(); }

 private:
  Byte* memory_;
  const Conv2dShape& p_;
};

}  // namespace cnn_engine::cuda::quantized_wgmma
