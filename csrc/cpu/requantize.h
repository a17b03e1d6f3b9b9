// Between floats and 8-bit integers, in vectors. Included only by files that are compiled once for
// each instruction set, without contraction of operations on floats: each is rounded by itself.
#pragma once

#include <utility>

#include "cpu/blocked.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// W bytes as 32-bit integers, and the lowest bytes of W of these. Compilers convert such vectors
// one number after the other.
template <int W>
CNN_ENGINE_INLINE IntVec<W> widened(const std::uint8_t* from, bool is_signed) {
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    const __m128i bytes = load_as<__m128i>(from);
    return (IntVec<W>)(is_signed ? _mm512_maskz_cvtepi8_epi32(kAll16, bytes)
                                 : _mm512_maskz_cvtepu8_epi32(kAll16, bytes));
  }
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) {
    const __m128i bytes = _mm_cvtsi64_si128(load_as<long long>(from));
    return (IntVec<W>)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
  }
#endif
#if defined(__SSE2__)
  if constexpr (W == 4) {  // into the highest bytes, and from there
    const __m128i bytes = _mm_cvtsi32_si128(load_as<int>(from)), zero = _mm_setzero_si128();
    const __m128i high = _mm_unpacklo_epi16(zero, _mm_unpacklo_epi8(zero, bytes));
    return (IntVec<W>)(is_signed ? _mm_srai_epi32(high, 24) : _mm_srli_epi32(high, 24));
  }
#endif
  IntVec<W> value;
  for (int i = 0; i < W; ++i) value[i] = is_signed ? static_cast<std::int8_t>(from[i]) : from[i];
  return value;
}

template <int W>
CNN_ENGINE_INLINE void store_lowest(IntVec<W> value, std::uint8_t* to) {
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    const __m128i bytes = _mm512_maskz_cvtepi32_epi8(kAll16, (__m512i)value);
    __builtin_memcpy(to, &bytes, W);
    return;
  }
#endif
#if defined(__SSE2__)
  if constexpr (W == 4 || W == 8) {
    const IntVec<W> lowest = value & 0xff;
    __m128i first = load_as<__m128i>(&lowest), last = first;
    if constexpr (W == 8) last = load_as<__m128i>(reinterpret_cast<const char*>(&lowest) + 16);
    const __m128i words = _mm_packs_epi32(first, last), bytes = _mm_packus_epi16(words, words);
    __builtin_memcpy(to, &bytes, W);
    return;
  }
#endif
  for (int i = 0; i < W; ++i) to[i] = static_cast<std::uint8_t>(value[i]);
}

template <int W>
CNN_ENGINE_INLINE Vec<W> as_floats(IntVec<W> value) {
  return __builtin_convertvector(value, Vec<W>);
}

// Half to even, of |value| <= 2^22.
template <int W>
CNN_ENGINE_INLINE IntVec<W> rounded(Vec<W> value) {
#if defined(__AVX512F__)
  if constexpr (W == 16) return (IntVec<16>)_mm512_maskz_cvtps_epi32(kAll16, (__m512)value);
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) return (IntVec<8>)_mm256_cvtps_epi32((__m256)value);
#endif
#if defined(__SSE2__)
  if constexpr (W == 4) return (IntVec<4>)_mm_cvtps_epi32((__m128)value);
#endif
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: its last place is 1
  return __builtin_convertvector((value + kShift) - kShift, IntVec<W>);
}

// The larger, and `bound` of a NaN. Vectors of one are for channels that fill no wider one.
template <int W>
CNN_ENGINE_INLINE Vec<W> at_least(Vec<W> value, Vec<W> bound) {
  if constexpr (W >= 4) return raised(value, bound);
  return value > bound ? value : bound;
}
template <int W>
CNN_ENGINE_INLINE Vec<W> at_most(Vec<W> value, Vec<W> bound) {
  if constexpr (W >= 4) return lowered(bound, value);
  return value > bound ? bound : value;
}

