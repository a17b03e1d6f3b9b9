// What conv2d_nhwc multiplies on tensor cores: the kinds of operands, each with how it packs
// weights, reads the terms of x and multiplies them.
#pragma once

#include <type_traits>

#include "cuda/sm80/conv2d_nhwc_gemm.h"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/rounded.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/sm80/tf32.cuh"

namespace cnn_engine::cuda::nhwc {

// What the kinds of operands have in common. X: the type of x in memory; Four: four terms of a row.
template <typename X_, typename Four_, ElementType compute_type>
struct Terms {
  using X = X_;
  using Four = Four_;
  static constexpr ElementType kOperands = compute_type;
  static constexpr int kStepTerms = step_terms(compute_type);
  static constexpr int kUnits = kStepTerms / 16;
  static_assert(kStepTerms * sizeof(X) == 128);

  // What is added, bit by bit, to a byte's position in a row of shared memory, so that the lanes
  // that read at once, two rows of float32 or four of 16 bits, meet in no bank.
  static __device__ int swizzle(int row) { return sizeof(X) == 4 ? row % 2 * 64 : row % 4 * 32; }
};

// Two terms of 16 bits in a register.
template <typename Format, typename X, ElementType compute_type>
struct Rounded16 : Terms<X, uint2, compute_type> {
  static constexpr int kLaneBytes = 16;  // of a unit of 16 terms and 16 filters

  static __device__ void pack(char* lane, const float (&terms)[2][4]) {
    auto* words = reinterpret_cast<std::uint32_t*>(lane);
    for (int f = 0; f < 2; ++f) {
      words[2 * f] = Format::pack(terms[f][0], terms[f][1]);
      words[2 * f + 1] = Format::pack(terms[f][2], terms[f][3]);
    }
  }

  static __device__ float4 widen(const uint2& x) {
    const float2 first = Format::unpack(x.x), second = Format::unpack(x.y);
    return make_float4(first.x, first.y, second.x, second.y);
  }
  static __device__ uint2 narrow(const float4& x) {
    return make_uint2(Format::pack(x.x, x.y), Format::pack(x.z, x.w));
  }

