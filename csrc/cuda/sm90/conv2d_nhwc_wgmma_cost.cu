// conv2d_nhwc_wgmma's choice of a tile and of the blocks that share its sums, by a model of what a
// launch takes.
#include <algorithm>
#include <cmath>

#include "cuda/sm80/rated.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"

namespace cnn_engine::cuda::wgmma {
namespace {

constexpr int kMostSplit = 8;  // blocks that every GPU has in a cluster

// Bytes of shared memory for a block's stages.
constexpr int kHalf = 110 * 1024, kAll = 200 * 1024;

// What a launch takes, in microseconds: fitted to launches of 78 convolutions (of tf32 47), of
// batches of 1, 5 and 20, on an H200, of float32 to those of 61 on an H100; the geometric mean of
// the times of what is chosen is 1.02 times that of the fastest (docs/explanation/performance.md).
// Of one-tile blocks, then of persistent blocks, of tf32 fitted to launches of 20.
struct TileCost {
  double step;   // of a block by itself
  double share;  // of a step of each block that a multiprocessor has
};
struct Costs {
  double launch;
  double cluster_block;  // for each block of a cluster
  double sent;           // eight positions, to others of the cluster
  double eight, shared;  // eight positions' end, likewise
  double latency;        // of a copy, which all stages share
  TileCost before;       // what a tile's costs are more with something before the products
  Shapes shapes;
  const TileCost* tiles;
};
constexpr TileCost kTileCosts[] = {{0.107, 0.091}, {0.119, 0.100}, {0.131, 0.149},
                                   {0.127, 0.158}, {0.129, 0.156}, {0.169, 0.222},
                                   {0.300, 0.275}, {0.135, 0.208}, {0.442, 0.375}};
static_assert(sizeof(kTileCosts) / sizeof(kTileCosts[0]) == kTiles);
constexpr Costs kCosts = {
    1.477, 0.043, 0.090, 0.122, 0.101, 0.553, {0.404, 0.119}, kShapesOf<__half>, kTileCosts};
constexpr TileCost kTf32TileCosts[] = {{0.123, 0.085}, {0.119, 0.102}, {0.068, 0.151},
                                       {0.270, 0.252}, {0.046, 0.198}, {0.256, 0.310}};
static_assert(sizeof(kTf32TileCosts) / sizeof(TileCost) == kShapesOf<Tf32>.count);
constexpr Costs kTf32Costs = {1.346, 0.057,          0.091,           0.209,         0.147,
                              0.749, {0.404, 0.119}, kShapesOf<Tf32>, kTf32TileCosts};
constexpr TileCost kSplitTileCosts[] = {{0.238, 0.216}, {0.243, 0.292}, {0.500, 0.756}};
static_assert(sizeof(kSplitTileCosts) / sizeof(TileCost) == kShapesOf<float>.count);
constexpr Costs kSplitCosts = {
    0.909, 0.129, 0.134, 0.385, 0.193, 1.717, {}, kShapesOf<float>, kSplitTileCosts};

// Of persistent blocks: each of a block's tiles takes `tile` and the longer of its steps and its
// `end`.
struct PersistentCost {
  double tile, step, end;
};
constexpr double kPersistentLaunch = 1.884;
constexpr PersistentCost kPersistentCosts[] = {
    {0.747, 0.488, 0.780}, {1.311, 0.518, 0.701}, {1.055, 0.493, 1.325}};
constexpr PersistentCost kTf32PersistentCosts[] = {
    {0.561, 0.520, 3.429}, {2.929, 0.434, 2.124}, {2.132, 0.312, 3.413}};
// Of gelu, of 16 bits, fitted to launches of four; what an end takes longer where blocks do not
// stay, for each eight positions of 64 filters.
constexpr PersistentCost kGeluPersistentCosts[] = {
    {0.300, 0.530, 1.630}, {1.350, 0.400, 0.860}, {1.730, 0.350, 0.750}};
constexpr double kGeluEpilogue = 0.05;
static_assert(sizeof(kPersistentCosts) / sizeof(kPersistentCosts[0]) == kPersistentTiles);
static_assert(sizeof(kTf32PersistentCosts) == sizeof(kPersistentCosts));
static_assert(sizeof(kGeluPersistentCosts) == sizeof(kPersistentCosts));
// Of products of 16 bits where multiprocessors have one of the largest tiles each, fitted to two:
// all but steps, and a step.
constexpr double kPersistentOnce = 5.3, kPersistentOnceStep = 0.254;

// Of tiles that are rows or parts of them, fitted to launches of six and of three: a step of each
// block of a multiprocessor.
struct RowsCost {
  double tile, step;
};
constexpr RowsCost kRowsCosts[] = {{2.00, 0.092}, {2.90, 0.145}};
constexpr double kRowsSent = 0.85;  // between the blocks of a cluster
static_assert(sizeof(kRowsCosts) / sizeof(kRowsCosts[0]) == kRowsTiles);

// Of tiles that are patches of the image, of each that a multiprocessor has, by twos where it has
// more than one, which take turns; steps are longer where many tensor cores are at work for long.
constexpr RowsCost kPatchCosts[] = {{0.50, 0.251}, {0.35, 0.133}};
constexpr double kPatchLaunch = 2.1, kPatchTurns = 2.4, kPatchSent = 1.2, kPatchSlower = 1.12;
static_assert(sizeof(kPatchCosts) / sizeof(kPatchCosts[0]) == kPatches);
// Of a max pool of 2x2 by itself, and of each byte that it reads and writes.
constexpr double kPoolLaunch = 1.2, kPoolByte = 0.31e-6;

const Costs& costs_of(ElementType compute_type) {
  if (compute_type == ElementType::float32) return kSplitCosts;
  return compute_type == ElementType::tf32 ? kTf32Costs : kCosts;
}

// A tile with 1, 2, 4 and 8 blocks for its sums; patches too.
using Rating = Rated<Choice, kTiles * 4 + kPersistentTiles + kRowsTiles * 2 + kPatches + 3>;

// Blocks of a cluster that add up positions of tiles that images part anyhow: each position's owner
// takes its own part first, so that the order of more than two depends on the place in the tile.
constexpr int kMostInAnyOrder = 2;

// any_batch: rates what serves every batch, though it is not fast at all of them.
void rate_patches(Rating& found, const Gemm& p, int multiprocessors, bool any_batch) {
  for (int tile = 0; tile < kPatches && p.in_rows; ++tile) {
    const double tiles = double{1} * (p.rows / (p.out_h * p.out_w)) *
                         divided(p.out_h, kPatchRows[tile]) * divided(p.out_w, 8) *
                         divided(p.filters, kFilters);
    const RowsCost& cost = kPatchCosts[tile];
    const int most = tile + 1 == kPatches && !any_batch ? kPatchSplit : 1;
    for (int split = 1; split <= most; split *= 2) {
      const int chunks = divided(p.chunks, split);
      // Of a multiprocessor; clusters do not fill the groups that multiprocessors are in.
      const int positions = split < 4 ? multiprocessors : multiprocessors * (64 - split) / 66;
      const double all = tiles * split / positions;
      if (split > 1 && (chunks * (split - 1) >= p.chunks || all > 1)) continue;
      const double blocks = all > 1 ? 2 * std::ceil(all / 2) : 1;
      const double steps = p.steps / p.chunks * chunks * cost.step;
      const double sent = split > 1 ? kPatchSent * all : 0.0;
      found.add((blocks > 1 ? kPatchTurns : kPatchLaunch) +
                    blocks * (cost.tile + steps * (blocks > 4 ? kPatchSlower : 1)) + sent,
                {Form::patches, tile, split, 0, multiprocessors});
    }
  }
}

Rating rate(const Gemm& p, ElementType compute_type, int multiprocessors, bool any_batch = false) {
  const Costs& costs = costs_of(compute_type);
  Rating found;
  rate_patches(found, p, multiprocessors, any_batch);
  if (p.pools) return found;
  const bool is_gelu = p.activation == UnaryFunction::gelu && has_16_bits(compute_type);
  for (int tile = 0; tile < costs.shapes.count; ++tile) {
    const TileShape& shape = costs.shapes.at[tile];
    if (!shape.is_compiled(p.has_prologue(), p.both)) continue;
    TileCost cost = costs.tiles[tile];
    if (p.has_prologue()) {
      cost.step += costs.before.step;
      cost.share += costs.before.share;
    }
    if (!p.fits(shape.groups * kFilters)) continue;
    const double tiles =
        double{1} * divided(p.rows, shape.columns) * divided(p.filters, shape.groups * kFilters);
    for (int split = 1; split <= (any_batch ? kMostInAnyOrder : kMostSplit); split *= 2) {
      const int most = p.most_steps(), steps = divided(most, split);
      if (steps * (split - 1) >= most) continue;  // a block would have none
      // Of a multiprocessor; clusters do not fill the groups that multiprocessors are in.
      const int positions = split < 4 ? multiprocessors : multiprocessors * (64 - split) / 66;
      const double blocks = std::ceil(tiles * split / positions);
      // Two blocks of a multiprocessor, of this launch or of the next, have half of its memory.
      const bool alone = blocks == 1 || shape.is_alone();
      const int own = own_rows(shape.columns, split);
      const int beside = received_bytes(shape.groups, shape.columns, split) +
                         (p.residual && p.residual_is_rounded ? own * shape.groups * 128 : 0);
      // Of 16 bits, whose costs are fitted so, as if two blocks with two stages always had room.
      if (!has_16_bits(compute_type) && !alone && beside + 2 * shape.stage_bytes() > kHalf)
        continue;
      const int stages = std::max(2, ((alone ? kAll : kHalf) - beside) / shape.stage_bytes());
      const double late = steps > stages ? costs.latency / stages : 0.0,
                   rounds = std::ceil(blocks / 2);
      const double accumulators = std::max(steps * std::max(cost.step, late) * rounds,
                                           steps * (p.mean_steps() / most) * cost.share * blocks);
      const double sent =
          split > 1 ? costs.cluster_block * split + costs.sent * (shape.columns / 8) : 0.0;
      const double shared = costs.shared + (is_gelu ? kGeluEpilogue : 0.0);
      const double end = own / 8 * std::max(costs.eight * rounds, shared * shape.groups * blocks);
      found.add(costs.launch + sent * rounds + accumulators + end,
                {Form::one_tile, tile, split, stages, multiprocessors});
    }
  }
  // Of 32 bits, results may be the caller's: whether they can be copied depends on their address.
  const bool may_persist = p.may_persist && (!any_batch || has_16_bits(compute_type));
  for (int tile = 0; tile < kPersistentTiles && may_persist; ++tile) {
    const PersistentShape& shape = kPersistent[tile];
    const PersistentCost& cost = (is_gelu                     ? kGeluPersistentCosts
                                  : has_16_bits(compute_type) ? kPersistentCosts
                                                              : kTf32PersistentCosts)[tile];
    const double tiles =
        double{1} * divided(p.rows, shape.columns) * divided(p.filters, shape.groups * kFilters);
    if (!p.fits(shape.groups * kFilters)) continue;
    if (tiles <= multiprocessors && !any_batch) {
      if (tile + 1 == kPersistentTiles && has_16_bits(compute_type) && p.tiled && !p.both) {
        found.add(kPersistentOnce + p.steps * kPersistentOnceStep,
                  {Form::persistent, tile, 1, 0, multiprocessors});
      }
      continue;
    }
    const double rounds = std::ceil(tiles / (multiprocessors * shape.blocks));
    found.add(
        kPersistentLaunch + rounds * (cost.tile + std::max(p.mean_steps() * cost.step, cost.end)),
        {Form::persistent, tile, 1, 0, multiprocessors});
  }
  for (int tile = 0; tile < kRowsTiles && p.in_rows; ++tile) {
    const RowsShape& shape = kRows[tile];
    const int lines = lines_of(shape, p.out_h, p.out_w);
    if (lines == 0) continue;
    const int positions = lines * (shape.several ? p.out_w : shape.columns);
    const double tiles =
        double{1} * (p.rows / positions) * divided(p.filters, shape.groups * kFilters);
    for (int split = 1; split <= (shape.several ? kRowsSplit : 1); split *= 2) {
      const double blocks = std::ceil(tiles * split / multiprocessors);
      // Where they take turns, persistent blocks are faster.
      if (p.chunks < split || (blocks > shape.blocks && !any_batch)) continue;
      const int steps = p.steps / p.chunks * divided(p.chunks, split);
      found.add(kRowsCosts[tile].tile + steps * kRowsCosts[tile].step * blocks +
                    (split > 1 ? kRowsSent : 0.0),
                {Form::rows, tile, split, 0, multiprocessors});
    }
  }
  return found;
}

}  // namespace

double least_time(const Gemm& p, ElementType compute_type, int multiprocessors) {
  return rate(p, compute_type, multiprocessors).least();
}

double pool_time(double bytes) { return kPoolLaunch + bytes * kPoolByte; }

Choice choose(const Gemm& p, ElementType compute_type, int multiprocessors, int rank) {
  if (rank != kAnyBatch) return rate(p, compute_type, multiprocessors).at(rank);
  const auto is_same = [](const Choice& a, const Choice& b) {
    return a.form == b.form && a.tile == b.tile && a.split == b.split;
  };
  const auto rated = [&](int images) {
    Gemm other = p;
    other.rows = images * p.out_h * p.out_w;
    return rate(other, compute_type, multiprocessors, true);
  };
  Choice found = choice_for_any_batch(rated, is_same);
  // Stages depend on how many blocks a multiprocessor has, and no sum does on them.
  rate(p, compute_type, multiprocessors, true).each([&](double, const Choice& choice) {
    if (is_same(choice, found)) found = choice;
  });
  return found;
}

}  // namespace cnn_engine::cuda::wgmma
