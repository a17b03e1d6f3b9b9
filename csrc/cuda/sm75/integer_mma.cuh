// Tensor-core arithmetic of 8-bit integers: 16x8 tiles of int32 sums of 32 products, by the one
// instruction of compute capability 8.0, or four of Turing's.
//
// With g = lane / 4 and t = lane % 4, as PTX defines m16n8k32:
//   A [16 x 32]  a[0]: row g, columns 4t to 4t+3;  a[1]: row g+8;  a[2], a[3]: the same, columns +
//   16 B [32 x 8]   b.x: rows 4t to 4t+3 of column g;  b.y: rows + 16 D [16 x 8]   d[0], d[1]: row
//   g, columns 2t, 2t+1;  d[2], d[3]: row g+8
// Turing's m8n8k16 takes one register of A and of B, laid out alike.
#pragma once

#include "cuda/sm80/mma.cuh"

namespace cnn_engine::cuda {

#if __CUDA_ARCH__ < 800
template <bool Signed>
__device__ inline void multiply_8x8(int& d0, int& d1, std::uint32_t a, std::uint32_t b) {
  if constexpr (Signed) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+r"(d0), "+r"(d1)
        : "r"(a), "r"(b));
  } else {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+r"(d0), "+r"(d1)
        : "r"(a), "r"(b));
  }
}
#endif

// d += a * b modulo 2^32; numbers of a are signed or not, those of b are.
template <bool Signed>
__device__ inline void multiply_bytes(int (&d)[4], const std::uint32_t (&a)[4], const uint2& b) {
#if __CUDA_ARCH__ < 800
  multiply_8x8<Signed>(d[0], d[1], a[0], b.x);
  multiply_8x8<Signed>(d[2], d[3], a[1], b.x);
  multiply_8x8<Signed>(d[0], d[1], a[2], b.y);
  multiply_8x8<Signed>(d[2], d[3], a[3], b.y);
#else
  if constexpr (Signed) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  }
#endif
}

}  // namespace cnn_engine::cuda
