// mean_linear on CUDA: a cluster of blocks makes some outputs of an image.
//
// A block of the cluster has some of the channels: their means, and what these add to the cluster's
// outputs. So no block reads more than its share of the image, and its weights are in registers, as
// operands of tensor cores, before it waits for the image. A mean is two numbers of 16 bits, the
// nearest and what that leaves, which are two columns of one product. Only sums meet: each warp
// sends its own to the block that finishes the output, which adds them up in an order of its own.
#include <algorithm>

#include "cuda/activation.cuh"
#include "cuda/channels.cuh"
#include "cuda/cluster.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/strided.cuh"
#include "ops/mean_linear.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarpThreads;
constexpr int kOwnChannels = 128;                                 // of a block
constexpr int kOutputs = 128;                                     // of a cluster
constexpr int kMostBlocks = 16;                                   // of a cluster
constexpr int kRows = 16, kDepth = 16, kColumns = 8;              // of a product
constexpr int kTiles = kOutputs / kRows;                          // of outputs
constexpr int kShares = kWarps / kTiles;                          // warps that share a tile's sum
constexpr int kSteps = kOwnChannels / kShares / kDepth;           // of a warp
constexpr int kPitch = kOwnChannels + 8;                          // of a column, in banks apart
constexpr int kRun = 8;                                           // channels of a load
constexpr int kLanes = kOwnChannels / kRun;                       // that have a place together
constexpr int kPlaces = kThreads / kLanes;                        // at once
constexpr int kAhead = 64 / kPlaces;                              // of a thread
constexpr int kSums = kThreads / std::max(kLanes, kWarpThreads);  // of a channel, in shared memory
constexpr int kAdding = 8;                                        // lanes that add up an output
constexpr int kMostPlaces = kAhead * kPlaces;

struct MeanLinear {
  const float *bias, *factors, *shift;
  void* y;
  bool rounds;
  Overflow overflow;
  int places, channels, outputs;
  int blocks, own, finished;  // of a cluster; channels of a block, outputs that it finishes
  float scale, floor;         // scale: 1 / places
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
  __host__ __device__ static int pitch_of(const MeanLinear& p) {
    return p.blocks * kShares + kAdding;
  }
};

template <typename T>
using FormatOf = std::conditional_t<std::is_same_v<T, __half>, Half, Bfloat16>;

