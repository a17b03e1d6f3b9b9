// squeeze_excite on CUDA: a cluster of up to eight blocks makes the factors of an image.
//
// A block has some of the channels: their means, what they add to every hidden sum, and in the end
// their factors. So weights are packed by channels, [C][first weights of M, M padded to eights] and
// then [C][second weights], of which a block needs two runs of its own: they are on their way to
// shared memory before it waits for the image. Only the hidden sums of the blocks meet, in shared
// memory that the cluster shares, and are added in the order of the blocks.
#include <cooperative_groups.h>

#include <algorithm>

#include "cuda/activation.cuh"
#include "cuda/channels.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_weights.cuh"
#include "cuda/strided.cuh"
#include "ops/squeeze_excite.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kRun = 8;         // channels, or hidden sums, of a load
constexpr int kMostBlocks = 8;  // of a cluster, that every GPU with clusters has
constexpr int kAhead = 8;       // loads of a thread that are on their way at once
constexpr int kLanes = 8;       // that share a channel's second sum
constexpr int kMostRuns = 512;  // of channels, and of hidden sums
// Weights past so many bytes of shared memory are read from where they are: two blocks of a
// multiprocessor have room for so many, and one alone.
constexpr int kHalfHeld = 80 * 1024, kMostHeld = 160 * 1024;
constexpr int kFewBlocks = 64;  // that find a multiprocessor each, all clusters at once

struct Gates {
  const float *first_bias, *second_bias;
  float* y;
  int places, channels, hidden;
  int runs, hidden_runs;  // of channels and of hidden sums
  int own_runs;           // of channels, that the first blocks have
  bool holds;             // weights in shared memory
  Activation inner, outer;
};

// Adds up the rows of [rows][columns] in a fixed order: `parts` threads a column, then their sums.
// Calls take(column, sum).
template <typename Take>
__device__ inline void add_up(const float* from, float* parts, int rows, int columns,
                              const Take& take) {
  const int count = max(1, kThreads / columns);
  for (int i = threadIdx.x; i < count * columns; i += kThreads) {
    const int part = i / columns, column = i - part * columns;
    float sum = 0.0f;
#pragma unroll 4
    for (int row = part; row < rows; row += count) sum += from[row * columns + column];
    parts[i] = sum;
  }
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += kThreads) {
    float sum = 0.0f;
#pragma unroll 8
    for (int part = 0; part < count; ++part) sum += parts[part * columns + column];
    take(column, sum);
  }
  __syncthreads();
}

// Copies `bytes`, a multiple of 16, to shared memory; does not wait for them.
__device__ inline void begin_copy(char* to, const char* from, int bytes) {
  for (int at = threadIdx.x * 16; at < bytes; at += kThreads * 16) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to + at));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from + at)
                 : "memory");
  }
}

