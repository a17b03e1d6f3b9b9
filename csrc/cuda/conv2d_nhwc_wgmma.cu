// conv2d_nhwc_wgmma: what it takes, the choice of a tile and of the blocks that share its sums.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/conv2d_nhwc_wgmma_map.h"
#include "cuda/conv2d_nhwc_wgmma_product.h"
#include "cuda/launch.cuh"
#include "cuda/rated.h"
#include "cuda/stored.cuh"
#include "cuda/strided.cuh"
#include "ops/conv2d_nhwc_wgmma.h"

namespace cnn_engine::cuda {
namespace wgmma {
namespace {

constexpr int kMostSplit = 8;  // blocks that every GPU has in a cluster

// Bytes of shared memory for a block's stages.
constexpr int kHalf = 110 * 1024, kAll = 200 * 1024;

int divided(std::int64_t count, int by) { return static_cast<int>((count + by - 1) / by); }

constexpr int item_bytes(Conv2dOperands operands) { return has_16_bits(operands) ? 2 : 4; }

// Channels of a step.
constexpr int channels_of(Conv2dOperands operands) { return 128 / item_bytes(operands); }

int chunks_of(const Conv2dShape& shape, Conv2dOperands operands) {
  return divided(shape.c, channels_of(operands));
}

// Why the kernel cannot run a shape, or null.
const char* why_not(const Conv2dShape& shape, Conv2dOperands operands) {
  const int down = (shape.r - 1) * shape.dilation_h, right = (shape.s - 1) * shape.dilation_w;
  const auto is_corner = [](int offset) {
    return offset >= -128 && offset <= 127;
  };
  if (shape.groups != 1) return "one group";
  if (has_16_bits(operands) && shape.c % 8 != 0) return "channels in eights";
  if (shape.c % 4 != 0) return "channels in fours";
  if (shape.stride_h > 8 || shape.stride_w > 8) return "strides up to 8";
  if (!is_corner(-shape.pad_top) || !is_corner(-shape.pad_left) ||
      !is_corner(shape.pad_bottom - down) || !is_corner(shape.pad_right - right) || down > 255 ||
      right > 255) {
    return "windows that reach up to 128 places beyond the image";
  }
  return nullptr;
}

// What a launch takes, in microseconds: fitted to launches of 78 convolutions (of 32 bits 47), of
// batches of 1, 5 and 20, on an H200; the geometric mean of the times of what is chosen is 1.02
// times that of the fastest (docs/performance.md). Of one-tile blocks, then of blocks that stay, of
// tf32 fitted to launches of 20.
struct TileCost {
  double step;   // of a block by itself
  double share;  // of a step of each block that a multiprocessor has
};
struct Costs {
  double launch;
  double cluster_block;  // for each block of a cluster
  double sent;           // eight places, to others of the cluster
  double eight, shared;  // eight places' end, likewise
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
constexpr TileCost kSplitTileCosts[] = {{0.639, 0.293}, {0.576, 0.394}, {0.178, 1.076}};
static_assert(sizeof(kSplitTileCosts) / sizeof(TileCost) == kShapesOf<float>.count);
constexpr Costs kSplitCosts = {
    1.161, 0.068, 0.126, 0.0, 0.241, 1.388, {}, kShapesOf<float>, kSplitTileCosts};

// Of blocks that stay: each of a block's tiles takes `tile` and the longer of its steps and its
// `end`.
struct StayingCost {
  double tile, step, end;
};
constexpr double kStayingLaunch = 1.884;
constexpr StayingCost kStayingCosts[] = {
    {0.747, 0.488, 0.780}, {1.311, 0.518, 0.701}, {1.055, 0.493, 1.325}};
constexpr StayingCost kTf32StayingCosts[] = {
    {0.561, 0.520, 3.429}, {2.929, 0.434, 2.124}, {2.132, 0.312, 3.413}};
static_assert(sizeof(kStayingCosts) / sizeof(kStayingCosts[0]) == kStayingTiles);
static_assert(sizeof(kTf32StayingCosts) == sizeof(kStayingCosts));

// Of tiles that are rows or parts of them, fitted to launches of six and of three: a step of each
// block of a multiprocessor.
struct RowsCost {
  double tile, step;
};
constexpr RowsCost kRowsCosts[] = {{2.00, 0.092}, {2.64, 0.145}, {3.32, 0.254}, {2.90, 0.145}};
constexpr double kRowsSent = 0.85;  // between the blocks of a cluster
static_assert(sizeof(kRowsCosts) / sizeof(kRowsCosts[0]) == kRowsTiles);

// Of tiles that are patches of the image, of each that a multiprocessor has, by twos where it has
// more than one; steps are longer where many tensor cores are at work for long.
constexpr RowsCost kPatchCosts[] = {{0.50, 0.251}, {0.35, 0.133}};
constexpr double kPatchLaunch = 2.6, kPatchSent = 0.3, kPatchSentByAll = 1.1, kPatchSlower = 1.12;
static_assert(sizeof(kPatchCosts) / sizeof(kPatchCosts[0]) == kPatches);
// Of a max pool of 2x2 by itself, and of each byte that it reads and writes.
constexpr double kPoolLaunch = 1.2, kPoolByte = 0.31e-6;

const Costs& costs_of(Conv2dOperands operands) {
  if (operands == Conv2dOperands::float32) return kSplitCosts;
  return operands == Conv2dOperands::tf32 ? kTf32Costs : kCosts;
}

void check(const Conv2dShape& shape, Conv2dOperands operands) {
  if (const char* expected = why_not(shape, operands)) {
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma: expected ") + expected);
  }
}

bool in_pieces(const void* address, int pitch, Stored stored) {
  return is_aligned(address, 16) && pitch * bytes_of(stored) % 16 == 0;
}

void check_source(const void* x, int pitch, Stored stored, Conv2dOperands operands) {
  check_stored("x", stored, operands);
  if (bytes_of(stored) != item_bytes(operands) || !in_pieces(x, pitch, stored)) {
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma: expected x in ") +
                                name_of(operands) +
                                ", its pitch and all addresses multiples of 16 bytes, found " +
                                name_of(stored) + " with a pitch of " + std::to_string(pitch));
  }
}

void check_packed(const void* packed) {
  if (!is_aligned(packed, 16)) {
    throw std::invalid_argument(
        "conv2d_nhwc_wgmma: expected packed weights at a multiple of 16 bytes");
  }
}

// Why patches cannot make the pooled results of a shape, or null.
const char* why_not_pooled(const Conv2dShape& shape, Conv2dOperands operands) {
  if (!has_16_bits(operands)) return "operands of 16 bits";
  if (shape.r != 3 || shape.s != 3 || shape.stride_h * shape.stride_w != 1 ||
      shape.dilation_h * shape.dilation_w != 1) {
    return "a kernel of 3x3, one place apart, without dilation";
  }
  if (shape.k % 8 != 0) return "filters in eights";
  return why_not(shape, operands);
}

void check_pooled(const Conv2dShape& shape, const Conv2dPitches& pitches, const void* output,
                  Conv2dOperands operands) {
  const char* expected = why_not_pooled(shape, operands);
  if (!expected && !(is_aligned(output, 16) && pitches.y % 8 == 0)) {
    expected = "y's pitch and address in multiples of 16 bytes";
  }
  if (expected) {
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma_pool: expected ") + expected);
  }
}

// Why two convolutions' results cannot be added, or one's filters follow the other's; null.
const char* why_apart(const Conv2dShape& a, const Conv2dShape& b, bool beside) {
  if (a.n != b.n || a.out_h() != b.out_h() || a.out_w() != b.out_w()) return "as many places";
  if (beside) return a.k % kFilters == 0 ? nullptr : "filters of the first in sixty-fours";
  return a.k == b.k ? nullptr : "as many filters";
}

void check_pair(const Conv2dShape& shape, const Conv2dShape& other, bool beside,
                Conv2dOperands operands) {
  check(shape, operands);
  check(other, operands);
  if (const char* expected = why_apart(shape, other, beside)) {
    const auto said = [](const Conv2dShape& of) {
      return "[" + std::to_string(of.n) + ", " + std::to_string(of.out_h()) + ", " +
             std::to_string(of.out_w()) + ", " + std::to_string(of.k) + "]";
    };
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma_pair: expected ") + expected +
                                ", found results of " + said(shape) + " and " + said(other));
  }
}

Source source_of(const Conv2dShape& shape, Conv2dOperands operands) {
  return {is_tiled(shape),  shape.stride_h,
          shape.stride_w,   shape.pad_top,
          shape.pad_left,   shape.dilation_h,
          shape.dilation_w, shape.s,
          shape.r,          chunks_of(shape, operands)};
}

// What is summed; `other` may be null. With `beside` its filters follow the first's.
Product product_of(const Conv2dShape& shape, const Conv2dShape* other, bool beside,
                   Conv2dOperands operands) {
  Product p = {};
  static_cast<Source&>(p) = source_of(shape, operands);
  p.channels = shape.c;
  p.filters = shape.k;
  p.out_h = shape.out_h();
  p.out_w = shape.out_w();
  p.both = other != nullptr;
  if (other) p.second = source_of(*other, operands);
  p.steps = p.own_steps() + p.second.own_steps();
  p.first_steps = beside ? p.own_steps() : p.steps;
  p.second_filter = divided(shape.k, kFilters) * kFilters;
  if (beside) p.filters += other->k;
  p.floor = -std::numeric_limits<float>::infinity();
  return p;
}

// Says of a product how its end may be computed.
void set_ends(Product& p, Conv2dOperands operands) {
  const bool is_relu = p.activation == UnaryFunction::relu;
  p.low = is_relu ? 0.0f : p.alpha;
  p.high = is_relu ? std::numeric_limits<float>::infinity() : p.beta;
  const bool is_clamp = is_relu || p.activation == UnaryFunction::clip;
  const bool all_rounded = p.y_is_rounded && (!p.residual || p.residual_is_rounded);
  const bool in_tiles = p.in_pieces && p.filters % 8 == 0;
  p.in_fragments = all_rounded && in_tiles && is_clamp;
  p.may_stay = (all_rounded || operands == Conv2dOperands::tf32) && in_tiles && !p.has_prologue() &&
               (is_clamp || p.activation == UnaryFunction::hard_swish ||
                p.activation == UnaryFunction::swish);
  p.in_rows = p.in_fragments && !p.residual && !p.both && p.taps_a_row == 3 &&
              p.taps_a_column == 3 && p.stride_h * p.stride_w * p.dilation_h * p.dilation_w == 1;
}

// Steps of the first source that need no more than its `known` channels.
int steps_ahead(const Product& p, Conv2dOperands operands, int known) {
  if (known >= p.channels) return p.own_steps();
  return p.taps_a_row * p.taps_a_column == 1 ? known / channels_of(operands) : 0;
}

int multiprocessors_of(int device) {
  int count = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Launches a product of a whole batch, of which its places and what depends on them are not set.
void launch_batch(const Sources& from, const Product& batch, const Conv2dStored& stored,
                  Conv2dOperands operands, int rank, Stream stream) {
  if (from.first.shape.n == 0) return;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  const std::int64_t places = std::int64_t{batch.out_h} * batch.out_w;
  const std::int64_t made =
      batch.pools ? std::int64_t{batch.out_h / 2} * (batch.out_w / 2) : places;
  for_each_part_of_batch(from.first.shape.n, places, [&](std::int64_t first, int images) {
    const std::int64_t before = first * made;
    Sources part = from;
    for (Images* source : {&part.first, &part.second}) {
      if (!source->x) continue;
      const Conv2dShape& shape = source->shape;
      source->x = element(source->x, stored.x, first * shape.h * shape.w * source->pitch);
      source->shape.n = images;
    }
    Product p = batch;
    if (p.scale_per_image) p.scale += first * p.channels;
    if (p.residual) p.residual = element(p.residual, stored.residual, before * p.residual_pitch);
    p.y = element(p.y, stored.y, before * p.y_pitch);
    p.residual_is_rounded = stored.residual != Stored::float32;
    p.y_is_rounded = stored.y != Stored::float32;
    p.in_pieces = in_pieces(p.y, p.y_pitch, stored.y) &&
                  (!p.residual || in_pieces(p.residual, p.residual_pitch, stored.residual));
    p.rows = static_cast<int>(images * places);
    set_ends(p, operands);
    const Choice choice = choose(p, operands, multiprocessors_of(device), rank);
    with_type(operands, [&](auto* type) {
      launch_product<std::remove_pointer_t<decltype(type)>>(part, p, choice, stream);
    });
  });
}

}  // namespace

bool is_worth_splitting(const Conv2dShape& shape, Conv2dOperands operands) {
  constexpr std::int64_t kProducts = 1 << 24;
  return operands != Conv2dOperands::float32 ||
         shape.weight_size() * shape.out_h() * shape.out_w() >= kProducts;
}

bool runs_on(int device) {
  static const bool compiled =
      std::string(CNN_ENGINE_CUDA_ARCHITECTURES).find("90a") != std::string::npos;
  int major = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return compiled && major == 9;
}

namespace {

// A tile with 1, 2, 4 and 8 blocks for its sums; patches too.
using Rating = Rated<Choice, kTiles * 4 + kStayingTiles + kRowsTiles * 2 + kPatches + 3>;

void rate_patches(Rating& found, const Product& p, int multiprocessors) {
  for (int tile = 0; tile < kPatches && p.in_rows; ++tile) {
    const double tiles = double{1} * (p.rows / (p.out_h * p.out_w)) *
                         divided(p.out_h, kPatchRows[tile]) * divided(p.out_w, 8) *
                         divided(p.filters, kFilters);
    const RowsCost& cost = kPatchCosts[tile];
    for (int split = 1; split <= (tile + 1 == kPatches ? kPatchSplit : 1); split *= 2) {
      const int chunks = divided(p.chunks, split);
      // Of a multiprocessor; clusters do not fill the groups that multiprocessors are in.
      const int places = split < 4 ? multiprocessors : multiprocessors * (64 - split) / 66;
      const double all = tiles * split / places;
      if (split > 1 && (chunks * (split - 1) >= p.chunks || all > 1)) continue;
      const double blocks = all > 1 ? 2 * std::ceil(all / 2) : 1;
      const double steps = p.steps / p.chunks * chunks * cost.step;
      const double sent = split > 1 ? kPatchSent + kPatchSentByAll * all : 0.0;
      found.add(
          kPatchLaunch + blocks * (cost.tile + steps * (blocks > 4 ? kPatchSlower : 1)) + sent,
          {Form::patches, tile, split, 0, multiprocessors});
    }
  }
}

Rating rate(const Product& p, Conv2dOperands operands, int multiprocessors) {
  const Costs& costs = costs_of(operands);
  Rating found;
  rate_patches(found, p, multiprocessors);
  if (p.pools) return found;
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
    for (int split = 1; split <= kMostSplit; split *= 2) {
      const int most = p.most_steps(), steps = divided(most, split);
      if (steps * (split - 1) >= most) continue;  // a block would have none
      // Of a multiprocessor; clusters do not fill the groups that multiprocessors are in.
      const int places = split < 4 ? multiprocessors : multiprocessors * (64 - split) / 66;
      const double blocks = std::ceil(tiles * split / places);
      // Two blocks of a multiprocessor, of this launch or of the next, have half of its memory.
      const bool alone = blocks == 1 || shape.is_alone();
      const int own = own_rows(shape.columns, split);
      const int beside = received_bytes(shape.groups, shape.columns, split) +
                         (p.residual && p.residual_is_rounded ? own * shape.groups * 128 : 0);
      // Of 16 bits, whose costs are fitted so, as if two blocks with two stages always had room.
      if (!has_16_bits(operands) && !alone && beside + 2 * shape.stage_bytes() > kHalf) continue;
      const int stages = std::max(2, ((alone ? kAll : kHalf) - beside) / shape.stage_bytes());
      const double late = steps > stages ? costs.latency / stages : 0.0,
                   rounds = std::ceil(blocks / 2);
      const double sums = std::max(steps * std::max(cost.step, late) * rounds,
                                   steps * (p.mean_steps() / most) * cost.share * blocks);
      const double sent =
          split > 1 ? costs.cluster_block * split + costs.sent * (shape.columns / 8) : 0.0;
      const double end =
          own / 8 * std::max(costs.eight * rounds, costs.shared * shape.groups * blocks);
      found.add(costs.launch + sent * rounds + sums + end,
                {Form::one_tile, tile, split, stages, multiprocessors});
    }
  }
  for (int tile = 0; tile < kStayingTiles && p.may_stay; ++tile) {
    const StayingShape& shape = kStaying[tile];
    const StayingCost& cost = (has_16_bits(operands) ? kStayingCosts : kTf32StayingCosts)[tile];
    const double tiles =
        double{1} * divided(p.rows, shape.columns) * divided(p.filters, shape.groups * kFilters);
    if (tiles <= multiprocessors || !p.fits(shape.groups * kFilters)) continue;
    const double rounds = std::ceil(tiles / (multiprocessors * shape.blocks));
    found.add(
        kStayingLaunch + rounds * (cost.tile + std::max(p.mean_steps() * cost.step, cost.end)),
        {Form::staying, tile, 1, 0, multiprocessors});
  }
  for (int tile = 0; tile < kRowsTiles && p.in_rows; ++tile) {
    const RowsShape& shape = kRows[tile];
    const int lines = lines_of(shape, p.out_h, p.out_w);
    if (lines == 0) continue;
    const int places = lines * (shape.several ? p.out_w : shape.columns);
    const double tiles =
        double{1} * (p.rows / places) * divided(p.filters, shape.groups * kFilters);
    for (int split = 1; split <= (shape.several ? kRowsSplit : 1); split *= 2) {
      const double blocks = std::ceil(tiles * split / multiprocessors);
      // Where they take turns, blocks that stay are faster.
      if (p.chunks < split || blocks > shape.blocks) continue;
      const int steps = p.steps / p.chunks * divided(p.chunks, split);
      found.add(kRowsCosts[tile].tile + steps * kRowsCosts[tile].step * blocks +
                    (split > 1 ? kRowsSent : 0.0),
                {Form::rows, tile, split, 0, multiprocessors});
    }
  }
  return found;
}

// What relu of such results, stored as what is multiplied, takes.
double time_of(Product p, const Conv2dShape& shape, Conv2dOperands operands, const void* residual,
               int multiprocessors) {
  p.activation = UnaryFunction::relu;
  p.residual = residual;
  p.residual_is_rounded = p.y_is_rounded = has_16_bits(operands);
  p.in_pieces = true;
  p.rows = static_cast<int>(std::min<std::int64_t>(std::int64_t{shape.n} * p.out_h * p.out_w,
                                                   std::numeric_limits<int>::max()));
  set_ends(p, operands);
  return rate(p, operands, multiprocessors).least();
}

}  // namespace

Choice choose(const Product& p, Conv2dOperands operands, int multiprocessors, int rank) {
  return rate(p, operands, multiprocessors).at(rank);
}

}  // namespace wgmma

