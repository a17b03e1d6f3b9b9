// The kernel of squeeze_excite: a block, or a cluster of up to eight, makes the factors of an
// image.
//
// A block has some of the channels: their means, what they add to every hidden sum, and in the end
// their factors. So weights are packed by channels, [C][first weights of M, M padded to an odd
// number of eights, whose rows begin in banks apart] and then [C][second weights], of which a block
// needs two runs of its own: they are on their way to shared memory before it waits for the image,
// and so are the biases. Only the hidden sums of the blocks meet: each is sent to all by the warp
// that made it, and those that came are added up in the order of the blocks. A block may multiply
// its part of the image by what it made.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/strided.cuh"
#include "cuda/sm80/channels.cuh"
#include "cuda/sm80/cluster.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/rounded.cuh"
#include "cuda/sm80/row_weights.cuh"

namespace cnn_engine::cuda::gates {

constexpr int kThreads = 512, kWarps = kThreads / kWarpThreads;
constexpr int kRun = 8;         // channels, or hidden sums, of a load
constexpr int kMostBlocks = 8;  // of a cluster, that every GPU with clusters has
constexpr int kMostLaneBits = 3;
constexpr int kFewParts = 4;  // of means, that one thread adds up; what is in 16 bits has few
// Positions of the image that a thread keeps to multiply them, as many as registers have room for.
constexpr int kKept = 5, kFewKept = 2;

struct Gates {
  const float *first_bias, *second_bias;
  const float* means;  // parts of them, or null
  void* y;             // factors, or the image times them
  Overflow overflow;
  int positions, channels, hidden, parts;
  int runs, hidden_runs;           // of channels and of hidden sums
  int own_runs;                    // of channels, that the first blocks have
  int lane_bits;                   // of the number of lanes that share a channel's second sum
  int blocks;                      // of an image
  bool by_positions;               // each block reads all channels, in some of the positions
  bool holds_first, holds_second;  // weights in shared memory
  int once;                        // 1
  float scale;                     // 1 / positions
  Activation inner, outer;
  float lowest, highest;  // of the image times factors
};

// Shared memory, in floats; weights that are held follow.
struct Layout {
  int parts, means, others, first_bias, second_bias, hidden, received, end;

  __host__ __device__ explicit Layout(const Gates& p) {
    const int own = p.own_runs * kRun, padded = p.hidden_runs * kRun;
    parts = larger(kThreads * kRun, padded);  // after sums of threads
    means = parts + larger(kThreads, p.by_positions ? p.channels : own);
    others = means + own;  // sums of this block's channels, of each block's positions
    second_bias = others + (p.by_positions ? p.blocks * own : 0);
    first_bias = second_bias + own;
    hidden = first_bias + padded;
    end = hidden + padded;
    received = p.blocks > 1 ? end : 0;  // one block has its own where sums of threads were
    if (p.blocks > 1) end += p.blocks * padded;
  }
  __host__ __device__ static int larger(int a, int b) { return a > b ? a : b; }
};

// Without a call for what gates have most. Factors of what is kept in 16 bits are as rounded.cuh
// has functions.
template <typename T>
__device__ inline float applied(const Activation& function, float x) {
  constexpr bool kRounded = !std::is_same_v<T, float>;
  constexpr float kLog2E = 1.4426950408889634f;
  if (function.function == UnaryFunction::sigmoid) {
    return kRounded ? rounded_logistic(-kLog2E * x) : sigmoid(x);
  }
  if (kRounded && function.function == UnaryFunction::swish) {
    return x * rounded_logistic(-kLog2E * function.alpha * x);
  }
  return apply(function, x);
}

// Adds up kRun numbers over a warp's lanes; lane 4 v then has number v.
__device__ inline float add_lanes(float (&sum)[kRun]) {
  const unsigned lane = threadIdx.x % kWarpThreads;
#pragma unroll
  for (int half = kRun / 2, apart = kWarpThreads / 2; half > 0; half /= 2, apart /= 2) {
    const bool upper = (lane & apart) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? sum[i + half] : sum[i], sent = upper ? sum[i] : sum[i + half];
      sum[i] = kept + __shfl_xor_sync(kFullMask, sent, apart);
    }
  }
  sum[0] += __shfl_xor_sync(kFullMask, sum[0], 2);
  return sum[0] + __shfl_xor_sync(kFullMask, sum[0], 1);
}

