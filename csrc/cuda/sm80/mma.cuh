// Tensor-core arithmetic by PTX: 16x8 tiles of float32 sums of products of 16-bit values.
//
// A warp holds a tile together. With g = lane / 4 and t = lane % 4, as PTX defines it:
//   A [16 x 16]  a[0]: row g, columns 2t, 2t+1;  a[1]: row g+8;  a[2], a[3]: the same, columns + 8
//   B [16 x 8]   b[0]: rows 2t, 2t+1 of column g;  b[1]: rows + 8
//   D [16 x 8]   d[0], d[1]: row g, columns 2t, 2t+1;  d[2], d[3]: row g+8
// The k8 forms take the first half of K: a[0], a[1] and b[0].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace cnn_engine::cuda {

struct Half {
  __device__ static std::uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  __device__ static float2 unpack(std::uint32_t bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
  __device__ static void mma16(float (&d)[4], const std::uint32_t* a, const std::uint32_t* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  __device__ static void mma8(float (&d)[4], const std::uint32_t* a, const std::uint32_t* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  }
  // Host: the nearest value of the format, and its bits.
  static float round(float value) { return __half2float(__float2half_rn(value)); }
  static std::uint16_t bits(float value) { return __half_as_ushort(__float2half_rn(value)); }
};

struct Bfloat16 {
  __device__ static std::uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  __device__ static float2 unpack(std::uint32_t bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
  __device__ static void mma16(float (&d)[4], const std::uint32_t* a, const std::uint32_t* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  __device__ static void mma8(float (&d)[4], const std::uint32_t* a, const std::uint32_t* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  }
  static float round(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }
  static std::uint16_t bits(float value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
};

// Four 8x8 tiles of 16-bit values from shared memory: lane l gives the address of row l % 8 of tile
// l / 8 (16 bytes), and receives in a[i] columns 2t, 2t+1 of row g of tile i.
__device__ inline void load_tiles(std::uint32_t (&a)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

template <int Bytes>
__device__ inline void copy_async(void* to_shared, const void* from_global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to_shared)),
               "l"(from_global), "n"(Bytes)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `Pending` of this thread's committed groups are under way.
template <int Pending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Has a number come to the first-level cache, which no one waits for.
__device__ inline void touch(const float* at) {
  [[maybe_unused]] float unused;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(unused) : "l"(at));
}

// A barrier of `Threads` threads (whole warps) of the block; id 0 is __syncthreads' own.
template <int Threads>
__device__ inline void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

// ---- clusters of blocks, compute capability 9.0 on ----
__device__ inline std::uint32_t cluster_rank() {
  std::uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// The halves of a barrier of all threads of the cluster: what they stored in each other's shared
// memory before they arrive is seen by those that have waited.
__device__ inline void arrive_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Without what these threads have stored: barriers are published by themselves.
__device__ inline void arrive_at_cluster_barrier_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void wait_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ inline void cluster_barrier() {
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();
}

// The address, in the shared memory of the cluster's block `rank`, of what is at `address` in this
// one's.
__device__ inline std::uint32_t cluster_address(std::uint32_t address, std::uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}

__device__ inline void store_cluster(std::uint32_t address, std::uint32_t value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#endif
}

__device__ inline void store_cluster(std::uint32_t address, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x), "f"(y)
               : "memory");
#endif
}

__device__ inline void store_cluster(std::uint32_t address, const float (&value)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(value[0]),
               "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
#endif
}

// ---- bulk copies from global to shared memory, announced by an mbarrier; likewise from 9.0 on
// ----
__device__ inline void init_barrier(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;" ::"r"(barrier)
      : "memory");
#endif
}

// The barrier's only phase ends when `bytes` have come.
__device__ inline void expect_tx(std::uint32_t barrier, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// `bytes`, a multiple of 16, from and to 16-byte aligned addresses.
__device__ inline void copy_bulk(std::uint32_t to_shared, const void* from_global,
                                 std::uint32_t bytes, std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to_shared),
      "l"(from_global), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// How the second-level cache keeps what is copied, in the encoding of createpolicy: as all else, or
// not if it can be helped.
constexpr std::uint64_t kUsualPolicy = 0x1000000000000000, kReadOncePolicy = 0x12F0000000000000;

__device__ inline void copy_bulk(std::uint32_t to_shared, const void* from_global,
                                 std::uint32_t bytes, std::uint32_t barrier, std::uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to_shared),
      "l"(from_global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
#endif
}

__device__ inline void wait_first_phase(std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier)
      : "memory");
#endif
}

// Returns once the phase of that parity (0 for the first, then 1, 0, ...) has ended.
__device__ inline void wait_mbarrier(std::uint32_t barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

}  // namespace cnn_engine::cuda