// Has a number ready here, and not where it is first needed.
__device__ inline void have(std::uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ inline void have(int& x) { asm volatile("" : "+r"(x)); }
__device__ inline void have(float& x) { asm volatile("" : "+f"(x)); }

// Blocks: of outputs; then of a cluster along z.
template <typename T, bool Prepares>
__global__ void __launch_bounds__(kThreads)
    mean_linear_kernel(const T* x,                        // [P, C]
                       const uint4* __restrict__ packed,  // [outputs][block][warp][step][lane]
                       const __grid_constant__ MeanLinear p) {
  using Format = FormatOf<T>;
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
    expect_bytes(barrier, p.finished * p.blocks * kShares * 4);
  }
  __syncwarp();
  arrive_at_cluster_barrier();

  uint4 weights[kSteps];
  const std::int64_t block = std::int64_t{blockIdx.x} * p.blocks + rank;
  const uint4* const from = packed + (block * kWarps + warp) * kSteps * kWarpThreads + lane;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) weights[i] = __ldcs(from + i * kWarpThreads);
  const int run = thread % kLanes * kRun, row = thread / kLanes;
  const bool some = run < p.own && rank * p.own + run < p.channels;
  const int channel = some ? rank * p.own + run : 0;
  Channels<kRun> factors, shift;
  if constexpr (Prepares) {
    factors = Channels<kRun>::load(p.factors + channel);
    shift = Channels<kRun>::load(p.shift + channel);
  }
  for (int i = thread; i < at.received - at.columns; i += kThreads) memory[at.columns + i] = 0.0f;
  // Of the product: every fourth lane has two rows of both columns.
  const int tile = warp % kTiles, part = warp / kTiles, row_of_tile = lane / 4;
  std::uint32_t to[2], told[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int output = tile * kRows + row_of_tile + 8 * i, owner = output / p.finished;
    const int slot = (output - owner * p.finished) * pitch;
    to[i] = cluster_address(shared_address(received + slot + rank * kShares + part), owner);
    told[i] = cluster_address(barrier, owner);
    have(to[i]);
    have(told[i]);
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

  Neighbours<T, kRun> read[kAhead];
  // What lies past the end is read at the last place, and not taken: a load that may be left out
  // would wait for its own turn.
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int place = min(row + i * kPlaces, p.places - 1);
    read[i] = *reinterpret_cast<const Neighbours<T, kRun>*>(x + channel + place * p.channels);
  }
  auto sum = Channels<kRun>::all(0.0f);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const bool taken = row + i * kPlaces < p.places && some;
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
    const T near = narrowed<T>(mean);
    columns[thread] = near;
    const float left = mean - widened(near);  // nothing of an infinity
    columns[kPitch + thread] = narrowed<T>(isinf(widened(near)) ? 0.0f : left);
    past = std::is_same_v<T, __half> && is_past_float16(mean);
  }
  if (past) tell(p.overflow);
  __syncthreads();

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
    send_cluster(to[0], told[0], sums[0] + sums[1]);
    send_cluster(to[1], told[1], sums[2] + sums[3]);
  }
  wait_for_cluster_bytes(barrier);
  if (finished >= p.finished) return;
  const float* const of = received + finished * pitch + thread % kAdding;
  float made = 0.0f;
#pragma unroll
  for (int b = 0; b < kMostBlocks * kShares; b += kAdding) {
    if (b + thread % kAdding < p.blocks * kShares) made += of[b];
  }
#pragma unroll
  for (int apart = kAdding / 2; apart > 0; apart /= 2) {
    made += __shfl_xor_sync(kFullMask, made, apart);
  }
  if (thread % kAdding != 0 || m >= p.outputs) return;
  const Channels<1> y{{activation(made + added)}};
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
  // As mma.cuh says of A.
  const int number = static_cast<int>(index % 8), lane = static_cast<int>(index / 8 % kWarpThreads);
  const int row = lane / 4 + number / 2 % 2 * 8;
  const int column = lane % 4 * 2 + number % 2 + number / 4 * 8;
  const std::int64_t steps = index / (8 * kWarpThreads), block = steps / kSteps / kWarps;
  const int step = static_cast<int>(steps % kSteps),
            warp = static_cast<int>(steps / kSteps % kWarps);
  const std::int64_t m = block / blocks * kOutputs + warp % kTiles * kRows + row;
  const int of_block = (warp / kTiles * kSteps + step) * kDepth + column;
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

const char* why_not(const AxisShape& shape, Conv2dOperands operands) {
  if (operands != Conv2dOperands::float16 && operands != Conv2dOperands::bfloat16) {
    return "float16 or bfloat16";
  }
  if (shape.inner % kRun != 0) return "channels in eights";
  if (shape.inner > kMostBlocks * kOwnChannels) return "at most 2048 channels";
  if (shape.outer > 1) return "at most one image";  // five took 1 us more of a pass
  if (shape.axis < 1 || shape.axis > kMostPlaces) return "1 to 64 places";
  return nullptr;
}

void check(const AxisShape& shape, Conv2dOperands operands) {
  if (const char* expected = why_not(shape, operands)) {
    throw std::invalid_argument(std::string("mean_linear: expected ") + expected);
  }
}

// Calls body(a null pointer to the type of 16 bits).
template <typename Body>
void with_halves(Conv2dOperands operands, const Body& body) {
  if (operands == Conv2dOperands::float16) return body(static_cast<__half*>(nullptr));
  body(static_cast<__nv_bfloat16*>(nullptr));
}