// Copies `bytes`, a multiple of 16, to shared memory; does not wait for them.
__device__ inline void begin_copy(void* to, const void* from, int bytes) {
  for (int at = threadIdx.x * 16; at < bytes; at += kThreads * 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + at),
                 "l"(static_cast<const char*>(from) + at)
                 : "memory");
  }
}

// Adds up what is at every `apart`-th position from the first of a thread on, `positions` in all,
// at most kPrefetch of them under way at once. What lies past the end is read at the last place,
// and not taken: a load that may be left out would wait for its own turn.
template <int kPrefetch, typename X>
__device__ inline void add_positions(Channels<kRun>& sum, const X* image, int first, int apart,
                                     int positions, int pitch) {
#pragma unroll 1
  for (int begin = first; begin < positions; begin += kPrefetch * apart) {
    Neighbours<X, kRun> read[kPrefetch];
#pragma unroll
    for (int i = 0; i < kPrefetch; ++i) {
      const std::int64_t position = min(begin + i * apart, positions - 1);
      read[i] = *reinterpret_cast<const Neighbours<X, kRun>*>(image + position * pitch);
    }
#pragma unroll
    for (int i = 0; i < kPrefetch; ++i) {
      if (begin + i * apart >= positions) break;
#pragma unroll
      for (int v = 0; v < kRun; ++v) sum.value[v] += widened(read[i].value[v]);
    }
  }
}

// Reads once more what add_positions read: a thread's positions, up to kPrefetch of them.
template <int kPrefetch, typename X, int kMost>
__device__ inline void keep_positions(Neighbours<X, kRun> (&kept)[kMost], const X* image, int first,
                                      int apart, int positions, int pitch) {
#pragma unroll
  for (int i = 0; i < kPrefetch; ++i) {
    const std::int64_t position = min(first + i * apart, positions - 1);
    kept[i] = *reinterpret_cast<const Neighbours<X, kRun>*>(image + position * pitch);
  }
}

