// The clock of an instrumented kernel: how many ticks of its multiprocessor's clock each part of a
// network takes. A kernel that is not instrumented has none of this: an empty class.
//
// A part ends where a team's first thread (of its first block, in a cluster) has passed the barrier
// after it, and begins where the one before it ended; the first begins with the block, so that the
// parts cover its whole life. The fully connected sums are taken inside the last convolution's
// tasks: every warp times its own, and their mean, times the tasks that a warp has one after
// another, is moved from the convolution's part to theirs.
#pragma once

#include "cuda/fused/geometry.cuh"

namespace cnn_engine::cuda::fused {

// Parts of a kernel: a convolution with what is fused into it, each; then the fully connected
// layer, and softmax.
template <class Net>
constexpr int kKernelParts = Net::kLayers + (Net::kClasses > 0 ? 2 : 0);

// Shared memory for the ticks so far, after all else: a row of parts a team, then one number a
// warp.
template <class Net, class R>
constexpr int kTickBytes = round_up(8 * R::kGroups * (kKernelParts<Net> + R::kWarps), 128);

// Shared memory of a block of the instrumented kernel.
template <class Net, int Parts, int InputParts, class R>
constexpr int kTimedBytes = SharedLayout<Net, Parts, InputParts, R>::kBytes + kTickBytes<Net, R>;

template <bool On, class Net, int Parts, class R>
struct PartClock {
  __device__ void start() {}
  __device__ void end(int) const {}
  __device__ std::uint32_t now() const { return 0; }
  __device__ void epilogue_head(std::uint32_t) const {}
  __device__ void add_to() const {}
};

template <class Net, int Parts, class R>
struct PartClock<true, Net, Parts, R> {
  static constexpr int kParts = kKernelParts<Net>;

  unsigned long long* total;  // of all blocks, in device memory [parts]
  unsigned long long* team;   // this team's so far, in shared memory [parts]
  unsigned long long* warp;   // this warp's in the head so far, in shared memory
  bool leads, lane0;          // the team's first thread; the warp's first lane
  mutable std::uint32_t last = 0;

  // Differences are right for parts of up to 2^32 ticks, some two seconds.
  __device__ std::uint32_t now() const {
    std::uint32_t ticks;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(ticks)::"memory");
    return ticks;
  }
  __device__ void start() {
    last = now();
    if (lane0) *warp = 0;
    for (int part = 0; leads && part < kParts; ++part) team[part] = 0;
  }
  __device__ void end(int part) const {
    if (!leads) return;
    const std::uint32_t ticks = now();
    team[part] += ticks - last;
    last = ticks;
  }
  __device__ void epilogue_head(std::uint32_t begin) const {
    if (lane0) *warp += now() - begin;
  }
  // Once, at the end.
  __device__ void add_to() const {
    if (leads) {
      for (int part = 0; part < kParts; ++part) atomicAdd(total + part, team[part]);
    }
    if constexpr (Net::kClasses > 0) {
      constexpr int kTasks = R::template head_tasks<typename Net::Last, Parts>();
      constexpr int kInTurn = (kTasks + R::kWorkers - 1) / R::kWorkers;
      if (lane0) {
        const unsigned long long head = *warp * kInTurn / kTasks;
        atomicAdd(total + Net::kLayers, head);
        atomicAdd(total + Net::kLayers - 1, 0 - head);
      }
    }
  }
};

}  // namespace cnn_engine::cuda::fused
