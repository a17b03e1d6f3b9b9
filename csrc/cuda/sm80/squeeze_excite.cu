// squeeze_excite on CUDA: its packed weights, how an image is parted among blocks, and its
// launches.
#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/sm80/squeeze_excite.cuh"
#include "ops/squeeze_excite.h"

namespace cnn_engine::cuda {
namespace {

using namespace gates;

constexpr int kMostRuns = 512;  // of channels, and of hidden sums
// What a block is worth: so many bytes of weights, which arrive while it waits, and so many numbers
// of the image.
constexpr std::int64_t kWeightBytes = 160 * 1024, kNumbers = 4 * 1024;
// Weights past so many bytes of shared memory in all are read from where they are: two blocks of a
// multiprocessor have room for so many, and one alone.
constexpr std::int64_t kHalfHeld = 112 * 1024, kMostHeld = 224 * 1024;
constexpr int kFewBlocks = 96;  // that find a multiprocessor each, all clusters at once
// Positions of an image up to which it is worth it: writing more costs more than the products save.
constexpr int kFewPositions = 256;
// Numbers of an image from which its blocks have positions and not channels: lines of memory are
// whole then, which is worth one more exchange.
constexpr std::int64_t kManyNumbers = 256 * 1024;

// Of both halves: [C][M padded], zeros past M.
template <typename T>
__global__ void squeeze_excite_pack_kernel(const float* __restrict__ first,   // [M, C]
                                           const float* __restrict__ second,  // [C, M]
                                           T* __restrict__ packed, int channels, int hidden,
                                           int padded) {
  const std::int64_t index = grid_thread(), half = static_cast<std::int64_t>(channels) * padded;
  if (index >= half) return;
  const std::int64_t c = index / padded, m = index - c * padded;
  packed[index] = narrowed<T>(m < hidden ? first[m * channels + c] : 0.0f);
  packed[half + index] = narrowed<T>(m < hidden ? second[c * hidden + m] : 0.0f);
}

int runs_of(std::int64_t count) { return static_cast<int>((count + kRun - 1) / kRun); }
int hidden_runs_of(int hidden) { return runs_of(hidden) | 1; }

void check(const AxisShape& shape, int hidden) {
  if (shape.inner % kRun != 0 || shape.inner > kMostRuns * kRun || hidden < 1 ||
      hidden > kMostRuns * kRun || shape.axis < 1 || shape.axis > (1 << 30)) {
    throw std::invalid_argument(
        "squeeze_excite: expected channels in eights and hidden sums, at most 4096 of each, and "
        "places");
  }
}

}  // namespace

std::int64_t squeeze_excite_packed(const SqueezeExciteShape& all, ElementType compute_type, int) {
  const AxisShape& shape = all.images;
  const int hidden = all.hidden;
  check(shape, hidden);
  std::int64_t bytes = 0;
  with_row_type(compute_type, [&](auto* type) {
    bytes = 2 * shape.inner * hidden_runs_of(hidden) * kRun * static_cast<int>(sizeof(*type));
  });
  return bytes;
}

void squeeze_excite_pack(const float* first, const float* second, void* packed,
                         const SqueezeExciteShape& all, ElementType compute_type, Stream stream) {
  const AxisShape& shape = all.images;
  const int hidden = all.hidden;
  check(shape, hidden);
  with_row_type(compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int channels = static_cast<int>(shape.inner), padded = hidden_runs_of(hidden) * kRun;
    squeeze_excite_pack_kernel<T><<<blocks_for(shape.inner * padded), kBlockThreads, 0, stream>>>(
        first, second, static_cast<T*>(packed), channels, hidden, padded);
    CUDA_CHECK_LAUNCH("squeeze_excite_pack_kernel");
  });
}

