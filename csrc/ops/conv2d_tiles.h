// How the variant `tiled` of conv2d cuts outputs into tiles (cuda/common/conv2d_tiled.cuh has the
// kernel).
//
// Numbers alone, so that a machine without CUDA can say what would not fit, too.
#pragma once

#include "ops/conv2d.h"

namespace cnn_engine {

constexpr int kTiledRows = 2, kTiledColumns = 4, kTiledFilters = 4;  // a thread's outputs
constexpr int kTiledSharedBytes = 48 * 1024;  // what every device grants unasked

constexpr int kTiledMostWarps = 12;    // a block: two blocks' registers fit a multiprocessor
constexpr int kTiledBlocks = 128;      // about as many as a GPU has multiprocessors
constexpr int kTiledWeightsReuse = 4;  // tiles a block, where there are enough for all

// Where a thread stands in a walk over [maps][rows][pitch], and its step of one block of threads:
// carries keep division out of the loop.
struct TileWalk {
  int map, row, column;
};

// How the outputs are cut into tiles, and what of them is in shared memory at a time.
struct Conv2dTiles {
  int across, down, images;      // units of a tile
  int tiles_across, tiles_down;  // of a map
  int tiles;                     // of all images
  int tiles_a_block;
  int warps;              // that hold a tile's units
  int groups;             // of 4 filters, a block
  int in_rows, in_pitch;  // of one channel's input tile
  int channels;           // at a time; 0: not even one fits
  TileWalk step;

  explicit Conv2dTiles(const Conv2dShape& p) {
    const auto parts = [](std::int64_t size, int part) {
      return static_cast<int>((size + part - 1) / part);
    };
    const int units_across = parts(p.out_w(), kTiledColumns);
    const int units_down = parts(p.out_h(), kTiledRows);
    const int all_groups = parts(p.k, kTiledFilters);
    tiles_across = parts(units_across, 16);
    across = parts(units_across, tiles_across);

    groups = parts(all_groups, parts(all_groups, 6));
    // Small batches: many blocks rather than few loads of what their tiles share.
    const bool few = std::int64_t{p.n} * parts(units_down, 4) * tiles_across < kTiledBlocks;
    const int most_units = 32 * (few ? 1 : kTiledMostWarps / groups);
    // The fewest lanes for all units: idle lanes are the price of a map that fits badly.
    const int most_images = p.n / (2 * kTiledBlocks) < 1 ? 1 : p.n / (2 * kTiledBlocks);
    down = images = 1;
    double least = 0;
    for (int height = 1; height <= units_down && across * height <= most_units; ++height) {
      const int count =
          height < units_down ? 1 : min_of(most_units / (across * height), most_images);
      const int lanes = (across * height * count + 31) / 32 * 32;
      const double cost = double(lanes) * parts(units_down, height) / count;
      if (least == 0 || cost <= least) least = cost, down = height, images = count;
    }
    fit(p);
    while (channels == 0 && images > 1) --images, fit(p);
    while (channels == 0 && down > 1) --down, fit(p);
    while (channels == 0 && across > 1) --across, fit(p);
    while (channels == 0 && groups > 1) --groups, fit(p);
    tiles_across = parts(units_across, across);
    tiles_down = parts(units_down, down);
    warps = parts(across * down * images, 32);
    if (channels == 0) return;
    const std::int64_t all = std::int64_t{parts(p.n, images)} * tiles_across * tiles_down;
    tiles = static_cast<int>(all);  // at most as many as outputs
    tiles_a_block = tiles / (8 * kTiledBlocks);
    tiles_a_block = tiles_a_block < 1 ? 1 : min_of(tiles_a_block, kTiledWeightsReuse);
    const int threads = 32 * warps * groups;
    step = {threads / (in_pitch * in_rows), threads / in_pitch % in_rows, threads % in_pitch};
  }

  CNN_ENGINE_INLINE int filters() const { return kTiledFilters * groups; }
  CNN_ENGINE_INLINE int plane() const { return in_rows * in_pitch; }
  CNN_ENGINE_INLINE int input_size() const { return images * channels * plane(); }
  int shared_bytes(const Conv2dShape& p) const {
    return 4 * (input_size() + channels * p.r * p.s * filters());
  }

 private:
  static int min_of(int a, int b) { return a < b ? a : b; }

  // Sets the input tile's size and how many channels of it fit.
  void fit(const Conv2dShape& p) {
    // Sizes as 64 bits: a huge kernel or stride must not wrap round to one that fits.
    const std::int64_t tall =
        std::int64_t{kTiledRows * down - 1} * p.stride_h + std::int64_t{p.r - 1} * p.dilation_h + 1;
    std::int64_t wide = (std::int64_t{kTiledColumns * across - 1} * p.stride_w +
                         std::int64_t{p.s - 1} * p.dilation_w + 8) /
                        4 * 4;
    // Vectors of one row after the other on different banks: 8 lanes read 128 bytes together.
    if (p.stride_w == 1 && across < 8) {
      while (wide / 2 % 8 != (across + 1) / 2 * 2 % 8) wide += 4;
    }
    const std::int64_t bytes = 4 * (images * tall * wide + std::int64_t{p.r} * p.s * filters());
    channels = 0;
    if (tall > kTiledSharedBytes || wide > kTiledSharedBytes || bytes > kTiledSharedBytes) return;
    in_rows = static_cast<int>(tall);
    in_pitch = static_cast<int>(wide);
    const int most = min_of(static_cast<int>(kTiledSharedBytes / bytes), p.c);
    const int times = (p.c + most - 1) / most;
    channels = (p.c + times - 1) / times;
  }
};

// Whether a shape's tile fits into shared memory.
inline bool fits_conv2d_tiled(const Conv2dShape& shape) { return Conv2dTiles(shape).channels > 0; }

}  // namespace cnn_engine