// Blocks: of a cluster along z; then images.
template <typename T, typename X, bool Scales>
__global__ void __launch_bounds__(kThreads, 2)
    squeeze_excite_kernel(const X* x, const T* packed, const __grid_constant__ Gates p) {
  extern __shared__ __align__(16) float memory[];
  __shared__ __align__(8) std::uint64_t all_received, all_summed;
  const Layout at(p);
  float *const sums = memory, *const parts = memory + at.parts, *const means = memory + at.means;
  float *const first_bias = memory + at.first_bias, *const second_bias = memory + at.second_bias;
  float *const hidden = memory + at.hidden, *const received = memory + at.received;
  float* const others = memory + at.others;
  const int padded = p.hidden_runs * kRun;  // hidden sums
  const int thread = threadIdx.x, warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const std::uint32_t barrier = shared_address(&all_received);
  const std::uint32_t summed = shared_address(&all_summed);
  let_successors_start();
  const int rank = static_cast<int>(blockIdx.z), first = rank * p.own_runs * kRun;
  const int channels = max(0, min(p.own_runs * kRun, p.channels - first));
  if (p.blocks > 1) {
    if (thread == 0) {
      init_barrier(barrier);
      expect_tx(barrier, p.blocks * padded * 4);
      init_barrier(summed);
      expect_tx(summed, p.blocks * channels * 4);
    }
    __syncwarp();
    arrive_at_cluster_barrier();
  }
  const T* first_weights = packed + static_cast<std::int64_t>(first) * padded;
  const T* second_weights = first_weights + static_cast<std::int64_t>(p.channels) * padded;
  const int elements = channels * padded;
  T* held = reinterpret_cast<T*>(memory + at.end);
  if (p.holds_first) {
    begin_copy(held, first_weights, elements * static_cast<int>(sizeof(T)));
    first_weights = held;
    held += elements;
  }
  if (p.holds_second) {
    begin_copy(held, second_weights, elements * static_cast<int>(sizeof(T)));
    second_weights = held;
  }
  const auto begin_bias = [&](float* to, const float* from, int count, int all) {
    for (int i = thread; i < all; i += kThreads) {
      if (from != nullptr && i < count) {
        copy_async<4>(to + i, from + i);
      } else {
        to[i] = 0.0f;
      }
    }
  };
  begin_bias(second_bias, p.second_bias ? p.second_bias + first : nullptr, channels, channels);
  begin_bias(first_bias, p.first_bias, p.hidden, padded);
  // Of positions: a thread has a run of channels at some of them. Of their sums: a channel of some.
  const int read = p.by_positions ? p.channels : channels, runs = read / kRun;
  const int rows = kThreads / runs, row = thread / runs, run = thread - row * runs;
  const int shares = max(1, kThreads / read);
  const int share = read < kThreads ? thread / read : 0, column = thread - share * read;
  const int some = (p.positions + p.blocks - 1) / p.blocks;
  const int first_position = p.by_positions ? rank * some : 0;
  const int positions =
      p.by_positions ? max(0, min(some, p.positions - first_position)) : p.positions;
  const int part = thread & ((1 << p.lane_bits) - 1);
  if (p.blocks > 1) wait_at_cluster_barrier();  // all blocks can be sent to

  // A loop, though it is gone through once: what is computed before it stays before the wait.
#pragma unroll 1
  for (int once = p.once; once > 0; --once) {
    wait_for_inputs();

    const X* const image =
        x + (static_cast<std::int64_t>(blockIdx.x) * p.positions + first_position) * p.channels +
        (p.by_positions ? 0 : first);
    if (!Scales && p.means != nullptr) {
      const float* const from = p.means + std::int64_t{blockIdx.x} * p.parts * p.channels + first;
      if (sizeof(X) == 2 || p.parts <= kFewParts) {
        for (int c = thread; c < channels; c += kThreads) {
          float sum = 0.0f;
#pragma unroll 4
          for (int i = 0; i < p.parts; ++i) sum += from[i * p.channels + c];
          means[c] = sum;
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
      } else {  // by several threads, whose loads are under way at once
        const int sharing = min(shares, p.parts);
        if (share < sharing) {
          for (int c = column; c < channels; c += kThreads) {
            float sum = 0.0f;
#pragma unroll 4
            for (int i = share; i < p.parts; i += sharing) sum += from[i * p.channels + c];
            parts[share * channels + c] = sum;
          }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        for (int c = thread; c < channels; c += kThreads) {
          float sum = 0.0f;
#pragma unroll 8
          for (int s = 0; s < sharing; ++s) sum += parts[s * channels + c];
          means[c] = sum;
        }
      }
    } else {
      if (row < rows) {
        auto sum = Channels<kRun>::all(0.0f);
        constexpr int kMost = sizeof(X) == 4 ? 4 : 8;
        if (positions <= 4 * rows) {
          add_positions<4>(sum, image + run * kRun, row, rows, positions, p.channels);
        } else {
          add_positions<kMost>(sum, image + run * kRun, row, rows, positions, p.channels);
        }
        sum.store(sums + row * read + run * kRun);
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();
      if (share < shares) {
        for (int c = column; c < read; c += kThreads) {
          float sum = 0.0f;
#pragma unroll 8
          for (int r = share; r < rows; r += shares) sum += sums[r * read + c];
          parts[share * read + c] = sum;
        }
      }
      __syncthreads();
      for (int c = thread; c < read; c += kThreads) {
        float sum = 0.0f;
#pragma unroll 4
        for (int s = 0; s < shares; ++s) sum += parts[s * read + c];
        if (!p.by_positions) {
          means[c] = sum * p.scale;
        } else {
          const int own = p.own_runs * kRun, block = c / own;
          const std::uint32_t to = shared_address(others + rank * own + c - block * own);
          store_cluster_async(cluster_address(to, block), cluster_address(summed, block), sum);
        }
      }
      if (p.by_positions) {
        wait_for_cluster_bytes(summed);
        for (int c = thread; c < channels; c += kThreads) {
          float sum = 0.0f;
#pragma unroll
          for (int b = 0; b < kMostBlocks; ++b) sum += others[b * p.own_runs * kRun + c];
          means[c] = sum * p.scale;
        }
      }
    }
    __syncthreads();

    // What these channels add to the hidden sums: a warp has a run of sums, its lanes channels.
    for (int h = warp * kRun; h < padded; h += kWarps * kRun) {
      float sum[kRun] = {};
#pragma unroll 2
      for (int c = lane; c < channels; c += kWarpThreads) {
        const auto weight = Channels<kRun>::load(first_weights + c * padded + h);
#pragma unroll
        for (int v = 0; v < kRun; ++v) sum[v] = fmaf(means[c], weight.value[v], sum[v]);
      }
      constexpr int kSame = kWarpThreads / kRun;  // lanes that have the same sum
      const float total = add_lanes(sum);
      const int m = h + lane / kSame;
      if (p.blocks == 1) {
        received[m] = total;
      } else {
        const std::uint32_t to = shared_address(received + rank * padded + m);
        for (int b = lane % kSame; b < p.blocks; b += kSame) {
          store_cluster_async(cluster_address(to, b), cluster_address(barrier, b), total);
        }
      }
    }
    // On its way while hidden sums are.
    [[maybe_unused]] Neighbours<X, kRun> kept[Scales ? kKept : 1];
    if constexpr (Scales) {
      if (row < rows && positions <= kFewKept * rows) {
        keep_positions<kFewKept>(kept, image + run * kRun, row, rows, positions, p.channels);
      } else if (row < rows) {
        keep_positions<kKept>(kept, image + run * kRun, row, rows, positions, p.channels);
      }
    }
    if (p.blocks == 1) {
      __syncthreads();
    } else {
      wait_for_cluster_bytes(barrier);
    }
    for (int m = thread; m < padded; m += kThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int b = 0; b < kMostBlocks; ++b) {
        if (b < p.blocks) sum += received[b * padded + m];
      }
      hidden[m] = m < p.hidden ? applied<T>(p.inner, sum + first_bias[m]) : 0.0f;
    }
    __syncthreads();

    // A factor is finished by one lane of those that share it, so as few share one as keep all
    // busy.
#pragma unroll 1
    for (int begin = 0; begin < channels << p.lane_bits; begin += kThreads) {
      const int c = (begin + thread) >> p.lane_bits;
      float sum = 0.0f;
      if (c < channels) {
#pragma unroll 4
        for (int m = part * kRun; m < padded; m += kRun << p.lane_bits) {
          const auto weight = Channels<kRun>::load(second_weights + c * padded + m);
          const auto value = Channels<kRun>::load(hidden + m);
#pragma unroll
          for (int v = 0; v < kRun; ++v) sum = fmaf(value.value[v], weight.value[v], sum);
        }
      }
#pragma unroll
      for (int bit = kMostLaneBits - 1; bit >= 0; --bit) {
        const float other = __shfl_xor_sync(kFullMask, sum, 1 << bit);
        sum += bit < p.lane_bits ? other : 0.0f;
      }
      if (c < channels && part == 0) {
        const float factor = applied<T>(p.outer, sum + second_bias[c]);
        if constexpr (Scales) {
          means[c] = factor;
        } else {
          static_cast<float*>(p.y)[std::int64_t{blockIdx.x} * p.channels + first + c] = factor;
        }
      }
    }
    if constexpr (Scales) {
      __syncthreads();
      if (row < rows) {
        const auto factor = Channels<kRun>::load(means + run * kRun);
        X* const to = static_cast<X*>(p.y) + std::int64_t{blockIdx.x} * p.positions * p.channels +
                      first + run * kRun;
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
          const std::int64_t position = row + i * rows;
          if (position >= positions) break;
          Channels<kRun> scaled;
#pragma unroll
          for (int v = 0; v < kRun; ++v) {
            const float product = widened(kept[i].value[v]) * factor.value[v];
            scaled.value[v] = clamp(product, p.lowest, p.highest);
          }
          scaled.store(to + position * p.channels, p.overflow);
        }
      }
    }
  }
}

}  // namespace cnn_engine::cuda::gates
