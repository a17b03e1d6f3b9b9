// inverted_residual on CUDA: what it takes, how rows are parted among blocks, its packed weights,
// and its launch.
#include <algorithm>
#include <string>

#include "cuda/common/launch.cuh"
#include "cuda/sm80/inverted_residual.cuh"
#include "ops/inverted_residual.h"

namespace cnn_engine::cuda {
namespace {

using namespace inverted_residuals;

constexpr int kMostBytes = 100 * 1024;  // of shared memory: the next kernel finds room
constexpr int kFewColumns = 8;          // of a block, which are not parted further
constexpr int kMostBlocks = 2;          // a multiprocessor, of few images

int in_tiles(int count) { return (count + kTile - 1) / kTile; }

// Bytes of a position of so many tiles of channels: an odd number of pieces, so that eight
// positions begin in banks apart.
int pitch_of(int tiles) { return (tiles * kTile * 2 / kPiece | 1) * kPiece; }

// Where the parts of packed weights begin, in numbers: those of products as operands of 16 terms by
// 16 channels, [tiles][steps][lanes][8]; between them the second's, [R S][K padded].
struct Packing {
  std::int64_t second, third, end;

  Packing(const Conv2dShape& shape, int channels, int filters, bool expands) {
    constexpr std::int64_t each = kWarpThreads * kOperand;
    const std::int64_t tiles = in_tiles(shape.k);
    second = expands ? tiles * in_tiles(channels) * each : 0;
    third = second + tiles * kTile * shape.r * shape.s;
    end = third + in_tiles(filters) * tiles * each;
  }
};

// Of a product's weights [outputs, terms] the operands of 16 terms by 16 outputs; zeros past the
// last.
template <typename T>
__global__ void pack_operands_kernel(const float* __restrict__ weights, T* __restrict__ packed,
                                     int outputs, int terms, int tiles, int steps) {
  const std::int64_t index = grid_thread();
  const int i = index % kOperand, lane = index / kOperand % kWarpThreads;
  const std::int64_t step_tile = index / (kOperand * kWarpThreads);
  if (step_tile >= std::int64_t{tiles} * steps) return;
  const int step = step_tile % steps;
  const int tile = step_tile / steps;
  const int output = tile * kTile + i / 4 * 8 + lane / 4;
  const int term = step * kTile + i / 2 % 2 * 8 + lane % 4 * 2 + i % 2;
  const bool some = output < outputs && term < terms;
  packed[index] = narrowed<T>(some ? weights[std::int64_t{output} * terms + term] : 0.0f);
}

// [kernel offsets][channels padded] of [channels][kernel offsets].
template <typename T>
__global__ void pack_im2col_kernel(const float* __restrict__ weights, T* __restrict__ packed,
                                   int channels, int padded, int kernel_offsets) {
  const std::int64_t index = grid_thread();
  const int kernel_offset = index / padded, channel = index % padded;
  if (kernel_offset >= kernel_offsets) return;
  packed[index] =
      narrowed<T>(channel < channels ? weights[channel * kernel_offsets + kernel_offset] : 0.0f);
}

Block parted(const Conv2dShape& shape, int channels, int filters, bool expands, int columns) {
  Block p = {};
  p.channels = channels;
  p.wide = shape.k;
  p.filters = filters;
  p.h = shape.h;
  p.w = shape.w;
  p.out_w = shape.out_w();
  p.stride_h = shape.stride_h;
  p.stride_w = shape.stride_w;
  p.pad_top = shape.pad_top;
  p.pad_left = shape.pad_left;
  p.columns = columns;
  p.in_columns = (columns - 1) * shape.stride_w + shape.s;
  p.positions = shape.r * p.in_columns;
  p.first_tiles = in_tiles(shape.k);
  p.pairs = p.first_tiles * kTile / 2;
  p.pitch = pitch_of(in_tiles(channels));
  p.between_pitch = pitch_of(p.first_tiles);
  p.third_tiles = in_tiles(filters);
  p.third_steps = p.first_tiles;
  const int items = p.third_tiles * in_tiles(columns);
  p.parts = std::clamp(kWarps / items, 1, p.third_steps);
  p.accumulator_pitch = p.third_tiles * kTile + 8;
  p.between_at = in_tiles(p.positions) * kTile * p.pitch;
  const int between = expands ? in_tiles(p.positions) * kTile * p.between_pitch : 0;
  const int accumulators = p.parts * in_tiles(columns) * kTile * p.accumulator_pitch * 4;
  p.middle_at = p.between_at + std::max(between, accumulators);
  p.weights_at = p.middle_at + in_tiles(columns) * kTile * p.between_pitch;
  p.end = p.weights_at + p.third_tiles * p.third_steps * kTile * kTile * 2;
  p.once = 1;
  p.by_pieces = Divisor(channels / 8);
  p.by_columns = Divisor(p.in_columns);
  p.by_pairs = Divisor(p.pairs);
  p.by_filters = Divisor(filters / 2);
  return p;
}

// Whether a block has room for what it makes.
bool fits(const Block& p) {
  const int items = p.third_tiles * in_tiles(p.columns);
  return p.positions * (p.channels / 8) <= kPieces * kThreads && items <= kWarps &&
         p.end <= kMostBytes;
}

// By as few columns as leave no multiprocessor more than one block, but not less than a few.
Block chosen(const Conv2dShape& shape, int channels, int filters, bool expands,
             const Target& target) {
  Block p = {};
  for (int columns = shape.out_w();; columns = (columns + 1) / 2) {
    p = parted(shape, channels, filters, expands, columns);
    const std::int64_t blocks =
        std::int64_t{shape.n} * shape.out_h() * ((shape.out_w() + columns - 1) / columns);
    if (columns <= 1 ||
        (fits(p) && (columns <= kFewColumns || 2 * blocks > target.multiprocessors))) {
      return p;
    }
  }
}

// What a shape is expected to be and is not, or null.
const char* why_not(const Conv2dShape& shape, int channels, int filters, bool expands, bool adds,
                    const Target& target) {
  if (shape.groups != shape.c || shape.k != shape.c) return "one channel and one filter a group";
  if (channels < 8 || channels % 8 != 0 || filters < 8 || filters % 8 != 0 || shape.c < 8 ||
      shape.c % 8 != 0 || shape.c > kWarps * kTile || channels > kWarps * kTile ||
      filters > kWarps * kTile || (expands && channels > kMostSteps * kTile)) {
    return "channels in eights, at most 256, and 80 that are expanded";
  }
  if (!expands && channels != shape.c) return "as many channels as are convolved";
  if (shape.r != kKernelOffsets || shape.s != kKernelOffsets || shape.stride_h > 2 ||
      shape.stride_w > 2 || shape.dilation_h * shape.dilation_w != 1) {
    return "a kernel of 3x3, strides of at most 2 and no dilation";
  }
  if (shape.h > 4096 || shape.w > 4096 || shape.out_h() < 1 || shape.out_w() < 1 ||
      shape.out_h() > 4096 || shape.out_w() > 4096 || shape.h * shape.w > (1 << 22)) {
    return "images of at most 4096 rows and columns and 4194304 places";
  }
  if (adds &&
      (shape.stride_h * shape.stride_w != 1 || channels != filters || shape.out_h() != shape.h ||
       shape.out_w() != shape.w || shape.pad_top >= shape.r || shape.pad_left >= shape.s)) {
    return "results as large as what is added";
  }
  if (!fits(chosen(shape, channels, filters, expands, target)))
    return "rows for which there is room";
  return nullptr;
}

void check(const Conv2dShape& shape, int channels, int filters, bool expands, bool adds,
           const Target& target) {
  if (const char* expected = why_not(shape, channels, filters, expands, adds, target)) {
    throw std::invalid_argument(std::string("inverted_residual: expected ") + expected);
  }
}

// Calls body(the kernel) for the steps of the first product, from `kSteps` down.
template <typename T, KnownActivation kKnown, int kSteps = kMostSteps, typename Body>
void with_steps(int steps, const Body& body) {
  if constexpr (kSteps > 0) {
    if (steps < kSteps) return with_steps<T, kKnown, kSteps - 1>(steps, body);
  }
  body(inverted_residual_kernel<T, kSteps, kKnown>);
}

}  // namespace

std::int64_t inverted_residual_takes(const InvertedResidualShape& block, bool adds,
                                     const Target& target) {
  const Conv2dShape& shape = block.second;
  const int channels = block.channels, filters = block.filters;
  const bool expands = block.expands;
  if (why_not(shape, channels, filters, expands, adds, target) != nullptr) return 0;
  const int columns = chosen(shape, channels, filters, expands, target).columns;
  return std::int64_t{shape.n} * shape.out_h() * ((shape.out_w() + columns - 1) / columns) <=
         kMostBlocks * target.multiprocessors;
}

std::int64_t inverted_residual_packed(const InvertedResidualShape& block, ElementType, int) {
  const Conv2dShape& shape = block.second;
  const int channels = block.channels, filters = block.filters;
  const bool expands = block.expands;
  check(shape, channels, filters, expands, false, target_here());
  return Packing(shape, channels, filters, expands).end * 2;
}

void inverted_residual_pack(const float* first, const float* second, const float* third,
                            void* packed, const InvertedResidualShape& block,
                            ElementType compute_type, Stream stream) {
  const Conv2dShape& shape = block.second;
  const int channels = block.channels, filters = block.filters;
  const bool expands = block.expands;
  check(shape, channels, filters, expands, false, target_here());
  with_halves("inverted_residual", compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Packing at(shape, channels, filters, expands);
    T* const to = static_cast<T*>(packed);
    const int tiles = in_tiles(shape.k), kernel_offsets = shape.r * shape.s;
    if (expands) {
      pack_operands_kernel<T><<<blocks_for(at.second), kBlockThreads, 0, stream>>>(
          first, to, shape.k, channels, tiles, in_tiles(channels));
    }
    pack_im2col_kernel<T><<<blocks_for(at.third - at.second), kBlockThreads, 0, stream>>>(
        second, to + at.second, shape.k, tiles * kTile, kernel_offsets);
    pack_operands_kernel<T><<<blocks_for(at.end - at.third), kBlockThreads, 0, stream>>>(
        third, to + at.third, filters, shape.k, in_tiles(filters), tiles);
    CUDA_CHECK_LAUNCH("inverted_residual_pack's kernels");
  });
}