std::int64_t conv2d_nhwc_wgmma_takes(const Conv2dShape& shape, Conv2dOperands operands,
                                     int device) {
  // A step takes as long however few channels it has.
  const bool wanted =
      operands != Conv2dOperands::float32 || shape.c >= wgmma::channels_of(operands);
  return wanted && wgmma::is_worth_splitting(shape, operands) && wgmma::runs_on(device) &&
         wgmma::why_not(shape, operands) == nullptr;
}

std::int64_t conv2d_nhwc_wgmma_packed(const Conv2dShape& shape, Conv2dOperands operands, int) {
  wgmma::check(shape, operands);
  return std::int64_t{128} * wgmma::divided(shape.k, wgmma::kFilters) * wgmma::kFilters * shape.r *
         shape.s * wgmma::chunks_of(shape, operands);
}

void conv2d_nhwc_wgmma_pack(const float* weight, void* packed, const Conv2dShape& shape,
                            Conv2dOperands operands, Stream stream) {
  wgmma::check(shape, operands);
  const wgmma::Product p = wgmma::product_of(shape, nullptr, false, operands);
  wgmma::with_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    wgmma::launch_pack<T>(weight, packed, shape, p.chunks, stream);
  });
  // conv2d_nhwc_wgmma reads them before it waits for the kernels before it.
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void conv2d_nhwc_wgmma(const void* input, const void* packed, const float* bias,
                       const void* residual, const float* scale, const float* shift, void* output,
                       const Conv2dShape& shape, const Conv2dPitches& pitches,
                       const Conv2dStored& stored, const Overflow& overflow,
                       Conv2dOperands operands, bool scale_per_image, float floor,
                       UnaryFunction activation, float alpha, float beta, int known, bool holds,
                       int rank, Stream stream) {
  wgmma::check(shape, operands);
  check_stored("residual", stored.residual, operands);
  check_stored("y", stored.y, operands);
  wgmma::check_source(input, pitches.x, stored.x, operands);
  wgmma::check_packed(packed);
  wgmma::Product p = wgmma::product_of(shape, nullptr, false, operands);
  p.packed = static_cast<const char*>(packed);
  p.bias = bias;
  p.residual = residual;
  p.scale = scale;
  p.shift = shift;
  p.floor = floor;
  p.scale_per_image = scale_per_image;
  p.y = output;
  p.y_pitch = pitches.y;
  p.residual_pitch = pitches.residual;
  if (p.has_prologue() &&
      !(is_aligned(scale, 16) && is_aligned(shift, 16) && shape.r * shape.s == 1 &&
        shape.pad_top + shape.pad_left + shape.pad_bottom + shape.pad_right == 0)) {
    throw std::invalid_argument(
        "scale, shift, floor: expected a kernel of 1x1 without padding, and addresses that are "
        "multiples of 16");
  }
  p.ahead = wgmma::steps_ahead(p, operands, known);
  p.holds = holds;
  p.activation = activation;
  p.alpha = alpha;
  p.beta = beta;
  p.overflow = overflow;
  wgmma::launch_batch({{input, shape, pitches.x}, {}}, p, stored, operands, rank, stream);
}