  struct A {
    std::uint32_t words[4];
    __device__ A(const uint2& low, const uint2& high)  // rows g and g + 8
        : words{low.x, high.x, low.y, high.y} {}
  };
  struct B {
    uint4 words;
    __device__ explicit B(const char* lane) : words(*reinterpret_cast<const uint4*>(lane)) {}
  };
  static __device__ void multiply(float (&low)[4], float (&high)[4], const A& a, const B& b) {
    const std::uint32_t first[2] = {b.words.x, b.words.y}, second[2] = {b.words.z, b.words.w};
    Format::mma16(low, a.words, first);
    Format::mma16(high, a.words, second);
  }
};

struct Float16 : Rounded16<Half, __half, ElementType::float16> {};
struct Bfloat16 : Rounded16<cuda::Bfloat16, __nv_bfloat16, ElementType::bfloat16> {};

__device__ inline void multiply_tf32(float (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                     std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                     std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Terms that are float32 in memory.
template <ElementType compute_type>
struct Wide : Terms<float, float4, compute_type> {
  static __device__ float4 widen(const float4& x) { return x; }
  static __device__ float4 narrow(const float4& x) { return x; }
};

struct Tf32 : Wide<ElementType::tf32> {
  static constexpr int kLaneBytes = 32;

  static __device__ void pack(char* lane, const float (&terms)[2][4]) {
    auto* words = reinterpret_cast<std::uint32_t*>(lane);
    for (int f = 0; f < 2; ++f) {
      for (int i = 0; i < 4; ++i) words[4 * f + i] = to_tf32_bits(terms[f][i]);
    }
  }

  struct A {
    std::uint32_t low[4], high[4];
    __device__ A(const float4& l, const float4& h)
        : low{to_tf32_bits(l.x), to_tf32_bits(l.y), to_tf32_bits(l.z), to_tf32_bits(l.w)},
          high{to_tf32_bits(h.x), to_tf32_bits(h.y), to_tf32_bits(h.z), to_tf32_bits(h.w)} {}
  };
  struct B {
    uint4 words[2];
    __device__ explicit B(const char* lane)
        : words{reinterpret_cast<const uint4*>(lane)[0], reinterpret_cast<const uint4*>(lane)[1]} {}
  };
  static __device__ void multiply_one(float (&d)[4], const std::uint32_t (&low)[4],
                                      const std::uint32_t (&high)[4], const uint4& b) {
    multiply_tf32(d, low[0], high[0], low[1], high[1], b.x, b.y);
    multiply_tf32(d, low[2], high[2], low[3], high[3], b.z, b.w);
  }
  static __device__ void multiply(float (&low)[4], float (&high)[4], const A& a, const B& b) {
    multiply_one(low, a.low, a.high, b.words[0]);
    multiply_one(high, a.low, a.high, b.words[1]);
  }
};

// float32 as three values of bfloat16, which hold all of its 24 bits; of the nine products the
// three smallest, of 2^-24, are left out. Tensor cores cut off what does not fit a sum's bits,
// always towards zero, which through many layers is an error of its own. So no sum goes on there:
// the 16 largest products are summed by themselves, then what that lost (the same products to its
// negative), the others too, and all are added by additions that round.
struct Split : Wide<ElementType::float32> {
  static constexpr int kLaneBytes = 48;
  static constexpr int kParts = 3;

  static constexpr float kLargest = 0x1.fep127f;  // of bfloat16

  // The parts of two terms, in pairs. What is infinite is all in the first, in which nothing else
  // is: of what would round to an infinity the first part is kLargest. NaN is in any part.
  // `Usual`: neither is past kLargest.
  template <bool Usual>
  static __device__ void divide(float x, float y, std::uint32_t (&pairs)[kParts]) {
    const auto kept = [](float v) {
      return !Usual && fabsf(v) > kLargest && fabsf(v) < INFINITY ? copysignf(kLargest, v) : v;
    };
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      pairs[part] = part ? cuda::Bfloat16::pack(x, y) : cuda::Bfloat16::pack(kept(x), kept(y));
      const float2 whole = cuda::Bfloat16::unpack(pairs[part]);
      x -= whole.x;
      y -= whole.y;
      if (!Usual && !(fabsf(x) < INFINITY)) x = 0.0f;
      if (!Usual && !(fabsf(y) < INFINITY)) y = 0.0f;
    }
  }

  // 0 for each infinity of a pair, which times a part of 0 would be NaN.
  static __device__ std::uint32_t finite(std::uint32_t pair) {
    if ((pair & 0x7fffu) == 0x7f80u) pair &= 0xffff0000u;
    if ((pair & 0x7fff0000u) == 0x7f800000u) pair &= 0xffffu;
    return pair;
  }

  static __device__ void pack(char* lane, const float (&terms)[2][4]) {
    auto* words = reinterpret_cast<std::uint32_t*>(lane);  // [parts][filters][pairs]
    for (int f = 0; f < 2; ++f) {
      for (int i = 0; i < 2; ++i) {
        std::uint32_t pairs[kParts];
        divide<false>(terms[f][2 * i], terms[f][2 * i + 1], pairs);
        for (int part = 0; part < kParts; ++part) words[4 * part + 2 * f + i] = pairs[part];
      }
    }
  }

  struct A {
    std::uint32_t words[kParts][4], finite_words[4];
    __device__ A(const float4& l, const float4& h) {
      const float2 twos[4] = {{l.x, l.y}, {h.x, h.y}, {l.z, l.w}, {h.z, h.w}};
      const float first[4] = {l.x, l.y, l.z, l.w}, second[4] = {h.x, h.y, h.z, h.w};
      const bool usual = fmaxf(largest(first), largest(second)) <= kLargest;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t pairs[kParts];
        if (__builtin_expect(usual, true)) {
          divide<true>(twos[i].x, twos[i].y, pairs);
          finite_words[i] = pairs[0];
        } else {
          divide<false>(twos[i].x, twos[i].y, pairs);
          finite_words[i] = finite(pairs[0]);
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) words[part][i] = pairs[part];
      }
    }
  };
  struct B {
    uint4 words[kParts];
    __device__ explicit B(const char* lane)
        : words{reinterpret_cast<const uint4*>(lane)[0], reinterpret_cast<const uint4*>(lane)[1],
                reinterpret_cast<const uint4*>(lane)[2]} {}
  };
  static __device__ void multiply_filters(float (&accumulators)[4], const A& a,
                                          const std::uint32_t (&b)[kParts][2]) {
    float large[4] = {}, small[4] = {};
    cuda::Bfloat16::mma16(small, a.words[2], b[0]);
    cuda::Bfloat16::mma16(small, a.finite_words, b[2]);
    cuda::Bfloat16::mma16(small, a.words[1], b[1]);
    cuda::Bfloat16::mma16(small, a.words[1], b[0]);
    cuda::Bfloat16::mma16(small, a.finite_words, b[1]);
    cuda::Bfloat16::mma16(large, a.words[0], b[0]);
    float lost[4] = {-large[0], -large[1], -large[2], -large[3]};
    cuda::Bfloat16::mma16(lost, a.words[0], b[0]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // of an infinity nothing is lost
      accumulators[e] += small[e] + (fabsf(lost[e]) < INFINITY ? lost[e] : 0.0f);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) accumulators[e] += large[e];
  }
  static __device__ void multiply(float (&low)[4], float (&high)[4], const A& a, const B& b) {
    std::uint32_t first[kParts][2], second[kParts][2];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      first[part][0] = b.words[part].x;
      first[part][1] = b.words[part].y;
      second[part][0] = b.words[part].z;
      second[part][1] = b.words[part].w;
    }
    multiply_filters(low, a, first);
    multiply_filters(high, a, second);
  }
};

}  // namespace cnn_engine::cuda::nhwc
