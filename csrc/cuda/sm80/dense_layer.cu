// dense_layer on CUDA: what it takes, how images are parted into tiles, its packed weights, and its
// launch.
#include <algorithm>
#include <limits>
#include <string>

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/dense_layer.cuh"
#include "ops/dense_layer.h"

namespace cnn_engine::cuda {
namespace {

using namespace dense_layers;

constexpr int kManyBlocks = 16, kFewBlocks = 4;  // of a cluster
constexpr int kMostTiles = 7;      // of clusters of many blocks, beside those of the next launch
constexpr int kMinPositions = 14;  // of a tile that might have more

int divided(int count, int by) { return (count + by - 1) / by; }

// Blocks of a cluster: as many as leave multiprocessors for all tiles of an image.
int blocks_of(const Conv2dShape& shape) {
  const int lines = std::max(kPositions / shape.w, 1);
  return divided(shape.h, lines) <= kMostTiles ? kManyBlocks : kFewBlocks;
}

// Rows of a tile: few, where all tiles have multiprocessors of their own even so.
int lines_of(const Conv2dShape& shape) {
  const int most = std::max(kPositions / shape.w, 1);
  for (int lines = divided(kMinPositions, shape.w); lines < most; ++lines) {
    if (std::int64_t{shape.n} * divided(shape.h, lines) <= kMostTiles) return lines;
  }
  return most;
}

const char* why_not(const Conv2dShape& shape, int before, int filters) {
  if (shape.groups != 1 || shape.c != kChannels || shape.k != kGrowth || filters != kChannels) {
    return "128 channels, 32 filters and then 128, in one group";
  }
  const bool beside =
      shape.pad_top == 1 && shape.pad_left == 1 && shape.pad_bottom == 1 && shape.pad_right == 1;
  if (shape.r != 3 || shape.s != 3 || !beside ||
      shape.stride_h * shape.stride_w * shape.dilation_h * shape.dilation_w != 1) {
    return "a kernel of 3x3, one place apart and one beside the image";
  }
  if (shape.w < 1 || shape.w > kPositions || shape.h < 1 || shape.h > 4096) {
    return "images of at most 32 columns and 4096 rows";
  }
  if (std::int64_t{shape.n} * shape.h * shape.w * kChannels > std::numeric_limits<int>::max() ||
      shape.n > 65535) {
    return "at most 65535 images, of less than 2^31 numbers";
  }
  if (before < kLate || before % kDepth != 0) return "channels before in sixteens, at least 32";
  if ((before - kLate) / kDepth > blocks_of(shape) * kMostSteps) {
    return "at most 2080 channels before, or 544 of large images";
  }
  return nullptr;
}

void check(const Conv2dShape& shape, int before, int filters) {
  if (const char* expected = why_not(shape, before, filters)) {
    throw std::invalid_argument(std::string("dense_layer: expected ") + expected);
  }
}

// Where the parts of packed weights begin, in numbers.
struct Packing {
  static constexpr int kEach = kWarpThreads * kOperand;
  std::int64_t late, window, end;