namespace {

bool is_by_positions(const AxisShape& shape, const Target& target) {
  return target.dependent_launch && shape.axis * shape.inner >= kManyNumbers;
}

// Runs of channels of a block. By the shape of one image alone: each has the same bits with any
// batch.
int own_runs_of(const AxisShape& shape, std::int64_t weight_bytes, const Target& target) {
  const int runs = runs_of(shape.inner);
  const std::int64_t worth = std::max((weight_bytes + kWeightBytes - 1) / kWeightBytes,
                                      (shape.axis * shape.inner + kNumbers - 1) / kNumbers);
  const std::int64_t most = target.dependent_launch ? std::min(kMostBlocks, runs) : 1;
  const int wanted = static_cast<int>(std::clamp<std::int64_t>(worth, 1, most));
  return (runs + wanted - 1) / wanted;
}

std::int64_t weight_bytes(const AxisShape& shape, int hidden, int item) {
  return shape.inner * 2 * hidden_runs_of(hidden) * kRun * item;
}

// Whether threads can keep what they read of an image.
bool keeps(const AxisShape& shape, int hidden, const Target& target) {
  const int own_runs = own_runs_of(shape, weight_bytes(shape, hidden, 2), target);
  return !is_by_positions(shape, target) && shape.axis <= kKept * (kThreads / own_runs);
}

template <bool Scales>
void run(const ConstValues& x, const void* packed, const PartialMeans& means, void* y,
         const SqueezeExciteShape& all_shape, ElementType compute_type,
         const std::array<Epilogue, 3>& epilogues, Stream stream) {
  const AxisShape& shape = all_shape.images;
  const int hidden = all_shape.hidden;
  check(shape, hidden);
  check_storage("x", x.storage, compute_type);
  if (!is_aligned(x.data, 16) || !is_aligned(packed, 16) || (Scales && !is_aligned(y, 16))) {
    throw std::invalid_argument("squeeze_excite: expected addresses that are multiples of 16");
  }
  const Target& target = target_here();
  if (Scales && (bytes_of(x.storage) != 2 || !keeps(shape, hidden, target))) {
    throw std::invalid_argument(
        "squeeze_excite_scale: expected 16 bits, and images that threads can keep");
  }
  if (shape.outer == 0) return;
  Gates p = {};
  p.first_bias = epilogues[0].bias;
  p.second_bias = epilogues[1].bias;
  p.means = means.data;
  p.parts = means.parts;
  p.y = y;
  p.overflow = epilogues[2].overflow;
  p.positions = static_cast<int>(shape.axis);
  p.channels = static_cast<int>(shape.inner);
  p.hidden = hidden;
  p.runs = runs_of(shape.inner);
  p.hidden_runs = hidden_runs_of(hidden);
  p.once = 1;
  p.scale = 1.0f / static_cast<float>(p.positions);
  p.inner = epilogues[0].activation;
  p.outer = epilogues[1].activation;
  p.lowest = epilogues[2].activation.alpha;
  p.highest = epilogues[2].activation.beta;
  with_row_type(compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const std::int64_t all = weight_bytes(shape, hidden, sizeof(T));
    p.own_runs = own_runs_of(shape, all, target);
    p.by_positions = is_by_positions(shape, target) && means.data == nullptr;
    p.blocks = p.by_positions ? kMostBlocks : (p.runs + p.own_runs - 1) / p.own_runs;
    p.lane_bits = 0;
    while (p.lane_bits < kMostLaneBits && (2 * p.own_runs * kRun << p.lane_bits) <= kThreads)
      ++p.lane_bits;
    const std::int64_t floats = Layout(p).end * 4, weights = all / p.runs * p.own_runs;
    const bool alone = shape.outer * p.blocks <= kFewBlocks;
    const std::int64_t most =
        std::min<std::int64_t>(alone ? kMostHeld : kHalfHeld, target.shared_per_block);
    const std::int64_t room = target.dependent_launch ? most - floats : 0;
    p.holds_first = weights / 2 <= room;
    p.holds_second = weights <= room;
    const int bytes =
        static_cast<int>(floats + weights / 2 * (int{p.holds_first} + int{p.holds_second}));
    const auto launched = [&](auto* storage) {
      using X = std::remove_pointer_t<decltype(storage)>;
      const auto kernel = squeeze_excite_kernel<T, X, Scales>;
      CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
      launch("launch of squeeze_excite_kernel", kernel,
             dim3(static_cast<unsigned>(shape.outer), 1, p.blocks), kThreads, bytes, stream,
             p.blocks, static_cast<const X*>(x.data), static_cast<const T*>(packed), p);
    };
    if constexpr (!Scales) {
      if (x.storage == ElementType::float32) return launched(static_cast<float*>(nullptr));
    }
    if constexpr (!Scales || sizeof(T) == 2) launched(type);
  });
}

}  // namespace

void squeeze_excite(const ConstValues& x, const void* packed, const PartialMeans& means, float* y,
                    const SqueezeExciteShape& shape, ElementType compute_type,
                    const std::array<Epilogue, 2>& epilogues, Stream stream) {
  run<false>(x, packed, means, y, shape, compute_type, {epilogues[0], epilogues[1], Epilogue{}},
             stream);
}

std::int64_t squeeze_excite_scales(const SqueezeExciteShape& shape, const Target& target) {
  check(shape.images, shape.hidden);
  return shape.images.axis <= kFewPositions && keeps(shape.images, shape.hidden, target);
}

void squeeze_excite_scale(const ConstValues& x, const void* packed, void* z,
                          const SqueezeExciteShape& shape, ElementType compute_type,
                          const std::array<Epilogue, 3>& epilogues, Stream stream) {
  if (epilogues[2].activation.function != UnaryFunction::clip) {
    throw std::invalid_argument("squeeze_excite_scale: expected a clip of the product");
  }
  run<true>(x, packed, {nullptr, 0}, z, shape, compute_type, epilogues, stream);
}

}  // namespace cnn_engine::cuda
