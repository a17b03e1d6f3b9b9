// linear_rows of one row and many weights: these come by bulk copies, through rings in shared
// memory, one per warp; of very many, what follows a ring's first pieces is in registers before the
// row is there. Blocks are persistent, one per multiprocessor, and warps take turns at the outputs;
// a lane adds up what it does in linear_rows_kernel, in the same order. Compute capability 9.0 on.
#pragma once

#include <algorithm>

#include "cuda/common/activation.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/sm80/channels.cuh"
#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/row_weights.cuh"
#include "ops/linear.h"

namespace cnn_engine::cuda {

constexpr int kStreamWarps = 8;
// How a block reads: pieces in its rings, which come first, and those behind them that a warp has
// in registers, of a first row that has so many.
struct Usual {
  static constexpr int kPiece = 4096, kPieces = 2, kHeld = 0, kBlocks = 2;
};
// Of 16 bits that no cache keeps, which take longest. Blocks begin where the convolution before
// leaves a multiprocessor free; where one of it runs they find no room, and would slow it.
struct Prefetch {
  static constexpr int kPiece = 3584, kPieces = 3, kHeld = 4, kBlocks = 1;
};
template <typename Way>
constexpr int kRing = Way::kPieces * Way::kPiece;  // bytes, of a warp
template <typename Way>
constexpr int kRings = kStreamWarps * kRing<Way>;
// Weights from which this is faster, and the most bytes of a row of x in shared memory.
constexpr std::int64_t kLeastStreamed = 4 << 20;
constexpr int kMostOfRow = 112 << 10;
// Weights from which the next pass finds none of them in the second-level cache: they leave what is
// there, such as the other layers' weights.
constexpr std::int64_t kLeastReadOnce = 64 << 20;

// The weights' pieces that a warp asks for, one after another.
template <int kPiece>
struct Pieces {
  const unsigned char* row;
  std::int64_t further;  // from an output of the warp to its next
  int bytes, at, left;   // of a row; in it; pieces to be asked for
  std::uint64_t policy;