std::int64_t conv2d_nhwc_wgmma_pool_takes(const Conv2dShape& shape, Conv2dOperands operands,
                                          int device) {
  if (!conv2d_nhwc_wgmma_takes(shape, operands, device) || wgmma::why_not_pooled(shape, operands)) {
    return 0;
  }
  wgmma::Product p = wgmma::product_of(shape, nullptr, false, operands);
  const int multiprocessors = wgmma::multiprocessors_of(device);
  const double apart = wgmma::time_of(p, shape, operands, nullptr, multiprocessors);
  p.pools = true;
  const double together = wgmma::time_of(p, shape, operands, nullptr, multiprocessors);
  const double made = 2.0 * shape.n * shape.out_h() * shape.out_w() * shape.k;  // bytes
  return together < apart + wgmma::kPoolLaunch + 1.25 * made * wgmma::kPoolByte;
}

void conv2d_nhwc_wgmma_pool(const void* input, const void* packed, const float* bias, void* output,
                            const Conv2dShape& shape, const Conv2dPitches& pitches,
                            const Overflow& overflow, Conv2dOperands operands,
                            UnaryFunction activation, float alpha, float beta, int rank,
                            Stream stream) {
  wgmma::check_pooled(shape, pitches, output, operands);
  const Stored stored = operands == Conv2dOperands::float16 ? Stored::float16 : Stored::bfloat16;
  wgmma::check_source(input, pitches.x, stored, operands);
  wgmma::check_packed(packed);
  wgmma::Product p = wgmma::product_of(shape, nullptr, false, operands);
  p.pools = true;
  p.packed = static_cast<const char*>(packed);
  p.bias = bias;
  p.y = output;
  p.y_pitch = pitches.y;
  p.activation = activation;
  p.alpha = alpha;
  p.beta = beta;
  p.overflow = overflow;
  if (activation != UnaryFunction::relu && activation != UnaryFunction::clip) {
    throw std::invalid_argument("conv2d_nhwc_wgmma_pool: expected a clamp");
  }
  wgmma::launch_batch({{input, shape, pitches.x}, {}}, p, {stored, Stored::float32, stored},
                      operands, rank, stream);
}

