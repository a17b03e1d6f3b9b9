// Hopper's matrix multiplication of warpgroups of 8-bit integers: as wgmma.cuh's, into int32 modulo
// 2^32. Rows of K may have 64 bytes, in TMA's swizzle of 64 bytes: piece i of 16 bytes of row r is
// at i ^ (r / 2 % 4).
#pragma once

#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda {

// d += a b^T for 32 bytes of K; numbers of a are signed or not, those of b are.
template <bool Signed, int N>
struct WgmmaInt8;

#define CNN_ENGINE_S4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define CNN_ENGINE_S16(i) \
  CNN_ENGINE_S4(i), CNN_ENGINE_S4(i + 4), CNN_ENGINE_S4(i + 8), CNN_ENGINE_S4(i + 12)
#define CNN_ENGINE_S64(i) \
  CNN_ENGINE_S16(i), CNN_ENGINE_S16(i + 16), CNN_ENGINE_S16(i + 32), CNN_ENGINE_S16(i + 48)
#define CNN_ENGINE_WGMMA_INT8(is_signed, type, n, numbers, a_number, b_number, ...)               \
  template <>                                                                                     \
  struct WgmmaInt8<is_signed, n> {                                                                \
    static __device__ void multiply(int (&d)[n / 2], std::uint64_t a, std::uint64_t b) {          \
      asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
                   "k32.s32." type ".s8 {" numbers "}, %" #a_number ", %" #b_number ", p;\n}"     \
                   : __VA_ARGS__                                                                  \
                   : "l"(a), "l"(b)                                                               \
                   : "memory");                                                                   \
    }                                                                                             \
  };
#define CNN_ENGINE_WGMMAS_INT8(is_signed, type)                                             \
  CNN_ENGINE_WGMMA_INT8(is_signed, type, 64, CNN_ENGINE_N32, 32, 33, CNN_ENGINE_S16(0),     \
                        CNN_ENGINE_S16(16))                                                 \
  CNN_ENGINE_WGMMA_INT8(is_signed, type, 128, CNN_ENGINE_N64, 64, 65, CNN_ENGINE_S64(0))    \
  CNN_ENGINE_WGMMA_INT8(is_signed, type, 256, CNN_ENGINE_N128, 128, 129, CNN_ENGINE_S64(0), \
                        CNN_ENGINE_S64(64))
CNN_ENGINE_WGMMAS_INT8(true, "s8")
CNN_ENGINE_WGMMAS_INT8(false, "u8")

// The descriptor of a matrix whose rows have so many bytes: 64 or 128.
template <int RowBytes>
__device__ inline std::uint64_t byte_matrix_descriptor(std::uint32_t address) {
  static_assert(RowBytes == 64 || RowBytes == 128);
  constexpr std::uint64_t kSwizzle = RowBytes == 128 ? 1 : 2, kEightRows = 8 * RowBytes;
  return kSwizzle << 62 | (kEightRows >> 4) << 32 | std::uint64_t{1} << 16 |
         ((address & 0x3ffff) >> 4);
}

// Asks for the products of a row's bytes of K.
template <bool Signed, int RowBytes, int N>
__device__ inline void multiply_byte_rows(int (&d)[N / 2], std::uint64_t a, std::uint64_t b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < RowBytes / kInstructionBytes; ++k) {
    constexpr int kApart = kInstructionBytes >> 4;
    WgmmaInt8<Signed, N>::multiply(d, a + k * kApart, b + k * kApart);
  }
}

}  // namespace cnn_engine::cuda