  __device__ void ask(std::uint32_t to, std::uint32_t barrier) {
    const int size = min(kPiece, bytes - at);
    expect_tx(barrier, size);
    copy_bulk(to, row + at, size, barrier, policy);
    skip(size);
    --left;
  }
  __device__ void skip(int size) {
    at += size;
    if (at < bytes) return;
    at = 0;
    row += further;
  }
};

// Of kKnown clamps and any function are distinguished: to choose among functions is a jump by a
// table, which each multiprocessor waits for when the first sum of a launch has been made.
template <typename T, typename X, KnownActivation kKnown, typename Way>
__global__ void __launch_bounds__(kStreamWarps* kWarpThreads, Way::kBlocks)
    linear_rows_stream_kernel(const X* input,                  // [1, F]
                              const T* __restrict__ packed,    // [M, F]
                              const float* __restrict__ bias,  // [M] or null
                              void* output,                    // [1, M], as float32 or as T
                              const bool rounds, const Overflow overflow, const LinearShape p,
                              const Activation activation) {
  constexpr int kWidth = 16 / sizeof(T), kRun = kWarpThreads * 16;  // bytes of a warp's load
  constexpr int kPiece = Way::kPiece, kPieces = Way::kPieces, kHeldBytes = Way::kHeld * kPiece;
  // What comes first of the row of x, by the weights' bytes that it is multiplied by: warps begin,
  // and ask for more.
  constexpr int kFirstPart = kRing<Way>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) std::uint64_t come[kStreamWarps][kPieces], parts_come[2];
  let_successors_start();
  const int warp = same_in_warp(threadIdx.x / kWarpThreads), lane = threadIdx.x % kWarpThreads;
  const int bytes = p.in_features * static_cast<int>(sizeof(T)), turns = gridDim.x * kStreamWarps;
  const unsigned char* const ring = memory + warp * kRing<Way>;
  const X* const x = reinterpret_cast<const X*>(memory + kRings<Way>);
  // Neighbours are of different multiprocessors, so that these have equally many.
  int m = blockIdx.x + warp * gridDim.x;
  const int outputs = m < p.out_features ? (p.out_features - m + turns - 1) / turns : 0;
  Pieces<kPiece> pieces = {
      reinterpret_cast<const unsigned char*>(packed) + std::int64_t{m} * bytes,
      std::int64_t{turns} * bytes,
      bytes,
      0,
      outputs * ((bytes + kPiece - 1) / kPiece),
      std::int64_t{p.out_features} * bytes < kLeastReadOnce ? kUsualPolicy : kReadOncePolicy};
  bool holds = Way::kHeld > 0 && outputs > 0 && bytes >= kFirstPart + kHeldBytes;
  const unsigned char* const behind = pieces.row + kFirstPart;
  const std::uint32_t to = shared_address(ring), barriers = shared_address(come[warp]);
  const std::uint32_t first_come = shared_address(parts_come), rest_come = first_come + 8;
  if (lane == 0) {
    if (warp == 0) {
      init_barrier(first_come);
      init_barrier(rest_come);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) init_barrier(barriers + 8 * i);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (pieces.left > 0) pieces.ask(to + i * kPiece, barriers + 8 * i);
    }
  }
  Weights<T, kWidth> held[Way::kHeld > 0 ? kHeldBytes / kRun : 1];
  if (holds) {
#pragma unroll
    for (int i = 0; i < kHeldBytes / kRun; ++i) {
      held[i].load_at_once(behind + i * kRun + lane * 16, pieces.policy);
    }
    pieces.skip(kHeldBytes);
    pieces.left -= Way::kHeld;
  }
  float added = bias != nullptr && outputs > 0 ? bias[m] : 0.0f;
  // Read now: what a launch is given is far away at first.
  float low = activation.alpha, high = activation.beta;
  asm volatile("" : "+f"(low), "+f"(high), "+l"(output));
  // Barriers are made. Without this what is held would be asked for behind the wait.
  __syncthreads();
  wait_for_inputs();
  if (threadIdx.x == 0 && outputs > 0) {
    const int first = min(bytes, kFirstPart) / static_cast<int>(sizeof(T));
    const auto copy = [&](int begin, int end, std::uint32_t barrier) {
      const std::uint32_t size = (end - begin) * sizeof(X);
      expect_tx(barrier, size);
      copy_bulk(shared_address(x + begin), input + begin, size, barrier);
    };
    copy(0, first, first_come);
    if (first < p.in_features) copy(first, p.in_features, rest_come);
  }
  if (outputs == 0) return;
  wait_mbarrier(first_come, 0);

  int stage = 0, parity = 0;
  for (; m < p.out_features; m += turns) {
    float sum = 0.0f;
    const auto add = [&](const Weights<T, kWidth>& weights, int at) {
      float w[kWidth];
      weights.unpack(w);
      const auto run = Channels<kWidth>::load(x + at / static_cast<int>(sizeof(T)));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum = fmaf(run.value[i], w[i], sum);
    };
    for (int begin = 0; begin < bytes; begin += kPiece) {
      if (begin == kFirstPart) {
        wait_mbarrier(rest_come, 0);
        if (holds) {
#pragma unroll
          for (auto& weights : held) weights.pin();
#pragma unroll
          for (int i = 0; i < kHeldBytes / kRun; ++i) add(held[i], begin + i * kRun + lane * 16);
          begin += kHeldBytes;
          holds = false;
          if (begin >= bytes) break;
        }
      }
      wait_mbarrier(barriers + 8 * stage, parity);
      const unsigned char* const piece = ring + stage * kPiece;
      const auto add_piece = [&](int at) {
        Weights<T, kWidth> weights;
        weights.value = *reinterpret_cast<const decltype(weights.value)*>(piece + at);
        add(weights, begin + at);
      };
      if (begin + kPiece <= bytes) {
#pragma unroll
        for (int at = 0; at < kPiece; at += kRun) add_piece(at + lane * 16);
      } else {
        for (int at = lane * 16; begin + at < bytes; at += kRun) add_piece(at);
      }
      __syncwarp();
      if (lane == 0 && pieces.left > 0) pieces.ask(to + stage * kPiece, barriers + 8 * stage);
      __syncwarp();
      if (++stage == kPieces) {
        stage = 0;
        parity ^= 1;
      }
    }
    const float total = warp_sum(sum);
    if (lane != 0) continue;
    const float found = total + added;
    const Channels<1> y{
        {kKnown == KnownActivation::clamps ? clamp(found, low, high) : apply(activation, found)}};
    if (rounds) {
      y.store(static_cast<T*>(output) + m, overflow);
    } else {
      y.store(static_cast<float*>(output) + m);
    }
    if (bias != nullptr && m + turns < p.out_features) added = bias[m + turns];
  }
}

// Whether no cache keeps the weights.
template <typename T>
bool are_read_once(const LinearShape& p) {
  return p.weight_size() * static_cast<std::int64_t>(sizeof(T)) >= kLeastReadOnce;
}

// The shared memory that a block asks for: so much that two of a launch find no room on one
// multiprocessor, where those that are free first would have two and others none; but a block of
// a layer that is read once and one of the next, smaller one do.
template <typename T, typename X, typename Way>
int streamed_bytes(const LinearShape& p) {
  const int least = are_read_once<T>(p) ? 116 << 10 : 92 << 10;
  return std::max(std::min(least, target_here().shared_per_block),
                  kRings<Way> + p.in_features * static_cast<int>(sizeof(X)));
}

// Whether the kernel above runs this, of rows that are read 16 bytes at a time.
template <typename T, typename X, typename Way = Usual>
bool streams(const LinearShape& p) {
  const std::int64_t row = std::int64_t{p.in_features} * sizeof(X);
  return p.n == 1 && p.weight_size() * static_cast<std::int64_t>(sizeof(T)) >= kLeastStreamed &&
         row <= kMostOfRow && waits_in_kernels() &&
         kRings<Way> + row <= target_here().shared_per_block;
}

}  // namespace cnn_engine::cuda