std::int64_t conv2d_nhwc_wgmma_pair_takes(const Conv2dShape& shape, const Conv2dShape& other,
                                          bool beside, Conv2dOperands operands, int device) {
  if (!conv2d_nhwc_wgmma_takes(shape, operands, device) ||
      !conv2d_nhwc_wgmma_takes(other, operands, device) || wgmma::why_apart(shape, other, beside)) {
    return 0;
  }
  const int multiprocessors = wgmma::multiprocessors_of(device);
  const auto time = [&](const Conv2dShape& first, const Conv2dShape* second, const void* residual) {
    const wgmma::Product p = wgmma::product_of(first, second, second && beside, operands);
    return wgmma::time_of(p, first, operands, residual, multiprocessors);
  };
  const void* const some = &shape;
  return time(shape, &other, nullptr) <
         time(shape, nullptr, nullptr) + time(other, nullptr, beside ? nullptr : some);
}

std::int64_t conv2d_nhwc_wgmma_pair_packed(const Conv2dShape& shape, const Conv2dShape& other,
                                           bool beside, Conv2dOperands operands, int) {
  wgmma::check_pair(shape, other, beside, operands);
  return conv2d_nhwc_wgmma_packed(shape, operands, 0) +
         conv2d_nhwc_wgmma_packed(other, operands, 0);
}

