// Products of float32 by wgmma: x w = X W + X w' + x' W, where X is the 11 bits that tensor cores
// read of x, W the nearest number of 11 bits to w, x' and w' what these lack, of 11 bits too. What
// is left out, x' w' and the last bits, is below 2^-20 of the product.
//
// Weights come from registers: what a thread has of a step's 64 filters lies together, and is
// parted once for all places. Of places, shared memory has x, whose low bits are not read, and x'
// beside it.
//
// Tensor cores cut off what does not fit a sum's bits, always towards zero, which through many
// layers is an error of its own. So a step's products are summed by themselves, the small ones
// first, and added by additions that round: a convolution is 2^-24 of itself too small (on an
// H200).
#pragma once

#include "cuda/wgmma.cuh"

namespace cnn_engine::cuda::wgmma {

// d = a b^T, or d += a b^T, for 8 floats of K; a[0] to a[3]: row g of the warp's 16 and column t,
// row g + 8, then the same with column t + 4.
template <int N>
struct WgmmaOfRegisters;

#define CNN_ENGINE_WGMMA_OF_REGISTERS(n, numbers, a0, a1, a2, a3, b_number, add_number, ...)   \
  template <>                                                                                  \
  struct WgmmaOfRegisters<n> {                                                                 \
    template <bool Add>                                                                        \
    static __device__ void multiply(float (&d)[n / 2], const float (&a)[4], std::uint64_t b) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %" #add_number                            \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" numbers   \
                   "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_number ", p, 1, 1;\n}"  \
                   : __VA_ARGS__                                                               \
                   : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])),                   \
                     "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])), "l"(b), "n"(Add)  \
                   : "memory");                                                                \
    }                                                                                          \
  };
CNN_ENGINE_WGMMA_OF_REGISTERS(32, CNN_ENGINE_N16, 16, 17, 18, 19, 20, 21, CNN_ENGINE_D16(0))
CNN_ENGINE_WGMMA_OF_REGISTERS(64, CNN_ENGINE_N32, 32, 33, 34, 35, 36, 37, CNN_ENGINE_D16(0),
                              CNN_ENGINE_D16(16))
CNN_ENGINE_WGMMA_OF_REGISTERS(128, CNN_ENGINE_N64, 64, 65, 66, 67, 68, 69, CNN_ENGINE_D64(0))
#undef CNN_ENGINE_WGMMA_OF_REGISTERS

// What x has beyond the bits that tensor cores read, 13 bits, of which 11 are kept: rounded away
// from zero, which on average makes up for most of what sums lose. 1 + 2^-12 lifts whatever lies
// between two numbers of 11 bits to at least their middle, and leaves those numbers what they are.
__device__ inline float beyond_tf32(float x) {
  return to_tf32((x - read_as_tf32(x)) * (1.0f + 0x1p-12f));
}

// Of 64 filters and 32 channels, those of float `i` of four: piece k 128 + thread, of instruction
// k.
__device__ inline int row_of_split(int piece, int i) {
  return piece % 128 / 32 * 16 + piece % 32 / 4 + i % 2 * 8;
}
__device__ inline int channel_of_split(int piece, int i) {
  return piece / 128 * 8 + piece % 4 + i / 2 * 4;
}

// A warpgroup's part of a step: four instructions' worth of filters, each in two parts.
struct SplitWeights {
  float large[4][4], small[4][4];

  // from: [4][128 threads][4].
  __device__ explicit SplitWeights(const float4* from) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float4 four = from[k * 128];
      const float weights[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        large[k][i] = to_tf32(weights[i]);
        small[k][i] = to_tf32(weights[i] - large[k][i]);
      }
    }
  }

  // Asks for the step's products with places x and x'.
  template <int Columns>
  __device__ void multiply(float (&sums)[Columns / 2], std::uint64_t x,
                           std::uint64_t beyond) const {
    using Products = WgmmaOfRegisters<Columns>;
    constexpr int kApart = kInstructionBytes >> 4;
    Products::template multiply<false>(sums, large[0], beyond);
#pragma unroll
    for (int k = 1; k < 4; ++k)
      Products::template multiply<true>(sums, large[k], beyond + k * kApart);
#pragma unroll
    for (int k = 0; k < 4; ++k) Products::template multiply<true>(sums, small[k], x + k * kApart);
#pragma unroll
    for (int k = 0; k < 4; ++k) Products::template multiply<true>(sums, large[k], x + k * kApart);
  }
};

// Sums that the products before have ended: the compiler does not look at them earlier.
template <int n>
__device__ inline void take(float (&sums)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace cnn_engine::cuda::wgmma
