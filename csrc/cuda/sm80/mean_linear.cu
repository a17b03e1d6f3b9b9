// mean_linear on CUDA: a cluster of blocks makes some outputs of an image.
//
// A block of the cluster has some of the channels: their means, and what these add to the cluster's
// outputs. So no block reads more than its share of the image, and its weights are in registers
// before it waits for the image: those of 16 bits as operands of tensor cores, for which a mean is
// two numbers, the nearest and what that leaves, in two columns of one product; float32's as four
// lanes multiply an output's. Only sums meet: each is sent to the block that finishes the output,
// which adds them up in an order of its own.
#include <algorithm>

#include "cuda/common/activation.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/channels.cuh"
#include "cuda/sm80/cluster.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/row_weights.cuh"
#include "ops/mean_linear.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarpThreads;
constexpr int kBlocksOfMultiprocessor = 2;                        // that have registers
constexpr int kOwnChannels = 128;                                 // of a block
constexpr int kOutputs = 128;                                     // of a cluster
constexpr int kMostBlocks = 16;                                   // of a cluster
constexpr int kRows = 16, kDepth = 16, kColumns = 8;              // of a product
constexpr int kTiles = kOutputs / kRows;                          // of outputs
constexpr int kMostShares = kWarps / kTiles;                      // warps that share a tile's sum
constexpr int kSteps = kOwnChannels / kMostShares / kDepth;       // of a warp
constexpr int kPitch = kOwnChannels + 8;                          // of a column, in banks apart
constexpr int kTeam = kThreads / kOutputs;                        // lanes of a float32 output
constexpr int kLaneChannels = kOwnChannels / kTeam;               // of one of them
constexpr int kLanePitch = kLaneChannels + 4;                     // of their means, in banks apart
constexpr int kRun = 8;                                           // channels of a load
constexpr int kLanes = kOwnChannels / kRun;                       // that have a position together
constexpr int kPositions = kThreads / kLanes;                     // at once
constexpr int kPrefetch = 64 / kPositions;                        // of a thread
constexpr int kSums = kThreads / std::max(kLanes, kWarpThreads);  // of a channel, in shared memory
constexpr int kAdding = 8;                                        // lanes that add up an output
constexpr int kMaxPositions = kPrefetch * kPositions;

struct MeanLinear {
  const float *bias, *factors, *shift;
  void* y;
  bool rounds;
  Overflow overflow;
  int positions, channels, outputs;
  int blocks, own, finished;  // of a cluster; channels of a block, outputs that it finishes
  int sums;                   // of an output, that the cluster sends
  float scale, floor;         // scale: 1 / positions
  Activation activation;
};

// Shared memory, in floats: sums of threads, columns of products, what the cluster sends.
struct Layout {
  int columns, received, end;
  __host__ __device__ explicit Layout(const MeanLinear& p) {
    columns = kSums * kOwnChannels;
    received = columns + kColumns * kPitch / 2;
    end = received + p.finished * pitch_of(p);
  }
  // Of the sums of an output, in banks apart.
  __host__ __device__ static int pitch_of(const MeanLinear& p) { return p.sums + kAdding; }
};

static_assert(kTeam * kLanePitch <= kColumns * kPitch / 2);

template <typename T>
using FormatOf = std::conditional_t<std::is_same_v<T, __half>, Half, Bfloat16>;

// Sums that a block sends of an output.
template <typename T>
constexpr int kShares = sizeof(T) == 2 ? kMostShares : 1;

