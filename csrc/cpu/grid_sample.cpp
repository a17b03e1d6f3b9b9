// grid_sample on the CPU: the pixels and weights of some positions are tabled once, then read for
// one channel after another, positions on SIMD lanes.
#include "ops/grid_sample.h"

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr int kGridPositions = 64;  // of a table
constexpr int kMostPixels = 16;     // of a position

struct GridTable {
  std::int32_t offset[kMostPixels][kGridPositions];
  float weight[kMostPixels][kGridPositions];
};

// Fills the table for `count` positions from `grid` on; returns the pixels of a position.
int fill_grid_table(const GridSampleShape& p, const float* grid, int count, GridTable& table) {
  const int taps = p.taps();
  int pixels = 1;
  for (int d = 0; d < p.rank; ++d) pixels *= taps;
  for (int i = 0; i < count; ++i, grid += p.rank) {
    GridPixels of[3];
    for (int d = 0; d < p.rank; ++d)
      of[d] = p.pixels(grid[p.rank - 1 - d], p.sizes[3 - p.rank + d]);
    for (int k = 0; k < pixels; ++k) {
      int offset = 0, rest = k;
      float weight = 1.0f;
      for (int d = 0, divisor = pixels / taps; d < p.rank; ++d, divisor /= taps) {
        const int index = rest / divisor;
        rest -= index * divisor;
        offset = offset * p.sizes[3 - p.rank + d] + of[d].at[index];
        weight *= of[d].weight[index];
      }
      table.offset[k][i] = offset;
      table.weight[k][i] = weight;
    }
  }
  return pixels;
}

}  // namespace

void grid_sample(const float* input, const float* grid, float* output, const GridSampleShape& shape,
                 int threads) {
  const GridSampleShape p = shape;
  if (p.positions == 0 || p.channels == 0) return;
  const std::int64_t blocks = (p.positions + kGridPositions - 1) / kGridPositions;
  const std::int64_t cost = std::int64_t{kGridPositions} * (p.channels + 16) * p.taps() * p.taps();
  parallel_for(p.images * blocks, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    GridTable table;
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t image = index / blocks;
      const int first = static_cast<int>(index % blocks) * kGridPositions;
      const int count = p.positions - first < kGridPositions ? p.positions - first : kGridPositions;
      const float* from = grid + (image * p.positions + first) * p.rank;
      const int pixels = fill_grid_table(p, from, count, table);
      for (int c = 0; c < p.channels; ++c) {
        const float* x = input + (image * p.channels + c) * p.plane();
        float* y = output + (image * p.channels + c) * p.positions + first;
        float accumulators[kGridPositions] = {};
        for (int k = 0; k < pixels; ++k) {
#pragma omp simd
          for (int i = 0; i < count; ++i) {
            const float weight = table.weight[k][i], value = x[table.offset[k][i]];
            accumulators[i] += weight != 0.0f ? weight * value : 0.0f;
          }
        }
        for (int i = 0; i < count; ++i) y[i] = accumulators[i];
      }
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
