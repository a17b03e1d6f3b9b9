// linear_rows of one row and many weights: these come by bulk copies, through rings in shared
// memory, one a warp. Blocks stay, one a multiprocessor, and warps take turns at the outputs; a
// lane adds up what it does in linear_rows_kernel, in the same order. Compute capability 9.0 on.
#pragma once

#include <algorithm>

#include "cuda/activation.cuh"
#include "cuda/channels.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/reduce.cuh"
#include "cuda/row_weights.cuh"
#include "ops/linear.h"

namespace cnn_engine::cuda {

constexpr int kStreamWarps = 8;
// Bytes of a piece, and pieces on their way a warp: 64 KB of a multiprocessor keep memory busy, and
// leave room for the next launch's blocks.
constexpr int kPiece = 4096, kPieces = 2;
constexpr int kRings = kStreamWarps * kPieces * kPiece;
// Weights from which this is faster, and the most bytes of a row of x in shared memory.
constexpr std::int64_t kLeastStreamed = 4 << 20;
constexpr int kMostOfRow = 112 << 10;
// Weights from which the next pass finds none of them in the second-level cache: they leave what is
// there, such as the other layers' weights.
constexpr std::int64_t kLeastReadOnce = 64 << 20;

// The weights' pieces that a warp asks for, one after another.
struct Pieces {
  const unsigned char* row;
  std::int64_t further;  // from an output of the warp to its next
  int bytes, at, left;   // of a row; in it; pieces to be asked for
  std::uint64_t policy;

  __device__ void ask(std::uint32_t to, std::uint32_t barrier) {
    const int size = min(kPiece, bytes - at);
    expect_bytes(barrier, size);
    copy_bulk(to, row + at, size, barrier, policy);
    at += size;
    --left;
    if (at < bytes) return;
    at = 0;
    row += further;
  }
};

template <typename T, typename X>
__global__ void __launch_bounds__(kStreamWarps* kWarpThreads)
    linear_rows_stream_kernel(const X* input,                  // [1, F]
                              const T* __restrict__ packed,    // [M, F]
                              const float* __restrict__ bias,  // [M] or null
                              void* output,                    // [1, M], as float32 or as T
                              const bool rounds, const Overflow overflow, const LinearShape p,
                              const Activation activation) {
  constexpr int kWidth = 16 / sizeof(T), kRun = kWarpThreads * 16;  // bytes of a warp's load
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) std::uint64_t come[kStreamWarps][kPieces], row_come;
  let_successors_start();
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  const int bytes = p.in_features * static_cast<int>(sizeof(T)), turns = gridDim.x * kStreamWarps;
  const unsigned char* const ring = memory + warp * kPieces * kPiece;
  const X* const x = reinterpret_cast<const X*>(memory + kRings);
  // Neighbours are of different multiprocessors, so that these have equally many.
  int m = blockIdx.x + warp * gridDim.x;
  const int outputs = m < p.out_features ? (p.out_features - m + turns - 1) / turns : 0;
  Pieces pieces = {
      reinterpret_cast<const unsigned char*>(packed) + std::int64_t{m} * bytes,
      std::int64_t{turns} * bytes,
      bytes,
      0,
      outputs * ((bytes + kPiece - 1) / kPiece),
      std::int64_t{p.out_features} * bytes < kLeastReadOnce ? kUsualPolicy : kReadOncePolicy};
  const std::uint32_t to = shared_address(ring), barriers = shared_address(come[warp]);
  if (lane == 0) {
    if (warp == 0) init_barrier(shared_address(&row_come));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) init_barrier(barriers + 8 * i);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (pieces.left > 0) pieces.ask(to + i * kPiece, barriers + 8 * i);
    }
  }
  float added = bias != nullptr && outputs > 0 ? bias[m] : 0.0f;
  wait_for_inputs();
  if (threadIdx.x == 0) {
    const std::uint32_t size = p.in_features * sizeof(X);
    expect_bytes(shared_address(&row_come), size);
    copy_bulk(shared_address(x), input, size, shared_address(&row_come));
  }
  __syncthreads();
  wait_for_phase(shared_address(&row_come), 0);

  int stage = 0, parity = 0;
  for (; m < p.out_features; m += turns) {
    float sum = 0.0f;
    for (int begin = 0; begin < bytes; begin += kPiece) {
      wait_for_phase(barriers + 8 * stage, parity);
      const unsigned char* const piece = ring + stage * kPiece;
      const auto add = [&](int at) {
        Weights<T, kWidth> weights;
        weights.value = *reinterpret_cast<const decltype(weights.value)*>(piece + at);
        float w[kWidth];
        weights.unpack(w);
        const auto run = Channels<kWidth>::load(x + (begin + at) / sizeof(T));
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum = fmaf(run.value[i], w[i], sum);
      };
      if (begin + kPiece <= bytes) {
#pragma unroll
        for (int at = 0; at < kPiece; at += kRun) add(at + lane * 16);
      } else {
        for (int at = lane * 16; begin + at < bytes; at += kRun) add(at);
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
    const Channels<1> y{{activation(total + added)}};
    if (rounds) {
      y.store(static_cast<T*>(output) + m, overflow);
    } else {
      y.store(static_cast<float*>(output) + m);
    }
    if (bias != nullptr && m + turns < p.out_features) added = bias[m + turns];
  }
}

// Whether the kernel above runs this, of rows that are read 16 bytes at a time.
template <typename T, typename X>
bool streams(const LinearShape& p) {
  return p.n == 1 && p.weight_size() * static_cast<std::int64_t>(sizeof(T)) >= kLeastStreamed &&
         p.in_features * static_cast<std::int64_t>(sizeof(X)) <= kMostOfRow && waits_in_kernels();
}

}  // namespace cnn_engine::cuda