// Has a number ready here, and not where it is first needed.
__device__ inline void have(std::uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ inline void have(int& x) { asm volatile("" : "+r"(x)); }
__device__ inline void have(float& x) { asm volatile("" : "+f"(x)); }

// Blocks: of outputs; then of a cluster along z.
template <typename T, bool Prepares>
__global__ void __launch_bounds__(kThreads)
    mean_linear_kernel(const T* x,                        // [P, C]
                       const uint4* __restrict__ packed,  // [outputs][block], as packed below
                       const __grid_constant__ MeanLinear p) {
  using Format = FormatOf<T>;
  constexpr bool kHalves = sizeof(T) == 2;
  constexpr int kHeld = kHalves ? kSteps : kLaneChannels / 4;  // loads of weights
  extern __shared__ __align__(16) float memory[];
  __shared__ __align__(8) std::uint64_t all_received;
  const Layout at(p);
  T* const columns = reinterpret_cast<T*>(memory + at.columns);
  float* const received = memory + at.received;
  const int thread = threadIdx.x, warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const int rank = static_cast<int>(blockIdx.z), pitch = Layout::pitch_of(p);
  const std::uint32_t barrier = shared_address(&all_received);
  let_successors_start();
  if (thread == 0) {
    init_barrier(barrier);
    expect_tx(barrier, p.finished * p.sums * 4);
  }
  __syncwarp();
  arrive_at_cluster_barrier();

  uint4 weights[kHeld];
  const std::int64_t block = std::int64_t{blockIdx.x} * p.blocks + rank;
  const uint4* const from =
      packed + block * kHeld * kThreads + (kHalves ? warp * kHeld * kWarpThreads + lane : thread);
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    weights[i] = __ldcs(from + i * (kHalves ? kWarpThreads : kThreads));
  const int run = thread % kLanes * kRun, row = thread / kLanes;
  const bool some = run < p.own && rank * p.own + run < p.channels;
  const int channel = some ? rank * p.own + run : 0;
  Channels<kRun> factors, shift;
  if constexpr (Prepares) {
    factors = Channels<kRun>::load(p.factors + channel);
    shift = Channels<kRun>::load(p.shift + channel);
  }
  for (int i = thread; i < at.received - at.columns; i += kThreads) memory[at.columns + i] = 0.0f;
  // Of the product: every fourth lane has two rows of both columns. Of float32: a team an output.
  const int part = kHalves ? warp / kTiles : 0;
  constexpr int kMade = kHalves ? 2 : 1;
  std::uint32_t to[kMade], full_barrier[kMade];
#pragma unroll
  for (int i = 0; i < kMade; ++i) {
    const int output = kHalves ? warp % kTiles * kRows + lane / 4 + 8 * i : thread / kTeam;
    const int owner = output / p.finished, slot = (output - owner * p.finished) * pitch;
    to[i] = cluster_address(shared_address(received + slot + rank * kShares<T> + part), owner);
    full_barrier[i] = cluster_address(barrier, owner);
    have(to[i]);
    have(full_barrier[i]);
  }
  const int finished = thread / kAdding;
  const int m = blockIdx.x * kOutputs + rank * p.finished + finished % p.finished;
  float added = p.bias != nullptr && m < p.outputs ? p.bias[m] : 0.0f;
  Activation activation = p.activation;
  float scale = p.scale;
  int function = static_cast<int>(activation.function);
  have(added);
  have(activation.alpha);
  have(activation.beta);
  have(function);
  have(scale);
  activation.function = static_cast<UnaryFunction>(function);
  wait_at_cluster_barrier();  // all blocks can be sent to
  wait_for_inputs();

  Neighbours<T, kRun> read[kPrefetch];
  // What lies past the end is read at the last place, and not taken: a load that may be left out
  // would wait for its own turn.
#pragma unroll
  for (int i = 0; i < kPrefetch; ++i) {
    const int position = min(row + i * kPositions, p.positions - 1);
    read[i] = *reinterpret_cast<const Neighbours<T, kRun>*>(x + channel + position * p.channels);
  }
  auto sum = Channels<kRun>::all(0.0f);
#pragma unroll
  for (int i = 0; i < kPrefetch; ++i) {
    const bool taken = row + i * kPositions < p.positions && some;
#pragma unroll
    for (int v = 0; v < kRun; ++v) {
      float value = widened(read[i].value[v]);
      if constexpr (Prepares) {
        value = max_nan(p.floor, fmaf(value, factors.value[v], shift.value[v]));
      }
      sum.value[v] += taken ? value : 0.0f;
    }
  }
  if constexpr (kLanes < kWarpThreads) {
#pragma unroll
    for (int v = 0; v < kRun; ++v) {
      sum.value[v] += __shfl_xor_sync(kFullMask, sum.value[v], kLanes);
    }
  }
  if (lane < kLanes) sum.store(memory + thread / kWarpThreads * kOwnChannels + run);
  __syncthreads();
  bool past = false;
  if (thread < kOwnChannels) {
    float of_all = 0.0f;
#pragma unroll
    for (int r = 0; r < kSums; ++r) of_all += memory[r * kOwnChannels + thread];
    const float mean = of_all * scale;
    if constexpr (kHalves) {
      const T near = narrowed<T>(mean);
      columns[thread] = near;
      const float left = mean - widened(near);  // nothing of an infinity
      columns[kPitch + thread] = narrowed<T>(isinf(widened(near)) ? 0.0f : left);
      past = std::is_same_v<T, __half> && is_past_float16(mean);
    } else {
      columns[thread / kLaneChannels * kLanePitch + thread % kLaneChannels] = mean;
    }
  }
  if (past) tell(p.overflow);
  __syncthreads();

  if constexpr (kHalves) {
    const T* const column = columns + lane / 4 * kPitch + part * kSteps * kDepth + lane % 4 * 2;
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const std::uint32_t b[2] = {*reinterpret_cast<const std::uint32_t*>(column + i * kDepth),
                                  *reinterpret_cast<const std::uint32_t*>(column + i * kDepth + 8)};
      const std::uint32_t a[4] = {weights[i].x, weights[i].y, weights[i].z, weights[i].w};
      Format::mma16(sums, a, b);
    }
    if (lane % 4 == 0) {
      store_cluster_async(to[0], full_barrier[0], sums[0] + sums[1]);
      store_cluster_async(to[1], full_barrier[1], sums[2] + sums[3]);
    }
  } else {
    const float* const own = columns + thread % kTeam * kLanePitch;
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const auto means = Channels<4>::load(own + 4 * i);
      sums[0] = fmaf(means.value[0], __uint_as_float(weights[i].x), sums[0]);
      sums[1] = fmaf(means.value[1], __uint_as_float(weights[i].y), sums[1]);
      sums[2] = fmaf(means.value[2], __uint_as_float(weights[i].z), sums[2]);
      sums[3] = fmaf(means.value[3], __uint_as_float(weights[i].w), sums[3]);
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
    for (int apart = kTeam / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, apart);
    }
    if (thread % kTeam == 0) store_cluster_async(to[0], full_barrier[0], sum);
  }
  wait_for_cluster_bytes(barrier);
  if (finished >= p.finished) return;
  const float* const of = received + finished * pitch + thread % kAdding;
  float made = 0.0f;