MeanLinear laid(const AxisShape& shape, int outputs) {
  MeanLinear p = {};
  p.places = static_cast<int>(shape.axis);
  p.channels = static_cast<int>(shape.inner);
  p.outputs = outputs;
  p.blocks = blocks_of(shape.inner);
  p.own = own_of(shape.inner, p.blocks);
  p.finished = kOutputs / p.blocks;
  p.scale = static_cast<float>(1.0 / static_cast<double>(shape.axis));
  return p;
}

// Makes the kernel ready for clusters of any size.
template <typename Kernel>
void make_ready_for_clusters(Kernel kernel) {
  int bytes = 0;
  for (int channels = kRun; channels <= kMostBlocks * kOwnChannels; channels *= 2) {
    bytes = std::max(bytes, Layout(laid({1, 1, channels}, kOutputs)).end * 4);
  }
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
}

}  // namespace

std::int64_t mean_linear_takes(const AxisShape& shape, int outputs, Conv2dOperands operands,
                               int device) {
  int major = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major < 9 || !waits_in_kernels() || why_not(shape, operands) != nullptr) return 0;
  const MeanLinear p = laid(shape, outputs);
  const auto kernel = mean_linear_kernel<__half, false>;
  make_ready_for_clusters(kernel);
  return groups_of(outputs) <= clusters_at_once(kernel, p.blocks, kThreads, Layout(p).end * 4);
}

std::int64_t mean_linear_packed(const AxisShape& shape, int outputs, Conv2dOperands operands, int) {
  check(shape, operands);
  return groups_of(outputs) * kOutputs * blocks_of(shape.inner) * kOwnChannels * 2;
}

void mean_linear_pack(const float* weight, void* packed, const AxisShape& shape, int outputs,
                      Conv2dOperands operands, Stream stream) {
  const std::int64_t size = mean_linear_packed(shape, outputs, operands, 0) / 2;
  const MeanLinear p = laid(shape, outputs);
  with_halves(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    mean_linear_pack_kernel<T><<<blocks_for(size), kBlockThreads, 0, stream>>>(
        weight, static_cast<T*>(packed), p.channels, outputs, p.blocks, p.own, size);
    CUDA_CHECK_LAUNCH("mean_linear_pack_kernel");
  });
}

void mean_linear(const void* x, const void* packed, const float* bias, const float* factors,
                 const float* shift, void* y, const AxisShape& shape, int outputs, float floor,
                 Stored y_stored, const Overflow& overflow, Conv2dOperands operands,
                 UnaryFunction activation, float alpha, float beta, Stream stream) {
  check(shape, operands);
  if (shape.outer == 0 || outputs == 0) return;
  check_stored("y", y_stored, operands);
  for (const void* address :
       {x, packed, static_cast<const void*>(factors), static_cast<const void*>(shift)}) {
    if (!is_aligned(address, 16)) {
      throw std::invalid_argument("mean_linear: expected addresses that are multiples of 16");
    }
  }
  MeanLinear p = laid(shape, outputs);
  p.bias = bias;
  p.factors = factors;
  p.shift = shift;
  p.y = y;
  p.rounds = y_stored != Stored::float32;
  p.overflow = overflow;
  p.floor = floor;
  p.activation = {activation, alpha, beta};
  with_halves(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto kernel =
        factors != nullptr ? mean_linear_kernel<T, true> : mean_linear_kernel<T, false>;
    make_ready_for_clusters(kernel);
    const dim3 grid(static_cast<unsigned>(groups_of(outputs)), 1, p.blocks);
    launch("launch of mean_linear_kernel", kernel, grid, kThreads, Layout(p).end * 4, stream,
           p.blocks, static_cast<const T*>(x), static_cast<const uint4*>(packed), p);
  });
}

}  // namespace cnn_engine::cuda
