// squeeze_excite on CUDA: a block, or a cluster of up to eight, makes the factors of an image.
//
// A block has some of the channels: their means, what they add to every hidden sum, and in the end
// their factors. So weights are packed by channels, [C][first weights of M, M padded to an odd
// number of eights, whose rows begin in banks apart] and then [C][second weights], of which a block
// needs two runs of its own: they are on their way to shared memory before it waits for the image,
// and so are the biases. Only the hidden sums of the blocks meet: each is sent to all by the warp
// that made it, and those that came are added up in the order of the blocks. A block may multiply
// its part of the image by what it made.
#include <algorithm>

#include "cuda/channels.cuh"
#include "cuda/cluster.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/rounded.cuh"
#include "cuda/row_weights.cuh"
#include "cuda/strided.cuh"
#include "ops/squeeze_excite.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarpThreads;
constexpr int kRun = 8;         // channels, or hidden sums, of a load
constexpr int kMostBlocks = 8;  // of a cluster, that every GPU with clusters has
constexpr int kMostRuns = 512;  // of channels, and of hidden sums
// What a block is worth: so many bytes of weights, which arrive while it waits, and so many numbers
// of the image.
constexpr std::int64_t kWeightBytes = 160 * 1024, kNumbers = 4 * 1024;
// Weights past so many bytes of shared memory in all are read from where they are: two blocks of a
// multiprocessor have room for so many, and one alone.
constexpr std::int64_t kHalfHeld = 112 * 1024, kMostHeld = 224 * 1024;
constexpr int kFewBlocks = 96;  // that find a multiprocessor each, all clusters at once
constexpr int kMostLaneBits = 3;
// Places of the image that a thread keeps to multiply them, as many as registers have room for.
constexpr int kKept = 5, kFewKept = 2;
// Places of an image up to which it is worth it: writing more costs more than the products save.
constexpr int kFewPlaces = 256;
// Numbers of an image from which its blocks have places and not channels: lines of memory are
// whole then, which is worth one more exchange.
constexpr std::int64_t kManyNumbers = 256 * 1024;

struct Gates {
  const float *first_bias, *second_bias;
  const float* means;  // parts of them, or null
  void* y;             // factors, or the image times them
  Overflow overflow;
  int places, channels, hidden, parts;
  int runs, hidden_runs;           // of channels and of hidden sums
  int own_runs;                    // of channels, that the first blocks have
  int lane_bits;                   // of the number of lanes that share a channel's second sum
  int blocks;                      // of an image
  bool by_places;                  // each block reads all channels, in some of the places
  bool holds_first, holds_second;  // weights in shared memory
  int once;                        // 1
  float scale;                     // 1 / places
  Activation inner, outer;
};

// Shared memory, in floats; weights that are held follow.
struct Layout {
  int parts, means, others, first_bias, second_bias, hidden, received, end;