#pragma unroll
  for (int b = 0; b < kMostBlocks * kShares<T>; b += kAdding) {
    if (b + thread % kAdding < p.sums) made += of[b];
  }
#pragma unroll
  for (int apart = kAdding / 2; apart > 0; apart /= 2) {
    made += __shfl_xor_sync(kFullMask, made, apart);
  }
  if (thread % kAdding != 0 || m >= p.outputs) return;
  const Channels<1> y{{apply(activation, made + added)}};
  if (p.rounds) {
    y.store(static_cast<T*>(p.y) + m, p.overflow);
  } else {
    y.store(static_cast<float*>(p.y) + m);
  }
}

template <typename T>
__global__ void mean_linear_pack_kernel(const float* __restrict__ weight,  // [M, C]
                                        T* __restrict__ packed, int channels, int outputs,
                                        int blocks, int own, std::int64_t size) {
  const std::int64_t index = grid_thread();
  if (index >= size) return;
  constexpr int kBlockNumbers = kOutputs * kOwnChannels;
  const std::int64_t block = index / kBlockNumbers;
  const int own_index = static_cast<int>(index % kBlockNumbers);
  int output, of_block;
  if constexpr (sizeof(T) == 2) {  // [warp][step][lane][8], as mma.cuh says of A
    const int number = own_index % 8, lane = own_index / 8 % kWarpThreads;
    const int step = own_index / (8 * kWarpThreads) % kSteps;
    const int warp = own_index / (8 * kWarpThreads) / kSteps;
    output = warp % kTiles * kRows + lane / 4 + number / 2 % 2 * 8;
    of_block =
        (warp / kTiles * kSteps + step) * kDepth + lane % 4 * 2 + number % 2 + number / 4 * 8;
  } else {  // [load][thread][4]
    const int number = own_index % 4, thread = own_index / 4 % kThreads;
    output = thread / kTeam;
    of_block = thread % kTeam * kLaneChannels + own_index / (4 * kThreads) * 4 + number;
  }
  const std::int64_t m = block / blocks * kOutputs + output;
  const int c = static_cast<int>(block % blocks) * own + of_block;
  const bool some = m < outputs && of_block < own && c < channels;
  packed[index] = static_cast<T>(some ? weight[m * channels + c] : 0.0f);
}

int blocks_of(std::int64_t channels) {
  int blocks = 2;  // no block finishes more outputs than threads add up at once
  while (std::int64_t{blocks} * kOwnChannels < channels) blocks *= 2;
  return blocks;
}

std::int64_t groups_of(int outputs) { return (outputs + kOutputs - 1) / kOutputs; }

// Channels of a block, of which the last ones may have fewer.
int own_of(std::int64_t channels, int blocks) {
  const std::int64_t runs = (channels + kRun - 1) / kRun;
  return static_cast<int>((runs + blocks - 1) / blocks) * kRun;
}

const char* why_not(const AxisShape& shape) {
  if (shape.inner % kRun != 0) return "channels in eights";
  if (shape.inner > kMostBlocks * kOwnChannels) return "at most 2048 channels";
  if (shape.outer > 1) return "at most one image";  // five took 1 us more of a pass
  if (shape.axis < 1 || shape.axis > kMaxPositions) return "1 to 64 places";
  return nullptr;
}

