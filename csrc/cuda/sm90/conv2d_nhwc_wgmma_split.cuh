// Products of float32 by wgmma: a number is two of float16, the nearest and the nearest to what
// that lacks, times a power of two, and x w = X W + X w' + x' W. Both parts have 23 bits of a
// number, of three in four all 24, but where it is below 2^-17 of the largest that shares its
// scale: they are right to 2^-39 of that then. What is left out, x' w', is at most 2^-24 of a
// product, to either side.
//
// Scales bring the largest of a filter's weights, and of a position's channels of a step, to
// between 2^14 and 2^15, so that nothing leaves float16's range whatever the numbers are. A
// filter's is packed with its weights and taken back at the end, a position's is found as its step
// comes, and taken back as the step's sums are added to the others, by additions that round: tensor
// cores cut off what does not fit a sum's bits, always towards zero, which through many layers is
// an error of its own (compensated).
//
// An infinity's large part is float16's largest number, and its small part is the infinity: that is
// multiplied by large parts alone, which are 0 only of 0, and so have the sign of the other number.
//
// Of 32 channels, 128 bytes of a row are four pieces of 32: the large parts of the first 16
// channels, the small ones, then those of the other 16.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/sm80/mma.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda::wgmma {

// The exponent of a scale's numbers, as float32 has it, from their largest magnitude. Of zeros and
// of numbers below 2^-92 one that all powers of two below have room for.
__host__ __device__ constexpr unsigned exponent_of(unsigned largest_bits) {
  return largest_bits >> 23 > 35 ? largest_bits >> 23 : 35;
}
// What numbers are multiplied by to become float16, and what their products are then.
__device__ inline float scale_of(unsigned exponent) {
  return __uint_as_float((268 - exponent) << 23);
}
__device__ inline float unscale_of(unsigned exponent) {
  return __uint_as_float((exponent - 14) << 23);
}
// Sums are added up in this unit of their positions' scales, in which neither the largest nor the
// smallest of them leave float32's range where their filter's largest weight is within 2^121; the
// end takes it back, with the filters' scales.
constexpr float kPositionUnit = 0x1p-20f, kFilterUnit = 0x1p20f;

// The nearest of float16's finite numbers, of an infinity too.
__device__ inline __half2 nearest_finite(float a, float b) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t bits;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(b), "f"(a));
  __half2 pair;
  memcpy(&pair, &bits, sizeof(pair));
  return pair;
#else
  return __floats2half2_rn(a, b);  // never launched
#endif
}

// Both parts of two numbers in their scale.
struct Parts {
  __half2 large, small;

  __device__ Parts(float a, float b) {
    large = nearest_finite(a, b);
    const float2 read = __half22float2(large);
    small = __floats2half2_rn(a - read.x, b - read.y);
  }
};

// A part of a weight whose filter's products are multiplied by `scale` (kFilterUnit).
__device__ inline __half part_of_weight(float weight, float scale, bool small) {
  constexpr float kSmallest = 0x1p-24f;  // of float16
  const float value = weight * (kFilterUnit / scale);
  const bool vanishes = weight != 0.0f && fabsf(value) <= kSmallest / 2;
  const Parts parts(vanishes ? copysignf(kSmallest, weight) : value, 0.0f);
  return __low2half(small ? parts.small : parts.large);
}

// Tensor cores cut off up to 0.9 of 2^-24 of a sum on average (cut_off_of). It is given back to
// what a block has added up: sums of more than 1 / 2^24 cut_off times a power of two grow by one
// unit of their last bit. Those whose last three bits are 0 stay, so that whole numbers are exact.
// Weights that are larger by as much would have the same errors at all positions, which a mean over
// positions keeps.
__device__ inline float compensated(float sum, float cut_off) {
  // Two instructions, where a compiler takes three.
  asm("{ .reg .pred grows; .reg .b32 last;\n"
      "and.b32 last, %0, 7;\n"
      "setp.ne.u32 grows, last, 0;\n"
      "@grows fma.rn.f32 %0, %1, %0, %0; }"
      : "+f"(sum)
      : "f"(cut_off));
  return sum;
}

// Which eights of a step's channels a row's pieces of 16 bytes have, and whether their small parts.
__host__ __device__ constexpr int eight_of_piece(int piece) { return piece / 4 * 2 + piece % 2; }
__host__ __device__ constexpr bool is_small_piece(int piece) { return piece % 4 > 1; }
__host__ __device__ constexpr int piece_of_eight(int eight) { return eight / 2 * 4 + eight % 2; }

// Asks for the products of a step: the small ones first.
template <int Columns>
__device__ inline void multiply_parts(float (&accumulators)[Columns / 2], std::uint64_t weights,
                                      std::uint64_t positions) {
  constexpr int kApart = kInstructionBytes >> 4, kSmall = kApart, kNext = 2 * kApart;
  using Instruction = Wgmma<__half, Columns>;
  wgmma_fence();
  WgmmaAnew<__half, Columns>::multiply(accumulators, weights + kSmall, positions);
  Instruction::multiply(accumulators, weights + kSmall + kNext, positions + kNext);
  Instruction::multiply(accumulators, weights, positions + kSmall);
  Instruction::multiply(accumulators, weights + kNext, positions + kSmall + kNext);
  Instruction::multiply(accumulators, weights, positions);
  Instruction::multiply(accumulators, weights + kNext, positions + kNext);
  wgmma_commit();
}

// Sums that the products before have ended: the compiler does not look at them earlier.
template <int n>
__device__ inline void take(float (&accumulators)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

// Adds a step's sums to those before, in units of the tile's positions' scales.
template <int n>
__device__ inline void add_scaled(float (&accumulators)[n], const float (&of_step)[n],
                                  const float* scales) {
  const float* const own = scales + threadIdx.x % 4 * 2;
#pragma unroll
  for (int eight = 0; eight < n / 4; ++eight) {
    const float2 scale = *reinterpret_cast<const float2*>(own + eight * 8);
#pragma unroll
    for (int i = 4 * eight; i < 4 * eight + 4; ++i) {
      accumulators[i] = fmaf(of_step[i], i % 2 ? scale.y : scale.x, accumulators[i]);
    }
  }
}

}  // namespace cnn_engine::cuda::wgmma