// Blocks: of a cluster along z; then images.
template <typename T, typename X>
__global__ void __launch_bounds__(kThreads)
    squeeze_excite_kernel(const X* x, const T* packed, const __grid_constant__ Gates p) {
  // [4096] sums of threads, [512] or more sums of parts, [channels] means, [hidden] sums of this
  // block and of all; then the weights.
  extern __shared__ __align__(16) float memory[];
  const int padded = p.hidden_runs * kRun;  // hidden sums
  float* const sums = memory;
  float* const parts = sums + kThreads * kRun;
  float* const means = parts + max(kThreads, max(padded, p.own_runs * kRun));
  float* const own_sums = means + p.own_runs * kRun;
  float* const hidden = own_sums + padded;
  let_successors_start();
  const int first_run = static_cast<int>(blockIdx.z) * p.own_runs;
  const int runs = min(p.own_runs, p.runs - first_run);
  const int channels = runs * kRun, first = first_run * kRun;
  const T* first_weights = packed + static_cast<std::int64_t>(first) * padded;
  const T* second_weights = first_weights + static_cast<std::int64_t>(p.channels) * padded;
  if (p.holds) {
    T* const held = reinterpret_cast<T*>(hidden + padded);
    const int elements = channels * padded;
    const int bytes = elements * static_cast<int>(sizeof(T));
    begin_copy(reinterpret_cast<char*>(held), reinterpret_cast<const char*>(first_weights), bytes);
    begin_copy(reinterpret_cast<char*>(held + elements),
               reinterpret_cast<const char*>(second_weights), bytes);
    first_weights = held;
    second_weights = held + elements;
  }
  wait_for_inputs();

  // Means: a thread has a run of channels at some of the places.
  const int rows = kThreads / runs;
  const int row = threadIdx.x / runs, run = threadIdx.x - row * runs;
  if (row < rows) {
    auto sum = Channels<kRun>::all(0.0f);
    const X* const image =
        x + static_cast<std::int64_t>(blockIdx.x) * p.places * p.channels + first + run * kRun;
    // What lies past the end is read at the last place, and not taken: a load that may be left out
    // would wait for its own turn.
    for (int begin = row; begin < p.places; begin += kAhead * rows) {
      Neighbours<X, kRun> read[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const std::int64_t place = min(begin + i * rows, p.places - 1);
        read[i] = *reinterpret_cast<const Neighbours<X, kRun>*>(image + place * p.channels);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (begin + i * rows >= p.places) break;
#pragma unroll
        for (int v = 0; v < kRun; ++v) sum.value[v] += widened(read[i].value[v]);
      }
    }
    sum.store(sums + row * channels + run * kRun);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  add_up(sums, parts, rows, channels,
         [&](int c, float sum) { means[c] = sum / static_cast<float>(p.places); });

  // What these channels add to the hidden sums: a thread has a run of sums and some of the
  // channels.
  const int shares = kThreads / p.hidden_runs;
  const int share = threadIdx.x / p.hidden_runs, h = threadIdx.x - share * p.hidden_runs;
  if (share < shares) {
    auto sum = Channels<kRun>::all(0.0f);
#pragma unroll 4
    for (int c = share; c < channels; c += shares) {
      const auto weight = Channels<kRun>::load(first_weights + c * padded + h * kRun);
#pragma unroll
      for (int v = 0; v < kRun; ++v) sum.value[v] = fmaf(means[c], weight.value[v], sum.value[v]);
    }
    sum.store(sums + share * padded + h * kRun);
  }
  __syncthreads();
  add_up(sums, parts, shares, padded, [&](int m, float sum) { own_sums[m] = sum; });

  const int blocks = static_cast<int>(gridDim.z);
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if (blocks > 1) cluster.sync();
#endif
  for (int m = threadIdx.x; m < padded; m += kThreads) {
    float sum = 0.0f;
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      float found[kMostBlocks];
#pragma unroll
      for (int b = 0; b < kMostBlocks; ++b) {
        found[b] = cluster.map_shared_rank(own_sums, min(b, blocks - 1))[m];
      }
#pragma unroll
      for (int b = 0; b < kMostBlocks; ++b) sum += b < blocks ? found[b] : 0.0f;
    }
#endif
    if (blocks == 1) sum = own_sums[m];
    const bool some = m < p.hidden;
    if (some && p.first_bias != nullptr) sum += p.first_bias[m];
    hidden[m] = some ? p.inner(sum) : 0.0f;
  }
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  // Others may read this block's sums until they have theirs: it does not end before.
  if (blocks > 1) cluster.barrier_arrive();
#endif

  const int lane = threadIdx.x % kLanes;
  for (int begin = 0; begin < channels; begin += kThreads / kLanes) {
    const int c = begin + threadIdx.x / kLanes;
    float sum = 0.0f;
    if (c < channels) {
#pragma unroll 4
      for (int m = lane * kRun; m < padded; m += kLanes * kRun) {
        const auto weight = Channels<kRun>::load(second_weights + c * padded + m);
        const auto value = Channels<kRun>::load(hidden + m);
#pragma unroll
        for (int v = 0; v < kRun; ++v) sum = fmaf(value.value[v], weight.value[v], sum);
      }
    }
#pragma unroll
    for (int apart = kLanes / 2; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, apart);
    }
    if (c < channels && lane == 0) {
      if (p.second_bias != nullptr) sum += p.second_bias[first + c];
      p.y[static_cast<std::int64_t>(blockIdx.x) * p.channels + first + c] = p.outer(sum);
    }
  }
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) cluster.barrier_wait();
#endif
}

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