void inverted_residual(const void* x, const void* packed, void* y,
                       const InvertedResidualShape& block, bool adds, ElementType compute_type,
                       const std::array<Epilogue, 3>& epilogues, Stream stream) {
  const Conv2dShape& shape = block.second;
  const int channels = block.channels, filters = block.filters;
  const bool expands = block.expands;
  const Target& target = target_here();
  check(shape, channels, filters, expands, adds, target);
  if (!is_aligned(x, kPiece) || !is_aligned(packed, kPiece) || !is_aligned(y, 4)) {
    throw std::invalid_argument("inverted_residual: expected addresses that are multiples of 16");
  }
  if (!waits_in_kernels()) {
    throw std::invalid_argument("inverted_residual: expected a GPU of compute capability 9.0");
  }
  if (shape.n == 0) return;
  Block p = chosen(shape, channels, filters, expands, target);
  p.first_bias = epilogues[0].bias;
  p.second_bias = epilogues[1].bias;
  p.third_bias = epilogues[2].bias;
  p.y = y;
  p.adds = adds;
  p.overflow = epilogues[2].overflow;
  p.middle = clamps_of(epilogues[1].activation);
  p.inner = expands ? clamps_of(epilogues[0].activation) : p.middle;
  p.outer = clamps_of(epilogues[2].activation);
  const dim3 grid(static_cast<unsigned>(shape.n),
                  static_cast<unsigned>((p.out_w + p.columns - 1) / p.columns),
                  static_cast<unsigned>(shape.out_h()));
  with_halves("inverted_residual", compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Packing at(shape, channels, filters, expands);
    const T* const weights = static_cast<const T*>(packed);
    const auto launched = [&](auto kernel) {
      CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.end));
      launch("launch of inverted_residual_kernel", kernel, grid, kThreads,
             static_cast<unsigned>(p.end), stream, 1, static_cast<const T*>(x),
             reinterpret_cast<const uint4*>(weights), weights + at.second,
             reinterpret_cast<const uint4*>(weights + at.third), p);
    };
    const int steps = expands ? in_tiles(channels) : 0;
    const bool known = known_activation_of(p.outer) == KnownActivation::clamps;
    with_known_activations(p.inner, p.middle, [&](auto kind) {
      if (known) return with_steps<T, kind.value>(steps, launched);
      with_steps<T, KnownActivation::any>(steps, launched);
    });
  });
}

}  // namespace cnn_engine::cuda
