// A ring of stages in shared memory between warps that fill it and warps that empty it: mbarriers
// by PTX, and where a warp is in the ring.
//
// A stage has a barrier that says it is full, and one that says it is empty. Both count arrivals,
// and the bytes of TMA loads, phase after phase; who waits names the parity of a phase. The
// barriers of one phase are in cuda/sm80/mma.cuh.
#pragma once

#include <cstdint>

#include "cuda/sm80/mma.cuh"

namespace cnn_engine::cuda {

__device__ inline void init_mbarrier(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A build that is for racecheck alone (docs/how-to/add_kernel.md).
#ifdef CNN_ENGINE_FOR_RACECHECK
constexpr bool kForRacecheck = true;
#else
constexpr bool kForRacecheck = false;
#endif

// Arrives for the lanes of a warp, once all of them are there: what they have stored and read comes
// before. racecheck does not see that of lanes that do not arrive themselves, so in its build all
// do: products of float32 take 2 to 4 % longer so.
constexpr int kWarpArrivals = kForRacecheck ? 32 : 1;
__device__ inline void arrive_for_warp(std::uint32_t barrier) {
  __syncwarp();
  if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) arrive(barrier);
}

// The block's barriers, made by this thread, can be used by copies and by the cluster.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// As wait_mbarrier, for what other blocks of the cluster sent.
__device__ inline void wait_mbarrier_cluster(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// True in one thread of the warp.
__device__ inline bool leads_warp() {
  std::uint32_t leads;
  asm volatile(
      "{\n"
      ".reg .pred leads;\n"
      "elect.sync _|leads, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, leads;\n"
      "}"
      : "=r"(leads));
  return leads != 0;
}

// A stage of a ring and the parity of its phase.
struct RingStage {
  int at = 0, parity;
  __device__ void next(int count) {
    if (++at == count) {
      at = 0;
      parity ^= 1;
    }
  }
};

}  // namespace cnn_engine::cuda