void check(const AxisShape& shape, int hidden) {
  if (shape.inner % kRun != 0 || shape.inner > kMostRuns * kRun || hidden < 1 ||
      hidden > kMostRuns * kRun || shape.axis < 1 || shape.axis > (1 << 30)) {
    throw std::invalid_argument(
        "squeeze_excite: expected channels in eights and hidden sums, at most 4096 of each, and "
        "places");
  }
}

}  // namespace

std::int64_t squeeze_excite_packed(const AxisShape& shape, int hidden, Conv2dOperands operands,
                                   int) {
  check(shape, hidden);
  std::int64_t bytes = 0;
  with_row_type(operands, [&](auto* type) {
    bytes = 2 * shape.inner * runs_of(hidden) * kRun * static_cast<int>(sizeof(*type));
  });
  return bytes;
}

void squeeze_excite_pack(const float* first, const float* second, void* packed,
                         const AxisShape& shape, int hidden, Conv2dOperands operands,
                         Stream stream) {
  check(shape, hidden);
  with_row_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int channels = static_cast<int>(shape.inner), padded = runs_of(hidden) * kRun;
    squeeze_excite_pack_kernel<T><<<blocks_for(shape.inner * padded), kBlockThreads, 0, stream>>>(
        first, second, static_cast<T*>(packed), channels, hidden, padded);
    CUDA_CHECK_LAUNCH("squeeze_excite_pack_kernel");
  });
}

void squeeze_excite(const void* x, const void* packed, const float* first_bias,
                    const float* second_bias, float* y, const AxisShape& shape, int hidden,
                    Stored x_stored, Conv2dOperands operands, UnaryFunction inner,
                    float inner_alpha, float inner_beta, UnaryFunction outer, float outer_alpha,
                    float outer_beta, Stream stream) {
  check(shape, hidden);
  check_stored("x", x_stored, operands);
  if (!is_aligned(x, 16) || !is_aligned(packed, 16)) {
    throw std::invalid_argument("squeeze_excite: expected addresses that are multiples of 16");
  }
  if (shape.outer == 0) return;
  Gates p = {};
  p.first_bias = first_bias;
  p.second_bias = second_bias;
  p.y = y;
  p.places = static_cast<int>(shape.axis);
  p.channels = static_cast<int>(shape.inner);
  p.hidden = hidden;
  p.runs = runs_of(shape.inner);
  p.hidden_runs = runs_of(hidden);
  p.own_runs = waits_in_kernels() ? (p.runs + kMostBlocks - 1) / kMostBlocks : p.runs;
  p.inner = {inner, inner_alpha, inner_beta};
  p.outer = {outer, outer_alpha, outer_beta};
  const int blocks = (p.runs + p.own_runs - 1) / p.own_runs;
  const int own = p.own_runs * kRun, padded = p.hidden_runs * kRun;
  const int floats = kThreads * kRun + std::max({kThreads, padded, own}) + own + 2 * padded;
  with_row_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const std::int64_t weights = std::int64_t{2} * own * padded * sizeof(T);
    const bool alone = shape.outer * blocks <= kFewBlocks;
    p.holds = weights <= (alone ? kMostHeld : kHalfHeld) && waits_in_kernels();
    const int bytes = floats * 4 + (p.holds ? static_cast<int>(weights) : 0);
    const auto run = [&](auto* stored) {
      using X = std::remove_pointer_t<decltype(stored)>;
      const auto kernel = squeeze_excite_kernel<T, X>;
      CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
      launch("launch of squeeze_excite_kernel", kernel,
             dim3(static_cast<unsigned>(shape.outer), 1, blocks), kThreads, bytes, stream, blocks,
             static_cast<const X*>(x), static_cast<const T*>(packed), p);
    };
    if (x_stored == Stored::float32) return run(static_cast<float*>(nullptr));
    run(type);
  });
}

}  // namespace cnn_engine::cuda
