// conv2d_nhwc_wgmma: what it takes, the choice of a tile and of the blocks that share its sums.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/conv2d_nhwc_wgmma_product.h"
#include "cuda/launch.cuh"
#include "cuda/rated.h"
#include "cuda/stored.cuh"
#include "cuda/strided.cuh"
#include "ops/conv2d_nhwc_wgmma.h"

namespace cnn_engine::cuda {
namespace wgmma {
namespace {

constexpr int kChannels = 64;  // of a step
constexpr int kMostSplit = 8;  // blocks that every GPU has in a cluster

// Bytes of shared memory for a block's stages.
constexpr int kHalf = 110 * 1024, kAll = 200 * 1024;

int divided(std::int64_t count, int by) { return static_cast<int>((count + by - 1) / by); }

int chunks_of(const Conv2dShape& shape) { return divided(shape.c, kChannels); }

// Calls body(a null pointer to the type that is multiplied).
template <typename Body>
void with_type(Conv2dOperands operands, const Body& body) {
  switch (operands) {
    case Conv2dOperands::float16:
      return body(static_cast<__half*>(nullptr));
    case Conv2dOperands::bfloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    default:
      throw std::invalid_argument(
          std::string("conv2d_nhwc_wgmma: expected operands of 16 bits, found ") +
          name_of(operands));
  }
}

// Why the kernel cannot run a shape, or null.
const char* why_not(const Conv2dShape& shape) {
  const int down = (shape.r - 1) * shape.dilation_h, right = (shape.s - 1) * shape.dilation_w;
  const auto is_corner = [](int offset) {
    return offset >= -128 && offset <= 127;
  };
  if (shape.groups != 1) return "one group";
  if (shape.c % 8 != 0) return "channels in eights";
  if (shape.stride_h > 8 || shape.stride_w > 8) return "strides up to 8";
  if (!is_corner(-shape.pad_top) || !is_corner(-shape.pad_left) ||
      !is_corner(shape.pad_bottom - down) || !is_corner(shape.pad_right - right) || down > 255 ||
      right > 255) {
    return "windows that reach up to 128 places beyond the image";
  }
  return nullptr;
}

// What a launch takes, in microseconds: fitted to launches of 78 convolutions, of batches of 1, 5
// and 20, on an H200; the geometric mean of the times of what is chosen is 1.02 times that of the
// fastest (docs/performance.md). Of one-tile blocks, then of blocks that stay.
struct TileCost {
  double step;   // of a block by itself
  double share;  // of a step of each block that a multiprocessor has
};
constexpr double kLaunch = 1.477;
constexpr double kClusterBlock = 0.043;            // for each block of a cluster
constexpr double kSent = 0.090;                    // eight places, to others of the cluster
constexpr double kEight = 0.122, kShared = 0.101;  // eight places' end, likewise
constexpr double kLatency = 0.553;                 // of a copy, which all stages share
constexpr TileCost kCosts[] = {{0.107, 0.091}, {0.119, 0.100}, {0.131, 0.149},
                               {0.127, 0.158}, {0.129, 0.156}, {0.169, 0.222},
                               {0.300, 0.275}, {0.135, 0.208}, {0.442, 0.375}};
static_assert(sizeof(kCosts) / sizeof(kCosts[0]) == kTiles);

// Of blocks that stay: each of a block's tiles takes `tile` and the longer of its steps and its
// `end`.
struct StayingCost {
  double tile, step, end;
};
constexpr double kStayingLaunch = 1.884;
constexpr StayingCost kStayingCosts[] = {
    {0.747, 0.488, 0.780}, {1.311, 0.518, 0.701}, {1.055, 0.493, 1.325}};
static_assert(sizeof(kStayingCosts) / sizeof(kStayingCosts[0]) == kStayingTiles);

void check(const Conv2dShape& shape) {
  if (const char* expected = why_not(shape)) {
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma: expected ") + expected);
  }
}

}  // namespace

bool runs_on(int device, Conv2dOperands operands) {
  static const bool compiled =
      std::string(CNN_ENGINE_CUDA_ARCHITECTURES).find("90a") != std::string::npos;
  int major = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return compiled && major == 9 &&
         (operands == Conv2dOperands::float16 || operands == Conv2dOperands::bfloat16);
}

Choice choose(const Product& p, int multiprocessors, int rank) {
  Rated<Choice, kTiles * 4 + kStayingTiles> found;  // a tile with 1, 2, 4 and 8 blocks for its sums
  for (int tile = 0; tile < kTiles; ++tile) {
    const TileShape& shape = kShapes[tile];
    if (p.has_prologue() && !shape.prologue) continue;
    const TileCost& cost = kCosts[tile];
    const double tiles =
        double{1} * divided(p.rows, shape.columns) * divided(p.filters, shape.groups * kFilters);
    for (int split = 1; split <= kMostSplit; split *= 2) {
      const int steps = divided(p.steps, split);
      if (steps * (split - 1) >= p.steps) continue;  // a block would have none
      // Of a multiprocessor; clusters do not fill the groups that multiprocessors are in.
      const int places = split < 4 ? multiprocessors : multiprocessors * (64 - split) / 66;
      const double blocks = std::ceil(tiles * split / places);
      // Two blocks of a multiprocessor, of this launch or of the next, have half of its memory.
      const int own = own_rows(shape.columns, split);
      const int beside = received_bytes(shape.groups, shape.columns, split) +
                         (p.residual ? own * shape.groups * 128 : 0);
      const int stages = std::max(2, ((blocks == 1 ? kAll : kHalf) - beside) / shape.stage_bytes());
      const double late = steps > stages ? kLatency / stages : 0.0, rounds = std::ceil(blocks / 2);
      const double sums =
          std::max(steps * std::max(cost.step, late) * rounds, steps * cost.share * blocks);
      const double sent = split > 1 ? kClusterBlock * split + kSent * (shape.columns / 8) : 0.0;
      const double end = own / 8 * std::max(kEight * rounds, kShared * shape.groups * blocks);
      found.add(kLaunch + sent * rounds + sums + end,
                {false, tile, split, stages, multiprocessors});
    }
  }
  for (int tile = 0; tile < kStayingTiles && p.in_fragments && !p.has_prologue(); ++tile) {
    const StayingShape& shape = kStaying[tile];
    const StayingCost& cost = kStayingCosts[tile];
    const double tiles =
        double{1} * divided(p.rows, shape.columns) * divided(p.filters, shape.groups * kFilters);
    if (tiles <= multiprocessors) continue;
    const double rounds = std::ceil(tiles / (multiprocessors * shape.blocks));
    found.add(kStayingLaunch + rounds * (cost.tile + std::max(p.steps * cost.step, cost.end)),
              {true, tile, 1, 0, multiprocessors});
  }
  return found.at(rank);
}

}  // namespace wgmma

std::int64_t conv2d_nhwc_wgmma_takes(const Conv2dShape& shape, Conv2dOperands operands,
                                     int device) {
  return wgmma::runs_on(device, operands) && wgmma::why_not(shape) == nullptr;
}

std::int64_t conv2d_nhwc_wgmma_packed(const Conv2dShape& shape, Conv2dOperands, int) {
  wgmma::check(shape);
  return std::int64_t{2} * wgmma::divided(shape.k, wgmma::kFilters) * wgmma::kFilters * shape.r *
         shape.s * wgmma::chunks_of(shape) * wgmma::kChannels;
}

void conv2d_nhwc_wgmma_pack(const float* weight, void* packed, const Conv2dShape& shape,
                            Conv2dOperands operands, Stream stream) {
  wgmma::check(shape);
  wgmma::with_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    wgmma::launch_pack<T>(weight, packed, shape, wgmma::chunks_of(shape), stream);
  });
  // conv2d_nhwc_wgmma reads them before it waits for the kernels before it.
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void conv2d_nhwc_wgmma(const void* input, const void* packed, const float* bias,
                       const void* residual, const float* scale, const float* shift, void* output,
                       const Conv2dShape& shape, const Conv2dPitches& pitches,
                       const Conv2dStored& stored, const Overflow& overflow,
                       Conv2dOperands operands, bool scale_per_image, float floor,
                       UnaryFunction activation, float alpha, float beta, int rank, Stream stream) {
  wgmma::check(shape);
  check_stored("residual", stored.residual, operands);
  check_stored("y", stored.y, operands);
  check_stored("x", stored.x, operands);
  const auto in_pieces = [](const void* address, int pitch, Stored stored) {
    return is_aligned(address, 16) && pitch * bytes_of(stored) % 16 == 0;
  };
  if (stored.x == Stored::float32 || !in_pieces(input, pitches.x, stored.x) ||
      !is_aligned(packed, 16)) {
    throw std::invalid_argument(
        std::string("conv2d_nhwc_wgmma: expected x in ") + name_of(operands) +
        ", its pitch and all addresses multiples of 16 bytes, found " + name_of(stored.x) +
        " with a pitch of " + std::to_string(pitches.x));
  }
  const bool prologue = scale || shift || floor > -std::numeric_limits<float>::infinity();
  if (prologue && !(is_aligned(scale, 16) && is_aligned(shift, 16) && shape.r * shape.s == 1 &&
                    shape.pad_top + shape.pad_left + shape.pad_bottom + shape.pad_right == 0)) {
    throw std::invalid_argument(
        "scale, shift, floor: expected a kernel of 1x1 without padding, and addresses that are "
        "multiples of 16");
  }
  if (shape.n == 0) return;
  int device = 0, multiprocessors = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const std::int64_t places = std::int64_t{shape.out_h()} * shape.out_w();
  const std::int64_t image_in = std::int64_t{shape.h} * shape.w * pitches.x;
  for_each_part_of_batch(shape.n, places, [&](std::int64_t first, int images) {
    const std::int64_t before = first * places;
    wgmma::Images x = {element(input, stored.x, first * image_in), shape, pitches.x};
    x.shape.n = images;
    wgmma::Product p = {};
    p.packed = static_cast<const char*>(packed);
    p.bias = bias;
    p.scale = scale_per_image ? scale + first * shape.c : scale;
    p.shift = shift;
    p.scale_per_image = scale_per_image;
    p.floor = floor;
    p.channels = shape.c;
    p.residual = residual ? element(residual, stored.residual, before * pitches.residual) : nullptr;
    p.y = element(output, stored.y, before * pitches.y);
    p.residual_is_rounded = stored.residual != Stored::float32;
    p.y_is_rounded = stored.y != Stored::float32;
    p.in_pieces = in_pieces(p.y, pitches.y, stored.y) &&
                  (!residual || in_pieces(p.residual, pitches.residual, stored.residual));
    p.rows = static_cast<int>(images * places);
    p.filters = shape.k;
    p.y_pitch = pitches.y;
    p.residual_pitch = pitches.residual;
    p.out_h = shape.out_h();
    p.out_w = shape.out_w();
    p.stride_h = shape.stride_h;
    p.stride_w = shape.stride_w;
    p.pad_top = shape.pad_top;
    p.pad_left = shape.pad_left;
    p.dilation_h = shape.dilation_h;
    p.dilation_w = shape.dilation_w;
    p.taps_a_row = shape.s;
    p.chunks = wgmma::chunks_of(shape);
    p.steps = shape.r * shape.s * p.chunks;
    p.alpha = alpha;
    p.beta = beta;
    p.activation = activation;
    p.overflow = overflow;
    const bool is_relu = activation == UnaryFunction::relu;
    p.low = is_relu ? 0.0f : alpha;
    p.high = is_relu ? std::numeric_limits<float>::infinity() : beta;
    p.in_fragments = (is_relu || activation == UnaryFunction::clip) && p.y_is_rounded &&
                     p.in_pieces && p.filters % 8 == 0 && (!residual || p.residual_is_rounded);
    const wgmma::Choice choice = wgmma::choose(p, multiprocessors, rank);
    wgmma::with_type(operands, [&](auto* type) {
      wgmma::launch_product<std::remove_pointer_t<decltype(type)>>(x, p, choice, stream);
    });
  });
}

}  // namespace cnn_engine::cuda
