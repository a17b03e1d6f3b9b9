// Hopper's products of matrices and tensor copies by PTX (compute capability 9.0a).
//
// Matrices lie in shared memory as rows of 128 bytes of K, in groups of eight rows (1,024 bytes, so
// aligned), whose pieces of 16 bytes are exchanged as the copy engine does it: piece i of row r is
// at i ^ (r % 8).
//
// A warpgroup, four warps, holds D [64 x N] together: with warp w of it, g = lane / 4 and
// t = lane % 4, d[4 j] and d[4 j + 1] are columns 8 j + 2 t and the next of row 16 w + g, and
// d[4 j + 2], d[4 j + 3] of row + 8.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/sm80/cluster.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/tf32.cuh"

namespace cnn_engine::cuda {

constexpr int kRowBytes = 128;         // of K in shared memory
constexpr int kMatrixRows = 64;        // of A and D
constexpr int kInstructionBytes = 32;  // of K that one instruction takes

// Where a piece of 16 bytes of a row lies among the row's eight.
__host__ __device__ constexpr int exchanged(int row, int piece) { return piece ^ (row & 7); }

// How wgmma is told of a matrix at `address` of the block's shared memory, whose groups of eight
// rows may be as far apart as is said.
template <int EightRows = 8 * kRowBytes>
__device__ inline std::uint64_t matrix_at(std::uint32_t address) {
  constexpr std::uint64_t kExchanged128 = 1, kEightRows = EightRows;
  return kExchanged128 << 62 | (kEightRows >> 4) << 32 | std::uint64_t{1} << 16 |
         ((address & 0x3ffff) >> 4);
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// d += a b^T for 32 bytes of K.
template <typename Operand, int N>
struct Wgmma;

// Four registers, of eight columns, at a time: their operands' numbers and the operands.
#define CNN_ENGINE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CNN_ENGINE_D16(i) \
  CNN_ENGINE_D4(i), CNN_ENGINE_D4(i + 4), CNN_ENGINE_D4(i + 8), CNN_ENGINE_D4(i + 12)
#define CNN_ENGINE_D64(i) \
  CNN_ENGINE_D16(i), CNN_ENGINE_D16(i + 16), CNN_ENGINE_D16(i + 32), CNN_ENGINE_D16(i + 48)
#define CNN_ENGINE_N8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CNN_ENGINE_N12 CNN_ENGINE_N8 ", %8, %9, %10, %11"
#define CNN_ENGINE_N16 CNN_ENGINE_N12 ", %12, %13, %14, %15"
#define CNN_ENGINE_N24 CNN_ENGINE_N16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CNN_ENGINE_N28 CNN_ENGINE_N24 ", %24, %25, %26, %27"
#define CNN_ENGINE_N32 CNN_ENGINE_N28 ", %28, %29, %30, %31"
#define CNN_ENGINE_N48                                                            \
  CNN_ENGINE_N32                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47"
#define CNN_ENGINE_N52                                                       \
  CNN_ENGINE_N32                                                             \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
  "%46, %47, %48, %49, %50, %51"
#define CNN_ENGINE_N56 CNN_ENGINE_N52 ", %52, %53, %54, %55"
#define CNN_ENGINE_N64 CNN_ENGINE_N56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CNN_ENGINE_N112                                                         \
  CNN_ENGINE_N64                                                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "    \
  "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, " \
  "%93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "     \
  "%106, %107, %108, %109, %110, %111"
#define CNN_ENGINE_N128                                                        \
  CNN_ENGINE_N112                                                              \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"

// `a` and `b` are the numbers of the operands behind d's.
#define CNN_ENGINE_WGMMA(Operand, n, types, more, numbers, a_number, b_number, ...)            \
  template <>                                                                                  \
  struct Wgmma<Operand, n> {                                                                   \
    static __device__ void multiply(float (&d)[n / 2], std::uint64_t a, std::uint64_t b) {     \
      asm volatile(                                                                            \
          "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #n types \
          " {" numbers "}, %" #a_number ", %" #b_number ", p, 1, 1" more ";\n}"                \
          : __VA_ARGS__                                                                        \
          : "l"(a), "l"(b)                                                                     \
          : "memory");                                                                         \
    }                                                                                          \
  };
#define CNN_ENGINE_WGMMAS(Operand, types, more)                                                  \
  CNN_ENGINE_WGMMA(Operand, 16, types, more, CNN_ENGINE_N8, 8, 9, CNN_ENGINE_D4(0),              \
                   CNN_ENGINE_D4(4))                                                             \
  CNN_ENGINE_WGMMA(Operand, 24, types, more, CNN_ENGINE_N12, 12, 13, CNN_ENGINE_D4(0),           \
                   CNN_ENGINE_D4(4), CNN_ENGINE_D4(8))                                           \
  CNN_ENGINE_WGMMA(Operand, 32, types, more, CNN_ENGINE_N16, 16, 17, CNN_ENGINE_D16(0))          \
  CNN_ENGINE_WGMMA(Operand, 56, types, more, CNN_ENGINE_N28, 28, 29, CNN_ENGINE_D16(0),          \
                   CNN_ENGINE_D4(16), CNN_ENGINE_D4(20), CNN_ENGINE_D4(24))                      \
  CNN_ENGINE_WGMMA(Operand, 64, types, more, CNN_ENGINE_N32, 32, 33, CNN_ENGINE_D16(0),          \
                   CNN_ENGINE_D16(16))                                                           \
  CNN_ENGINE_WGMMA(Operand, 104, types, more, CNN_ENGINE_N52, 52, 53, CNN_ENGINE_D16(0),         \
                   CNN_ENGINE_D16(16), CNN_ENGINE_D16(32), CNN_ENGINE_D4(48))                    \
  CNN_ENGINE_WGMMA(Operand, 112, types, more, CNN_ENGINE_N56, 56, 57, CNN_ENGINE_D16(0),         \
                   CNN_ENGINE_D16(16), CNN_ENGINE_D16(32), CNN_ENGINE_D4(48), CNN_ENGINE_D4(52)) \
  CNN_ENGINE_WGMMA(Operand, 128, types, more, CNN_ENGINE_N64, 64, 65, CNN_ENGINE_D64(0))         \
  CNN_ENGINE_WGMMA(Operand, 224, types, more, CNN_ENGINE_N112, 112, 113, CNN_ENGINE_D64(0),      \
                   CNN_ENGINE_D16(64), CNN_ENGINE_D16(80), CNN_ENGINE_D16(96))                   \
  CNN_ENGINE_WGMMA(Operand, 256, types, more, CNN_ENGINE_N128, 128, 129, CNN_ENGINE_D64(0),      \
                   CNN_ENGINE_D64(64))

CNN_ENGINE_WGMMAS(__half, "k16.f32.f16.f16", ", 0, 0")
CNN_ENGINE_WGMMAS(__nv_bfloat16, "k16.f32.bf16.bf16", ", 0, 0")
CNN_ENGINE_WGMMAS(Tf32, "k8.f32.tf32.tf32", "")
CNN_ENGINE_WGMMA(__half, 48, "k16.f32.f16.f16", ", 0, 0", CNN_ENGINE_N24, 24, 25, CNN_ENGINE_D16(0),
                 CNN_ENGINE_D4(16), CNN_ENGINE_D4(20))
CNN_ENGINE_WGMMA(__half, 96, "k16.f32.f16.f16", ", 0, 0", CNN_ENGINE_N48, 48, 49, CNN_ENGINE_D16(0),
                 CNN_ENGINE_D16(16), CNN_ENGINE_D16(32))

// d = a b^T for 32 bytes of K.
template <typename Operand, int N>
struct WgmmaAnew;

#define CNN_ENGINE_WGMMA_ANEW(Operand, n, types, numbers, a_number, b_number, ...)             \
  template <>                                                                                  \
  struct WgmmaAnew<Operand, n> {                                                               \
    static __device__ void multiply(float (&d)[n / 2], std::uint64_t a, std::uint64_t b) {     \
      asm volatile(                                                                            \
          "{\n.reg .pred p;\nsetp.ne.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #n types \
          " {" numbers "}, %" #a_number ", %" #b_number ", p, 1, 1, 0, 0;\n}"                  \
          : __VA_ARGS__                                                                        \
          : "l"(a), "l"(b)                                                                     \
          : "memory");                                                                         \
    }                                                                                          \
  };
CNN_ENGINE_WGMMA_ANEW(__half, 32, "k16.f32.f16.f16", CNN_ENGINE_N16, 16, 17, CNN_ENGINE_D16(0))
CNN_ENGINE_WGMMA_ANEW(__half, 48, "k16.f32.f16.f16", CNN_ENGINE_N24, 24, 25, CNN_ENGINE_D16(0),
                      CNN_ENGINE_D4(16), CNN_ENGINE_D4(20))
CNN_ENGINE_WGMMA_ANEW(__half, 64, "k16.f32.f16.f16", CNN_ENGINE_N32, 32, 33, CNN_ENGINE_D16(0),
                      CNN_ENGINE_D16(16))
CNN_ENGINE_WGMMA_ANEW(__half, 96, "k16.f32.f16.f16", CNN_ENGINE_N48, 48, 49, CNN_ENGINE_D16(0),
                      CNN_ENGINE_D16(16), CNN_ENGINE_D16(32))
CNN_ENGINE_WGMMA_ANEW(__half, 128, "k16.f32.f16.f16", CNN_ENGINE_N64, 64, 65, CNN_ENGINE_D64(0))
CNN_ENGINE_WGMMA_ANEW(__nv_bfloat16, 64, "k16.f32.bf16.bf16", CNN_ENGINE_N32, 32, 33,
                      CNN_ENGINE_D16(0), CNN_ENGINE_D16(16))

// d += a b^T, and d = a b^T, for 32 bytes of K, A [64, K] in registers: a[0] and a[1] are 4 bytes
// of rows g and g + 8 from byte 4 t on, a[2] and a[3] those 16 bytes further.
template <typename Operand, int N>
struct WgmmaHeld;
template <typename Operand, int N>
struct WgmmaHeldAnew;

#define CNN_ENGINE_N96                                                                           \
  CNN_ENGINE_N64                                                                                 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
// `adds`: how 0 compares with 0 where d is added to.
#define CNN_ENGINE_WGMMA_HELD(Name, adds, Operand, n, types, numbers, a0, a1, a2, a3, b_number,  \
                              ...)                                                               \
  template <>                                                                                    \
  struct Name<Operand, n> {                                                                      \
    static __device__ void multiply(float (&d)[n / 2], const std::uint32_t (&a)[4],              \
                                    std::uint64_t b) {                                           \
      asm volatile("{\n.reg .pred p;\nsetp." adds                                                \
                   ".u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #n types " {" numbers      \
                   "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_number ", p, 1, 1, 0;\n}" \
                   : __VA_ARGS__                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                          \
                   : "memory");                                                                  \
    }                                                                                            \
  };
#define CNN_ENGINE_WGMMA_HELD_96(Name, adds, Operand, types)                                \
  CNN_ENGINE_WGMMA_HELD(Name, adds, Operand, 96, types, CNN_ENGINE_N48, 48, 49, 50, 51, 52, \
                        CNN_ENGINE_D16(0), CNN_ENGINE_D16(16), CNN_ENGINE_D16(32))
#define CNN_ENGINE_WGMMAS_HELD(Operand, types)                                                     \
  CNN_ENGINE_WGMMA_HELD_96(WgmmaHeld, "eq", Operand, types)                                        \
  CNN_ENGINE_WGMMA_HELD(WgmmaHeld, "eq", Operand, 192, types, CNN_ENGINE_N96, 96, 97, 98, 99, 100, \
                        CNN_ENGINE_D64(0), CNN_ENGINE_D16(64), CNN_ENGINE_D16(80))
CNN_ENGINE_WGMMAS_HELD(__half, "k16.f32.f16.f16")
CNN_ENGINE_WGMMAS_HELD(__nv_bfloat16, "k16.f32.bf16.bf16")
CNN_ENGINE_WGMMA_HELD_96(WgmmaHeldAnew, "ne", __half, "k16.f32.f16.f16")

// Asks for the products of 128 bytes of K.
template <typename Operand, int N>
__device__ inline void multiply_rows(float (&d)[N / 2], std::uint64_t a, std::uint64_t b) {
  begin_products();
#pragma unroll
  for (int k = 0; k < kRowBytes / kInstructionBytes; ++k) {
    constexpr int kApart = kInstructionBytes >> 4;
    Wgmma<Operand, N>::multiply(d, a + k * kApart, b + k * kApart);
  }
}

// ---- barriers of shared memory that count arrivals and bytes, used phase after phase ----

__device__ inline void init_phases(std::uint32_t barrier, int arrivals) {
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
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// As wait_for_phase, for what other blocks of the cluster sent.
__device__ inline void wait_for_cluster_phase(std::uint32_t barrier, int parity) {
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

// Has the copy engine bring bytes of this block's shared memory, published, to a block's of the
// cluster, whose barrier counts them.
__device__ inline void send_bulk(std::uint32_t to, std::uint32_t from, int bytes,
                                 std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ inline float4 load_float4(std::uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
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

// A warpgroup's threads have so many registers from here on.
template <int Count>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// ---- tensor copies; their bytes, zeros among them, count at the barrier ----

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ inline void copy_tile(std::uint32_t to, const CUtensorMap* map, int column, int row,
                                 std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Places of a window's tap (down, right) over images [n, h, w, c], from that window on whose first
// tap is at (n, h, w).
__device__ inline void copy_taps(std::uint32_t to, const CUtensorMap* map, int c, int w, int h,
                                 int n, int right, int down, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(to),
      "l"(map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(barrier),
      "h"(static_cast<unsigned short>(right)), "h"(static_cast<unsigned short>(down))
      : "memory");
}

// A box of images [n, h, w, c] from that place on, which may be beyond the image.
__device__ inline void copy_box(std::uint32_t to, const CUtensorMap* map, int c, int w, int h,
                                int n, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(barrier)
      : "memory");
}

// ---- tensor copies from shared memory, which a thread waits for ----

__device__ inline void store_tile(const CUtensorMap* map, std::uint32_t from, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
// A box of images [n, h, w, c], those of its places that are in the image.
__device__ inline void store_box(const CUtensorMap* map, std::uint32_t from, int c, int w, int h,
                                 int n) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(map),
      "r"(c), "r"(w), "r"(h), "r"(n), "r"(from)
      : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Returns once all that this thread stores was read; was written.
__device__ inline void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// What was stored in shared memory is seen by copies and products that are asked for later.
__device__ inline void publish_to_engines() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace cnn_engine::cuda