void conv2d_nhwc_wgmma_pair_pack(const float* weight, const float* other_weight, void* packed,
                                 const Conv2dShape& shape, const Conv2dShape& other, bool beside,
                                 Conv2dOperands operands, Stream stream) {
  wgmma::check_pair(shape, other, beside, operands);
  const wgmma::Product p = wgmma::product_of(shape, &other, beside, operands);
  wgmma::with_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (beside) {
      char* const behind =
          static_cast<char*>(packed) + conv2d_nhwc_wgmma_packed(shape, operands, 0);
      wgmma::launch_pack<T>(weight, packed, shape, p.chunks, stream);
      wgmma::launch_pack<T>(other_weight, behind, other, p.second.chunks, stream);
    } else {
      wgmma::launch_pack<T>(weight, packed, shape, p.chunks, 0, p.steps, stream);
      wgmma::launch_pack<T>(other_weight, packed, other, p.second.chunks, p.own_steps(), p.steps,
                            stream);
    }
  });
  CUDA_CHECK(cudaStreamSynchronize(stream));  // as conv2d_nhwc_wgmma_pack
}

void conv2d_nhwc_wgmma_pair(const void* input, const void* other_input, const void* packed,
                            const float* bias, void* output, const Conv2dShape& shape,
                            const Conv2dShape& other, bool beside, const Conv2dPitches& pitches,
                            int other_pitch, const Conv2dStored& stored, const Overflow& overflow,
                            Conv2dOperands operands, UnaryFunction activation, float alpha,
                            float beta, int known, bool holds, int rank, Stream stream) {
  wgmma::check_pair(shape, other, beside, operands);
  check_stored("y", stored.y, operands);
  wgmma::check_source(input, pitches.x, stored.x, operands);
  wgmma::check_source(other_input, other_pitch, stored.x, operands);
  wgmma::check_packed(packed);
  wgmma::Product p = wgmma::product_of(shape, &other, beside, operands);
  p.packed = static_cast<const char*>(packed);
  p.bias = bias;
  p.y = output;
  p.y_pitch = pitches.y;
  p.ahead = wgmma::steps_ahead(p, operands, known);
  p.holds = holds;
  p.activation = activation;
  p.alpha = alpha;
  p.beta = beta;
  p.overflow = overflow;
  wgmma::launch_batch({{input, shape, pitches.x}, {other_input, other, other_pitch}}, p, stored,
                      operands, rank, stream);
}

}  // namespace cnn_engine::cuda