  __host__ __device__ explicit Layout(const Gates& p) {
    const int own = p.own_runs * kRun, padded = p.hidden_runs * kRun;
    parts = larger(kThreads * kRun, padded);  // after sums of threads
    means = parts + larger(kThreads, p.by_places ? p.channels : own);
    others = means + own;  // sums of this block's channels, of each block's places
    second_bias = others + (p.by_places ? p.blocks * own : 0);
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
  return function(x);
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

// Adds up what is at every `apart`-th place from the first of a thread on, `places` in all, at most
// kAhead of them under way at once. What lies past the end is read at the last place, and not
// taken: a load that may be left out would wait for its own turn.
template <int kAhead, typename X>
__device__ inline void add_places(Channels<kRun>& sum, const X* image, int first, int apart,
                                  int places, int pitch) {
#pragma unroll 1
  for (int begin = first; begin < places; begin += kAhead * apart) {
    Neighbours<X, kRun> read[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t place = min(begin + i * apart, places - 1);
      read[i] = *reinterpret_cast<const Neighbours<X, kRun>*>(image + place * pitch);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (begin + i * apart >= places) break;
#pragma unroll
      for (int v = 0; v < kRun; ++v) sum.value[v] += widened(read[i].value[v]);
    }
  }
}

// Reads once more what add_places read: a thread's places, up to kAhead of them.
template <int kAhead, typename X, int kMost>
__device__ inline void keep_places(Neighbours<X, kRun> (&kept)[kMost], const X* image, int first,
                                   int apart, int places, int pitch) {
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const std::int64_t place = min(first + i * apart, places - 1);
    kept[i] = *reinterpret_cast<const Neighbours<X, kRun>*>(image + place * pitch);
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
      expect_bytes(barrier, p.blocks * padded * 4);
      init_barrier(summed);
      expect_bytes(summed, p.blocks * channels * 4);
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
  // Of places: a thread has a run of channels at some of them. Of their sums: a channel of some.
  const int read = p.by_places ? p.channels : channels, runs = read / kRun;
  const int rows = kThreads / runs, row = thread / runs, run = thread - row * runs;
  const int shares = max(1, kThreads / read);
  const int share = read < kThreads ? thread / read : 0, column = thread - share * read;
  const int some = (p.places + p.blocks - 1) / p.blocks;
  const int first_place = p.by_places ? rank * some : 0;
  const int places = p.by_places ? max(0, min(some, p.places - first_place)) : p.places;
  const int part = thread & ((1 << p.lane_bits) - 1);
  if (p.blocks > 1) wait_at_cluster_barrier();  // all blocks can be sent to

  // A loop, though it is gone through once: what is computed before it stays before the wait.
#pragma unroll 1
  for (int once = p.once; once > 0; --once) {
    wait_for_inputs();

    const X* const image =
        x + (static_cast<std::int64_t>(blockIdx.x) * p.places + first_place) * p.channels +
        (p.by_places ? 0 : first);
    if (!Scales && p.means != nullptr) {
      const float* const from = p.means + std::int64_t{blockIdx.x} * p.parts * p.channels + first;
      for (int c = thread; c < channels; c += kThreads) {
        float sum = 0.0f;
#pragma unroll 4
        for (int part = 0; part < p.parts; ++part) sum += from[part * p.channels + c];
        means[c] = sum;
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
      if (row < rows) {
        auto sum = Channels<kRun>::all(0.0f);
        constexpr int kMost = sizeof(X) == 4 ? 4 : 8;
        if (places <= 4 * rows) {
          add_places<4>(sum, image + run * kRun, row, rows, places, p.channels);
        } else {
          add_places<kMost>(sum, image + run * kRun, row, rows, places, p.channels);
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
        if (!p.by_places) {
          means[c] = sum * p.scale;
        } else {
          const int own = p.own_runs * kRun, block = c / own;
          const std::uint32_t to = shared_address(others + rank * own + c - block * own);
          send_cluster(cluster_address(to, block), cluster_address(summed, block), sum);
        }
      }
      if (p.by_places) {
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
      constexpr int kAlike = kWarpThreads / kRun;  // lanes that have the same sum
      const float total = add_lanes(sum);
      const int m = h + lane / kAlike;
      if (p.blocks == 1) {
        received[m] = total;
      } else {
        const std::uint32_t to = shared_address(received + rank * padded + m);
        for (int b = lane % kAlike; b < p.blocks; b += kAlike) {
          send_cluster(cluster_address(to, b), cluster_address(barrier, b), total);
        }
      }
    }
    // On its way while hidden sums are.
    [[maybe_unused]] Neighbours<X, kRun> kept[Scales ? kKept : 1];
    if constexpr (Scales) {
      if (row < rows && places <= kFewKept * rows) {
        keep_places<kFewKept>(kept, image + run * kRun, row, rows, places, p.channels);
      } else if (row < rows) {
        keep_places<kKept>(kept, image + run * kRun, row, rows, places, p.channels);
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
        X* const to = static_cast<X*>(p.y) + std::int64_t{blockIdx.x} * p.places * p.channels +
                      first + run * kRun;
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
          const std::int64_t place = row + i * rows;
          if (place >= places) break;
          Channels<kRun> scaled;
#pragma unroll
          for (int v = 0; v < kRun; ++v) {
            scaled.value[v] = widened(kept[i].value[v]) * factor.value[v];
          }
          scaled.store(to + place * p.channels, p.overflow);
        }
      }
    }
  }
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

std::int64_t squeeze_excite_packed(const AxisShape& shape, int hidden, Conv2dOperands operands,
                                   int) {
  check(shape, hidden);
  std::int64_t bytes = 0;
  with_row_type(operands, [&](auto* type) {
    bytes = 2 * shape.inner * hidden_runs_of(hidden) * kRun * static_cast<int>(sizeof(*type));
  });
  return bytes;
}

void squeeze_excite_pack(const float* first, const float* second, void* packed,
                         const AxisShape& shape, int hidden, Conv2dOperands operands,
                         Stream stream) {
  check(shape, hidden);
  with_row_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int channels = static_cast<int>(shape.inner), padded = hidden_runs_of(hidden) * kRun;
    squeeze_excite_pack_kernel<T><<<blocks_for(shape.inner * padded), kBlockThreads, 0, stream>>>(
        first, second, static_cast<T*>(packed), channels, hidden, padded);
    CUDA_CHECK_LAUNCH("squeeze_excite_pack_kernel");
  });
}

namespace {

bool is_by_places(const AxisShape& shape) {
  return waits_in_kernels() && shape.axis * shape.inner >= kManyNumbers;
}

// Runs of channels of a block. By the shape of one image alone: each has the same bits with any
// batch.
int own_runs_of(const AxisShape& shape, std::int64_t weight_bytes) {
  const int runs = runs_of(shape.inner);
  const std::int64_t worth = std::max((weight_bytes + kWeightBytes - 1) / kWeightBytes,
                                      (shape.axis * shape.inner + kNumbers - 1) / kNumbers);
  const std::int64_t most = waits_in_kernels() ? std::min(kMostBlocks, runs) : 1;
  const int wanted = static_cast<int>(std::clamp<std::int64_t>(worth, 1, most));
  return (runs + wanted - 1) / wanted;
}

std::int64_t weight_bytes(const AxisShape& shape, int hidden, int item) {
  return shape.inner * 2 * hidden_runs_of(hidden) * kRun * item;
}

// Whether threads can keep what they read of an image.
bool keeps(const AxisShape& shape, int hidden) {
  const int own_runs = own_runs_of(shape, weight_bytes(shape, hidden, 2));
  return !is_by_places(shape) && shape.axis <= kKept * (kThreads / own_runs);
}

template <bool Scales>
void run(const void* x, const void* packed, const float* first_bias, const float* second_bias,
         const float* means, void* y, int parts, const AxisShape& shape, int hidden,
         Stored x_stored, const Overflow& overflow, Conv2dOperands operands,
         const Activation& inner, const Activation& outer, Stream stream) {
  check(shape, hidden);
  check_stored("x", x_stored, operands);
  if (!is_aligned(x, 16) || !is_aligned(packed, 16) || (Scales && !is_aligned(y, 16))) {
    throw std::invalid_argument("squeeze_excite: expected addresses that are multiples of 16");
  }
  if (Scales && (bytes_of(x_stored) != 2 || !keeps(shape, hidden))) {
    throw std::invalid_argument(
        "squeeze_excite_scale: expected 16 bits, and images that threads can keep");
  }
  if (shape.outer == 0) return;
  Gates p = {};
  p.first_bias = first_bias;
  p.second_bias = second_bias;
  p.means = means;
  p.parts = parts;
  p.y = y;
  p.overflow = overflow;
  p.places = static_cast<int>(shape.axis);
  p.channels = static_cast<int>(shape.inner);
  p.hidden = hidden;
  p.runs = runs_of(shape.inner);
  p.hidden_runs = hidden_runs_of(hidden);
  p.once = 1;
  p.scale = 1.0f / static_cast<float>(p.places);
  p.inner = inner;
  p.outer = outer;
  with_row_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const std::int64_t all = weight_bytes(shape, hidden, sizeof(T));
    p.own_runs = own_runs_of(shape, all);
    p.by_places = is_by_places(shape) && means == nullptr;
    p.blocks = p.by_places ? kMostBlocks : (p.runs + p.own_runs - 1) / p.own_runs;
    p.lane_bits = 0;
    while (p.lane_bits < kMostLaneBits && (2 * p.own_runs * kRun << p.lane_bits) <= kThreads)
      ++p.lane_bits;
    const std::int64_t floats = Layout(p).end * 4, weights = all / p.runs * p.own_runs;
    const bool alone = shape.outer * p.blocks <= kFewBlocks;
    const std::int64_t room = waits_in_kernels() ? (alone ? kMostHeld : kHalfHeld) - floats : 0;
    p.holds_first = weights / 2 <= room;
    p.holds_second = weights <= room;
    const int bytes =
        static_cast<int>(floats + weights / 2 * (int{p.holds_first} + int{p.holds_second}));
    const auto launched = [&](auto* stored) {
      using X = std::remove_pointer_t<decltype(stored)>;
      const auto kernel = squeeze_excite_kernel<T, X, Scales>;
      CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
      launch("launch of squeeze_excite_kernel", kernel,
             dim3(static_cast<unsigned>(shape.outer), 1, p.blocks), kThreads, bytes, stream,
             p.blocks, static_cast<const X*>(x), static_cast<const T*>(packed), p);
    };
    if constexpr (!Scales) {
      if (x_stored == Stored::float32) return launched(static_cast<float*>(nullptr));
    }
    if constexpr (!Scales || sizeof(T) == 2) launched(type);
  });
}

}  // namespace

void squeeze_excite(const void* x, const void* packed, const float* first_bias,
                    const float* second_bias, const float* means, float* y, int parts,
                    const AxisShape& shape, int hidden, Stored x_stored, Conv2dOperands operands,
                    UnaryFunction inner, float inner_alpha, float inner_beta, UnaryFunction outer,
                    float outer_alpha, float outer_beta, Stream stream) {
  run<false>(x, packed, first_bias, second_bias, means, y, parts, shape, hidden, x_stored,
             Overflow{}, operands, {inner, inner_alpha, inner_beta},
             {outer, outer_alpha, outer_beta}, stream);
}

std::int64_t squeeze_excite_scales(const AxisShape& shape, int hidden, int device) {
  check(shape, hidden);
  int major = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major == 9 && shape.axis <= kFewPlaces && keeps(shape, hidden);
}

void squeeze_excite_scale(const void* x, const void* packed, const float* first_bias,
                          const float* second_bias, void* z, const AxisShape& shape, int hidden,
                          Stored stored, const Overflow& overflow, Conv2dOperands operands,
                          UnaryFunction inner, float inner_alpha, float inner_beta,
                          UnaryFunction outer, float outer_alpha, float outer_beta, Stream stream) {
  run<true>(x, packed, first_bias, second_bias, nullptr, z, 0, shape, hidden, stored, overflow,
            operands, {inner, inner_alpha, inner_beta}, {outer, outer_alpha, outer_beta}, stream);
}

}  // namespace cnn_engine::cuda
