// conv2d_nhwc on CUDA: the choice of a tile, of the blocks that share its sums, and of how terms
// are read.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/conv2d_nhwc_gemm.h"
#include "cuda/sm80/rated.h"
#include "cuda/sm80/storage.cuh"

namespace cnn_engine::cuda {
namespace nhwc {
namespace {

// What a launch takes, in microseconds: fitted to 1,400 launches of 27 convolutions in each type
// (of tf32 37), of batches of 1, 5 and 20, on an H200; the geometric mean of the times of what is
// chosen is 1.00 to 1.10 times that of the fastest (docs/explanation/performance.md).
struct TileCost {
  int rows, columns;
  double step;   // of a block by itself
  double share;  // of a step of each block that a multiprocessor has
  double block;  // of a block beside its steps
};

struct Costs {
  double launch, cluster_block;  // the latter for each block of a cluster
  TileCost tiles[kTiles];
};

constexpr Costs kRounded16 = {0.71,
                              0.200,
                              {{64, 64, 0.838, 0.471, 2.15},
                               {32, 64, 0.411, 0.268, 1.47},
                               {16, 64, 0.339, 0.222, 1.20},
                               {64, 32, 0.480, 0.308, 1.45},
                               {128, 64, 1.094, 0.660, 2.92},
                               {128, 128, 1.732, 0.991, 5.25},
                               {64, 64, 0.681, 0.441, 1.74}}};
constexpr Costs kTf32 = {0.17,
                         0.293,
                         {{64, 64, 0.811, 0.494, 2.44},
                          {32, 64, 0.453, 0.293, 2.04},
                          {16, 64, 0.443, 0.271, 1.84},
                          {64, 32, 0.522, 0.333, 2.13},
                          {128, 64, 0.924, 1.089, 2.80},
                          {128, 128, 1.676, 1.684, 4.93},
                          {64, 64, 0.851, 0.565, 2.06}}};
constexpr Costs kSplit = {0.24,
                          0.241,
                          {{64, 64, 1.613, 0.949, 2.00},
                           {32, 64, 0.818, 0.520, 1.49},
                           {16, 64, 0.624, 0.400, 1.35},
                           {64, 32, 0.869, 0.563, 1.54},
                           {128, 64, 3.003, 1.732, 2.77},
                           {128, 128, 6.000, 3.500, 5.00},
                           {64, 64, 1.375, 0.925, 1.65}}};

const Costs& costs_of(ElementType compute_type) {
  if (compute_type == ElementType::float32) return kSplit;
  return compute_type == ElementType::tf32 ? kTf32 : kRounded16;
}

int divided(std::int64_t count, int by) { return static_cast<int>((count + by - 1) / by); }

}  // namespace

namespace {

// A tile with 1, 2, 4, 8 and 16 blocks for its terms.
using Rating = Rated<Choice, kTiles * 5>;

Rating rate(const Gemm& p, ElementType compute_type, Reads reads, int multiprocessors, int most) {
  const Costs& costs = costs_of(compute_type);
  Rating found;
  for (int tile = 0; tile < kTiles; ++tile) {
    if (!is_compiled(tile, compute_type, reads)) continue;
    const TileCost& cost = costs.tiles[tile];
    const double tiles =
        double{1} * divided(p.rows, cost.rows) * divided(p.filters, cost.columns) * p.shape.groups;
    for (int split = 1; split <= most; split *= 2) {
      const int steps = divided(p.steps, split);
      if (steps * (split - 1) >= p.steps) continue;                      // a block would have none
      const double blocks = std::ceil(tiles * split / multiprocessors);  // of a multiprocessor
      const double time = costs.launch + (split > 1 ? costs.cluster_block * split : 0.0) +
                          std::fmax(steps * cost.step, steps * cost.share * blocks) +
                          cost.block * blocks;
      found.add(time, {tile, split});
    }
  }
  return found;
}

}  // namespace

Choice choose(const Gemm& p, ElementType compute_type, Reads reads, int multiprocessors, int most,
              int rank) {
  if (rank != kAnyBatch) return rate(p, compute_type, reads, multiprocessors, most).at(rank);
  const auto rated = [&](int images) {
    Gemm other = p;
    other.rows = images * p.out_h * p.out_w;
    return rate(other, compute_type, reads, multiprocessors, most);
  };
  return choice_for_any_batch(rated, [](const Choice& a, const Choice& b) {
    return a.tile == b.tile && a.split == b.split;
  });
}

}  // namespace nhwc

namespace {

// A planar x becomes [N, H, W, 4] first: four channels are read at once.
constexpr int kPlanarChannels = 4;

bool has_16_bits(ElementType compute_type) { return nhwc::step_terms(compute_type) == 64; }

int channels_of(const Conv2dShape& shape, bool planar) {
  return planar ? kPlanarChannels : shape.group_channels();
}

int steps_of(const Conv2dShape& shape, bool planar, ElementType compute_type) {
  const int terms = channels_of(shape, planar) * shape.r * shape.s;
  return (terms + nhwc::step_terms(compute_type) - 1) / nhwc::step_terms(compute_type);
}

void check_planar(const Conv2dShape& shape, bool planar) {
  if (planar && (shape.groups > 1 || shape.c > kPlanarChannels)) {
    throw std::invalid_argument("planar: expected one group and at most 4 channels, found " +
                                std::to_string(shape.groups) + " and " + std::to_string(shape.c));
  }
}

template <typename T>
__global__ void four_channels_kernel(const float* x,  // [N, C, H, W]
                                     T* y,            // [N, H, W, 4]
                                     int channels, int positions, std::int64_t all,
                                     const Overflow overflow) {
  let_successors_start();
  wait_for_inputs();
  const std::int64_t index = grid_thread();
  if (index >= all) return;
  const std::int64_t image = index / positions;
  const float* const from = x + image * channels * positions + (index - image * positions);
  const auto channel = [&](int c) {
    return c < channels ? from[static_cast<std::int64_t>(c) * positions] : 0.0f;
  };
  const float four[4] = {channel(0), channel(1), channel(2), channel(3)};
  store_neighbours(y + index * 4, four, overflow);
}

// Images whose channels lie side by side become rounded ones without anything between their
// positions.
template <typename T>
__global__ void rounded_images_kernel(const float* x,  // [positions, pitch]
                                      T* y,            // [positions, channels]
                                      int channels, int pitch, std::int64_t all,
                                      const Overflow overflow) {
  let_successors_start();
  wait_for_inputs();
  const std::int64_t index = grid_thread();
  if (index >= all) return;
  const std::int64_t position = index / channels;
  const float one[1] = {x[position * pitch + (index - position * channels)]};
  store_neighbours(y + index, one, overflow);
}

template <typename Operand>
struct Tag {
  using type = Operand;
};

// Calls body with the tag of the operands.
template <typename Body>
void with_compute_type(ElementType compute_type, const Body& body) {
  switch (compute_type) {
    case ElementType::float32:
      return body(Tag<nhwc::Split>());
    case ElementType::tf32:
      return body(Tag<nhwc::Tf32>());
    case ElementType::float16:
      return body(Tag<nhwc::Float16>());
    case ElementType::bfloat16:
      return body(Tag<nhwc::Bfloat16>());
    default:
      refuse(compute_type);
  }
}

}  // namespace

std::int64_t conv2d_nhwc_packed(const Conv2dShape& shape, bool planar, ElementType compute_type,
                                int) {
  check_planar(shape, planar);
  const int lane_bytes = compute_type == ElementType::float32 ? 48
                         : compute_type == ElementType::tf32  ? 32
                                                              : 16;
  return std::int64_t{shape.groups} * ((shape.group_filters() + 15) / 16) *
         steps_of(shape, planar, compute_type) *
         (nhwc::step_terms(compute_type) / 16 * 32 * lane_bytes);
}

std::int64_t conv2d_nhwc_workspace(const Conv2dShape& shape, bool planar, ElementType compute_type,
                                   ElementType x, int) {
  const bool rounds = has_16_bits(compute_type) && x == ElementType::float32;
  if (!planar && !rounds) return 0;
  return std::int64_t{shape.n} * shape.h * shape.w * (planar ? kPlanarChannels : shape.c) *
         (rounds ? 2 : 4);
}

void conv2d_nhwc_pack(const float* weight, void* packed, const Conv2dShape& shape, bool planar,
                      ElementType compute_type, Stream stream) {
  check_planar(shape, planar);
  with_compute_type(compute_type, [&](auto tag) {
    nhwc::launch_pack<typename decltype(tag)::type>(
        weight, packed, shape, channels_of(shape, planar),
        steps_of(shape, planar, compute_type) * (nhwc::step_terms(compute_type) / 16), stream);
  });
  // conv2d_nhwc reads them before it waits for the kernels before it.
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void conv2d_nhwc(const ConstImages& input, const void* packed, const Images& output,
                 const Conv2dShape& shape, ElementType compute_type, const Prologue& prologue,
                 const Epilogue& epilogue, const Launch& launched) {
  using nhwc::Reads;
  const bool planar = input.pitch == 0;
  const ConstImages& residual = epilogue.residual;
  check_planar(shape, planar);
  check_storage("x", input.storage, compute_type);
  check_storage("residual", residual.storage, compute_type);
  check_storage("y", output.storage, compute_type);
  if (planar && input.storage != ElementType::float32) {
    throw std::invalid_argument(std::string("planar: expected x as float32, found ") +
                                name_of(input.storage));
  }
  const std::int64_t positions = std::int64_t{shape.out_h()} * shape.out_w();
  if (shape.n == 0) return;
  const ElementType multiplied = compute_type == ElementType::float16    ? ElementType::float16
                                 : compute_type == ElementType::bfloat16 ? ElementType::bfloat16
                                                                         : ElementType::float32;
  const void* read = input.data;
  int x_pitch = planar ? kPlanarChannels : input.pitch;
  if (planar || input.storage != multiplied) {
    const int image = shape.h * shape.w;
    const float* const x = static_cast<const float*>(input.data);
    with_element_type(multiplied, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      T* const to = static_cast<T*>(launched.workspace);
      const std::int64_t all = std::int64_t{image} * shape.n * (planar ? 1 : shape.c);
      const unsigned blocks = blocks_for(all);
      if (planar) {
        launch("four_channels_kernel", four_channels_kernel<T>, dim3(blocks), dim3(kBlockThreads),
               0, launched.stream, 1, x, to, shape.c, image, all, epilogue.overflow);
      } else {
        launch("rounded_images_kernel", rounded_images_kernel<T>, dim3(blocks), dim3(kBlockThreads),
               0, launched.stream, 1, x, to, shape.c, x_pitch, all, epilogue.overflow);
        x_pitch = shape.c;
      }
    });
    read = launched.workspace;
  }
  // Runs of so many elements, each at an address that is a multiple of their bytes.
  const auto in_runs = [](int run, const void* address, int pitch, ElementType storage) {
    return is_aligned(address, run * bytes_of(storage)) && pitch % run == 0;
  };
  const int channels = channels_of(shape, planar), whole = 16 / bytes_of(multiplied);
  const bool has_prologue =
      prologue.scale || prologue.shift || prologue.floor > -std::numeric_limits<float>::infinity();
  const bool fours =
      channels % 4 == 0 && shape.group_filters() % 4 == 0 &&
      in_runs(4, read, x_pitch, multiplied) &&
      in_runs(4, output.data, output.pitch, output.storage) &&
      (!residual.data || in_runs(4, residual.data, residual.pitch, residual.storage));
  const bool vectors = fours && channels % whole == 0 && in_runs(whole, read, x_pitch, multiplied);
  if (has_prologue && !(vectors && !planar && is_aligned(prologue.scale, 16) &&
                        is_aligned(prologue.shift, 16) && shape.r * shape.s == 1 &&
                        shape.pad_top + shape.pad_left + shape.pad_bottom + shape.pad_right == 0)) {
    throw std::invalid_argument(
        "scale, shift, floor: expected a kernel of 1x1 without padding, channels in runs of 16 "
        "bytes and filters in fours, all at 16 bytes");
  }
  if (!is_aligned(packed, 16)) {
    throw std::invalid_argument("packed weights: expected an address that is a multiple of 16");
  }
  if (std::int64_t{x_pitch} * bytes_of(multiplied) > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("channels: expected less than 2 GiB a place, found " +
                                std::to_string(x_pitch));
  }
  const Reads reads = has_prologue                                  ? Reads::prologue
                      : vectors                                     ? Reads::vectors
                      : fours && multiplied != ElementType::float32 ? Reads::fours
                                                                    : Reads::single;
  const Target& target = target_here();

  const std::int64_t positions_in = std::int64_t{shape.h} * shape.w,
                     image_in = positions_in * x_pitch;
  // Kernels count positions in 32 bits, and elements in 64: four channels are more than an image
  // has.
  for_each_part_of_batch(
      shape.n, std::max(positions_in, positions), [&](std::int64_t first, int images) {
        nhwc::Gemm p = {};
        p.x = element(read, multiplied, first * image_in);
        p.packed = packed;
        p.bias = epilogue.bias;
        p.residual = residual.data ? element(residual.data, residual.storage,
                                             first * positions * residual.pitch)
                                   : nullptr;
        p.residual_is_rounded = residual.storage != ElementType::float32;
        p.y_is_rounded = output.storage != ElementType::float32;
        p.overflow = epilogue.overflow;
        p.scale = prologue.scale_per_image ? prologue.scale + first * shape.c : prologue.scale;
        p.shift = prologue.shift;
        p.y = element(output.data, output.storage, first * positions * output.pitch);
        p.shape = shape;
        p.shape.n = images;
        p.channels = channels;
        p.filters = shape.group_filters();
        p.out_h = shape.out_h();
        p.out_w = shape.out_w();
        p.x_pitch = x_pitch;
        p.y_pitch = output.pitch;
        p.residual_pitch = residual.pitch;
        p.rows = static_cast<int>(images * positions);
        p.terms = p.channels * shape.r * shape.s;
        p.steps = steps_of(shape, planar, compute_type);
        p.scale_per_image = prologue.scale_per_image;
        p.floor = prologue.floor;
        p.activation = epilogue.activation.function;
        p.alpha = epilogue.activation.alpha;
        p.beta = epilogue.activation.beta;
        const nhwc::Choice choice = nhwc::choose(p, compute_type, reads, target.multiprocessors,
                                                 target.largest_cluster, launched.rank);
        with_compute_type(compute_type, [&](auto tag) {
          nhwc::launch_gemm<typename decltype(tag)::type>(p, reads, choice, launched.stream);
        });
      });
}

}  // namespace cnn_engine::cuda