void check(const AxisShape& shape) {
  if (const char* expected = why_not(shape)) {
    throw std::invalid_argument(std::string("mean_linear: expected ") + expected);
  }
}

template <typename T>
MeanLinear laid(const AxisShape& shape, int outputs) {
  MeanLinear p = {};
  p.positions = static_cast<int>(shape.axis);
  p.channels = static_cast<int>(shape.inner);
  p.outputs = outputs;
  p.blocks = blocks_of(shape.inner);
  p.own = own_of(shape.inner, p.blocks);
  p.sums = p.blocks * kShares<T>;
  p.finished = kOutputs / p.blocks;
  p.scale = static_cast<float>(1.0 / static_cast<double>(shape.axis));
  return p;
}

// Makes the kernel ready for clusters of any size.
template <typename T, typename Kernel>
void make_ready_for_clusters(Kernel kernel) {
  int bytes = 0;
  for (int channels = kRun; channels <= kMostBlocks * kOwnChannels; channels *= 2) {
    bytes = std::max(bytes, Layout(laid<T>({1, 1, channels}, kOutputs)).end * 4);
  }
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allow_large_clusters(kernel);
}

}  // namespace

std::int64_t mean_linear_takes(const MeanLinearShape& all, ElementType compute_type,
                               const Target& target) {
  const AxisShape& shape = all.images;
  const int outputs = all.outputs;
  if (why_not(shape) != nullptr) return 0;
  bool takes = false;
  with_row_type(compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const MeanLinear p = laid<T>(shape, outputs);
    takes = groups_of(outputs) <=
            target.clusters_at_once(p.blocks, kBlocksOfMultiprocessor, Layout(p).end * 4);
  });
  return takes;
}

std::int64_t mean_linear_packed(const MeanLinearShape& all, ElementType compute_type, int) {
  const AxisShape& shape = all.images;
  const int outputs = all.outputs;
  check(shape);
  std::int64_t bytes = groups_of(outputs) * kOutputs * blocks_of(shape.inner) * kOwnChannels;
  with_row_type(compute_type, [&](auto* type) { bytes *= sizeof(*type); });
  return bytes;
}

void mean_linear_pack(const float* weight, void* packed, const MeanLinearShape& all,
                      ElementType compute_type, Stream stream) {
  const AxisShape& shape = all.images;
  const int outputs = all.outputs;
  const std::int64_t bytes = mean_linear_packed(all, compute_type, 0);
  with_row_type(compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const MeanLinear p = laid<T>(shape, outputs);
    const std::int64_t size = bytes / sizeof(T);
    mean_linear_pack_kernel<T><<<blocks_for(size), kBlockThreads, 0, stream>>>(
        weight, static_cast<T*>(packed), p.channels, outputs, p.blocks, p.own, size);
    CUDA_CHECK_LAUNCH("mean_linear_pack_kernel");
  });
}

void mean_linear(const void* x, const void* packed, const Values& output,
                 const MeanLinearShape& all, ElementType compute_type, const Prologue& prologue,
                 const Epilogue& epilogue, Stream stream) {
  const AxisShape& shape = all.images;
  const int outputs = all.outputs;
  check(shape);
  if (shape.outer == 0 || outputs == 0) return;
  check_storage("y", output.storage, compute_type);
  if (epilogue.residual.data) throw std::invalid_argument("mean_linear: expected no residual");
  for (const void* address : {x, packed, static_cast<const void*>(prologue.scale),
                              static_cast<const void*>(prologue.shift)}) {
    if (!is_aligned(address, 16)) {
      throw std::invalid_argument("mean_linear: expected addresses that are multiples of 16");
    }
  }
  with_row_type(compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    MeanLinear p = laid<T>(shape, outputs);
    p.bias = epilogue.bias;
    p.factors = prologue.scale;
    p.shift = prologue.shift;
    p.y = output.data;
    p.rounds = output.storage != ElementType::float32;
    p.overflow = epilogue.overflow;
    p.floor = prologue.floor;
    p.activation = epilogue.activation;
    const auto kernel =
        prologue.scale != nullptr ? mean_linear_kernel<T, true> : mean_linear_kernel<T, false>;
    make_ready_for_clusters<T>(kernel);
    const dim3 grid(static_cast<unsigned>(groups_of(outputs)), 1, p.blocks);
    launch("launch of mean_linear_kernel", kernel, grid, kThreads, Layout(p).end * 4, stream,
           p.blocks, static_cast<const T*>(x), static_cast<const uint4*>(packed), p);
  });
}

}  // namespace cnn_engine::cuda