// clamp(round_half_even(v) + zero, low, high) of 8 bits, signed or not; a NaN gives low. The one
// position where floats become integers: of one vector, and of four at once.
template <int W>
CNN_ENGINE_INLINE IntVec<W> to_integers(Vec<W> v, int zero, int low, int high) {
  v = at_least<W>(v, splat<W>(static_cast<float>(low - zero)));
  v = at_most<W>(v, splat<W>(static_cast<float>(high - zero)));
  return rounded<W>(v) + zero;
}

#if defined(__SSE2__)
// 32 to 16 bits, saturated, of each 128 bits of a and then of b.
template <typename V>
CNN_ENGINE_INLINE V packed_words(V a, V b) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(V) == 64) {
    return (V)_mm512_maskz_packs_epi32(-1, (__m512i)a, (__m512i)b);
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) return (V)_mm256_packs_epi32((__m256i)a, (__m256i)b);
#endif
  if constexpr (sizeof(V) == 16) return (V)_mm_packs_epi32((__m128i)a, (__m128i)b);
}
// 16 to unsigned 8 bits in the same way.
template <typename V>
CNN_ENGINE_INLINE V packed_bytes(V a, V b) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(V) == 64) {
    return (V)_mm512_maskz_packus_epi16(-1, (__m512i)a, (__m512i)b);
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) return (V)_mm256_packus_epi16((__m256i)a, (__m256i)b);
#endif
  if constexpr (sizeof(V) == 16) return (V)_mm_packus_epi16((__m128i)a, (__m128i)b);
}
#endif

// The same of four vectors. Each 128 bits hold four bytes of each vector: see in_order().
template <int W>
CNN_ENGINE_INLINE IntVec<W> to_bytes(const Vec<W> (&v)[4], int zero, int low, int high) {
#if defined(__SSE2__)
  typedef std::int16_t Words __attribute__((vector_size(4 * W)));
  typedef std::uint8_t Bytes __attribute__((vector_size(4 * W)));
  const int flip = low < 0 || zero < 0 ? 128 : 0;  // int8 is unsigned until the end
  const auto words = [&](Vec<W> a, Vec<W> b) {
    // What is too large for 16 bits is past all ranges; below, conversions give the least number,
    // as they do for a NaN.
    const Vec<W> most = splat<W>(32000.0f);
    const auto both = packed_words(rounded<W>(lowered(most, a)), rounded<W>(lowered(most, b)));
    return (IntVec<W>)((Words)both + static_cast<std::int16_t>(zero + flip));
  };
  Bytes y = (Bytes)packed_bytes(words(v[0], v[1]), words(v[2], v[3]));
  const Bytes least = Bytes{} + static_cast<std::uint8_t>(low + flip);
  const Bytes most = Bytes{} + static_cast<std::uint8_t>(high + flip);
  y = y > least ? y : least;
  y = y < most ? y : most;
  return (IntVec<W>)(y ^ static_cast<std::uint8_t>(flip));
#else
  std::uint8_t bytes[4 * W];
  for (int i = 0; i < 4 * W; ++i) {
    const int lane = i / 16 * 4 + i % 4;
    const Vec<1> one = {v[i % 16 / 4][lane]};
    bytes[i] = static_cast<std::uint8_t>(to_integers<1>(one, zero, low, high)[0]);
  }
  return load_as<IntVec<W> >(bytes);
#endif
}

template <int W, int... I>
CNN_ENGINE_INLINE IntVec<W> in_order(IntVec<W> bytes, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(bytes, bytes, (I % (W / 4) * 4 + I / (W / 4))...);
}
// Those of the first vector, of the second, ...
template <int W>
CNN_ENGINE_INLINE IntVec<W> in_order(IntVec<W> bytes) {
  return in_order<W>(bytes, std::make_integer_sequence<int, W>());
}

template <int W>
CNN_ENGINE_INLINE void store_rounded(Vec<W> v, int zero, int low, int high, std::uint8_t* y) {
  store_lowest<W>(to_integers<W>(v, zero, low, high), y);
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
