// Hopper's matrix multiplication of warpgroups by PTX (compute capability 9.0a): the atoms, and the
// descriptors of their operands.
//
// Matrices lie in shared memory as rows of 128 bytes of K, in groups of eight rows (1,024 bytes, so
// aligned), in TMA's swizzle of 128 bytes: piece i of 16 bytes of row r is at i ^ (r % 8).
//
// A warpgroup, four warps, holds D [64 x N] together: with warp w of it, g = lane / 4 and
// t = lane % 4, d[4 j] and d[4 j + 1] are columns 8 j + 2 t and the next of row 16 w + g, and
// d[4 j + 2], d[4 j + 3] of row + 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/sm80/cluster.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/tf32.cuh"
#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/tma.cuh"

namespace cnn_engine::cuda {

constexpr int kRowBytes = 128;         // of K in shared memory
constexpr int kMatrixRows = 64;        // of A and D
constexpr int kInstructionBytes = 32;  // of K that one instruction takes

// Where a piece of 16 bytes of a row lies among the row's eight.
__host__ __device__ constexpr int swizzled(int row, int piece) { return piece ^ (row & 7); }

// The shared-memory descriptor of a matrix at `address` of the block, with EightRows bytes from one
// group of eight rows to the next.
template <int EightRows = 8 * kRowBytes>
__device__ inline std::uint64_t matrix_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle128 = 1, kEightRows = EightRows;
  return kSwizzle128 << 62 | (kEightRows >> 4) << 32 | std::uint64_t{1} << 16 |
         ((address & 0x3ffff) >> 4);
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ inline void wgmma_wait() {
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
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kRowBytes / kInstructionBytes; ++k) {
    constexpr int kApart = kInstructionBytes >> 4;
    Wgmma<Operand, N>::multiply(d, a + k * kApart, b + k * kApart);
  }
}

__device__ inline float4 load_float4(std::uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// setmaxnreg: a warpgroup's threads have so many registers from here on.
template <int Count>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace cnn_engine::cuda
