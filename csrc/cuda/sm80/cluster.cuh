// Numbers that blocks of a cluster send each other, announced by an mbarrier of the block that they
// are for (mma.cuh); compute capability 9.0 on.
#pragma once

#include <cstdint>

namespace cnn_engine::cuda {

// Sends a number to a block of the cluster, whose barrier counts the bytes.
__device__ inline void store_cluster_async(std::uint32_t to, std::uint32_t barrier, float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
      "f"(value), "r"(barrier)
      : "memory");
#endif
}

// Sends two, to an address that is a multiple of 8.
__device__ inline void store_cluster_async(std::uint32_t to, std::uint32_t barrier, float a,
                                           float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::
          "r"(to),
      "f"(a), "f"(b), "r"(barrier)
      : "memory");
#endif
}

// Sends four, to an address that is a multiple of 16.
__device__ inline void store_cluster_async(std::uint32_t to, std::uint32_t barrier, float a,
                                           float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, "
      "[%5];" ::"r"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
      : "memory");
#endif
}

// Arrives at a barrier of a block of the cluster: what this thread read and wrote comes before.
__device__ inline void arrive_cluster(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
#endif
}

// Returns once all bytes that the barrier's only phase expects of the cluster have come.
__device__ inline void wait_for_cluster_bytes(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier)
      : "memory");
#endif
}

}  // namespace cnn_engine::cuda