  explicit Packing(int before) {
    late = std::int64_t{(before - kLate) / kDepth} * kWarps * kEach;
    window = late + std::int64_t{kChannels / kDepth} * 4 * kEach;
    end = window + std::int64_t{kChannels / kDepth} * kKernelOffsets * 2 * kEach;
  }
};

template <typename T>
__global__ void dense_layer_pack_kernel(const float* __restrict__ first,  // [32, 128, 3, 3]
                                        const float* __restrict__ next,   // [128, before + 32]
                                        T* __restrict__ packed, int before, std::int64_t late,
                                        std::int64_t window, std::int64_t end) {
  const std::int64_t index = grid_thread();
  if (index >= end) return;
  const int number = static_cast<int>(index % kOperand);
  const int lane = static_cast<int>(index / kOperand % kWarpThreads);
  // As mma.cuh says of A.
  const int row = lane / 4 + number / 2 % 2 * 8;
  const int column = lane % 4 * 2 + number % 2 + number / 4 * 8;
  const int all = before + kGrowth;
  float weight;
  if (index < late) {
    const int which = static_cast<int>(index / Packing::kEach);
    const int filter = which % kWarps * kDepth + row;
    weight = next[std::int64_t{filter} * all + which / kWarps * kDepth + column];
  } else if (index < window) {
    const int which = static_cast<int>((index - late) / Packing::kEach);
    const int filter = which / 4 * kDepth + row;
    weight = next[std::int64_t{filter} * all + before - kLate + which % 4 * kDepth + column];
  } else {
    const int which = static_cast<int>((index - window) / Packing::kEach);
    const int filter = which % 2 * kDepth + row, kernel_offset = which / 2 % kKernelOffsets;
    const int channel = which / 2 / kKernelOffsets * kDepth + column;
    weight = first[(filter * kChannels + channel) * kKernelOffsets + kernel_offset];
  }
  packed[index] = narrowed<T>(weight);
}

// Calls body(kernel, bytes of shared memory) with the kernel made ready.
template <typename T, typename Body>
void with_kernel(int blocks, const Body& body) {
  const auto ready = [&](auto kernel, int bytes) {
    make_ready(kernel, bytes);
    allow_large_clusters(kernel);
    body(kernel, bytes);
  };
  if (blocks == kManyBlocks) {
    return ready(dense_layer_kernel<T, kManyBlocks>, sizeof(Memory<T, kManyBlocks>));
  }
  ready(dense_layer_kernel<T, kFewBlocks>, sizeof(Memory<T, kFewBlocks>));
}

// Clusters that a device has room for at once.
int clusters_of(int blocks, const Target& target) {
  using Few = Memory<__half, kFewBlocks>;
  using Many = Memory<__half, kManyBlocks>;
  const std::size_t bytes = blocks == kManyBlocks ? sizeof(Many) : sizeof(Few);
  return target.clusters_at_once(blocks, kBlocksOfMultiprocessor, static_cast<int>(bytes));
}

// The least and the most that a clamp leaves.
float2 limits_of(const Activation& activation) {
  const Activation clamp = clamps_of(activation);
  if (known_activation_of(clamp) != KnownActivation::clamps) {
    throw std::invalid_argument("dense_layer: expected no function, relu or clip");
  }
  return {clamp.alpha, clamp.beta};
}

}  // namespace

std::int64_t dense_layer_takes(const DenseLayerShape& layer, const Target& target) {
  const Conv2dShape& shape = layer.window;
  const int before = layer.before, filters = layer.filters;
  if (why_not(shape, before, filters) != nullptr) return 0;
  const std::int64_t tiles = std::int64_t{shape.n} * divided(shape.h, lines_of(shape));
  return 2 * tiles <= clusters_of(blocks_of(shape), target);
}

std::int64_t dense_layer_packed(const DenseLayerShape& layer, ElementType, int) {
  check(layer.window, layer.before, layer.filters);
  return Packing(layer.before).end * 2;
}

void dense_layer_pack(const float* first, const float* next, void* packed,
                      const DenseLayerShape& layer, ElementType compute_type, Stream stream) {
  const int before = layer.before;
  check(layer.window, before, layer.filters);
  with_halves("dense_layer", compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Packing at(before);
    dense_layer_pack_kernel<T><<<blocks_for(at.end), kBlockThreads, 0, stream>>>(
        first, next, static_cast<T*>(packed), before, at.late, at.window, at.end);
    CUDA_CHECK_LAUNCH("dense_layer_pack_kernel");
  });
}

void dense_layer(const DenseLayerImages& images, const void* packed, const DenseLayerShape& layer,
                 ElementType compute_type, const Prologue& prologue,
                 const std::array<Epilogue, 2>& epilogues, const Launch& launched) {
  const Conv2dShape& shape = layer.window;
  const int before = layer.before, filters = layer.filters;
  const auto& [x, e, y, z] = images;
  check(shape, before, filters);
  for (const void* address : {x.data, e, packed, static_cast<const void*>(prologue.scale),
                              static_cast<const void*>(prologue.shift),
                              const_cast<const void*>(y.data), const_cast<const void*>(z.data)}) {
    if (!is_aligned(address, kPiece)) {
      throw std::invalid_argument("dense_layer: expected addresses that are multiples of 16");
    }
  }
  if (x.pitch % 8 != 0 || x.pitch < before || y.pitch % 8 != 0 || y.pitch < kGrowth ||
      z.pitch % 8 != 0 || z.pitch < kChannels) {
    throw std::invalid_argument("dense_layer: expected rows of a multiple of 8 numbers");
  }
  if (!waits_in_kernels()) {
    throw std::invalid_argument("dense_layer: expected a GPU of compute capability 9.0");
  }
  if (shape.n == 0) return;
  DenseLayer p = {};
  p.first_bias = epilogues[0].bias;
  p.next_bias = epilogues[1].bias;
  p.scale = prologue.scale;
  p.shift = prologue.shift;
  p.y = y.data;
  p.z = z.data;
  p.h = shape.h;
  p.w = shape.w;
  p.lines = lines_of(shape);
  p.w_factor = factor_of(shape.w);
  p.wide_factor = factor_of(shape.w + 2);
  p.steps = (before - kLate) / kDepth;
  p.x_pitch = x.pitch;
  p.y_pitch = y.pitch;
  p.z_pitch = z.pitch;
  p.ahead = launched.ready >= before - kLate;
  p.holds = launched.holds;
  p.floor = prologue.floor;
  const float2 first = limits_of(epilogues[0].activation),
               second = limits_of(epilogues[1].activation);
  p.inner_low = first.x;
  p.inner_high = first.y;
  p.outer_low = second.x;
  p.outer_high = second.y;
  p.overflow = epilogues[1].overflow;
  const int blocks = blocks_of(shape);
  const dim3 grid(divided(shape.h, p.lines), shape.n, blocks);
  with_halves("dense_layer", compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* const weights = static_cast<const T*>(packed);
    const Packing at(before);
    with_kernel<T>(blocks, [&](auto kernel, int bytes) {
      launch("launch of dense_layer_kernel", kernel, grid, kAllThreads, bytes, launched.stream,
             blocks, static_cast<const T*>(images.x.data), static_cast<const T*>(images.e),
             reinterpret_cast<const uint4*>(weights),
             reinterpret_cast<const uint4*>(weights + at.late),
             reinterpret_cast<const uint4*>(weights + at.window), p);
    });
  });
}

}  // namespace cnn_engine::cuda
