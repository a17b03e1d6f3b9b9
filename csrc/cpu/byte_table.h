// y = table[q] of 8-bit numbers, by their bits. Included only by files that are compiled once for
// each instruction set.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "runtime/shape.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

#if defined(__AVX512BW__)
// The whole table in four registers. Not all CPUs of this instruction set have the permutation.
__attribute__((target("avx512vbmi"))) inline void look_up_permuted(const std::uint8_t* q,
                                                                   const std::uint8_t* table,
                                                                   std::uint8_t* y,
                                                                   std::int64_t size) {
  const __m512i first = _mm512_loadu_si512(table), second = _mm512_loadu_si512(table + 64);
  const __m512i third = _mm512_loadu_si512(table + 128), fourth = _mm512_loadu_si512(table + 192);
  const auto found = [&](__m512i index) __attribute__((target("avx512vbmi"), always_inline)) {
    const __m512i low = _mm512_permutex2var_epi8(first, index, second);
    const __m512i high = _mm512_permutex2var_epi8(third, index, fourth);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
  };
  std::int64_t i = 0;
  for (; i + 64 <= size; i += 64) {
    _mm512_storeu_si512(y + i, found(_mm512_loadu_si512(q + i)));
  }
  if (i == size) return;
  const __mmask64 rest = ~std::uint64_t{0} >> (64 - (size - i));
  _mm512_mask_storeu_epi8(y + i, rest, found(_mm512_maskz_loadu_epi8(rest, q + i)));
}
#endif

#if defined(__AVX2__)
// Sixteen shuffles of sixteen entries. PSHUFB gives 0 for a negative index and looks at four bits
// of others, so a number less 16, 32, ... takes part until it is negative: each table is the
// difference from the one before it. The upper half of the numbers is shifted into the lower one.
inline std::int64_t look_up_shuffled(const std::uint8_t* q, const std::uint8_t* table,
                                     std::uint8_t* y, std::int64_t size) {
  __m256i parts[16];
  for (int i = 0; i < 16; ++i) {
    const auto part = [&](int j) {
      return _mm_loadu_si128((const __m128i*)(table + 16 * j));
    };
    const __m128i own = i % 8 ? _mm_xor_si128(part(i), part(i - 1)) : part(i);
    parts[i] = _mm256_broadcastsi128_si256(own);
  }
  const __m256i step = _mm256_set1_epi8(16), half = _mm256_set1_epi8(-128);
  std::int64_t at = 0;
  for (; at + 32 <= size; at += 32) {
    __m256i low = _mm256_loadu_si256((const __m256i*)(q + at)), high = _mm256_xor_si256(low, half);
    __m256i found = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m256i lower = _mm256_shuffle_epi8(parts[i], low);
      const __m256i upper = _mm256_shuffle_epi8(parts[8 + i], high);
      found = _mm256_xor_si256(found, _mm256_xor_si256(lower, upper));
      low = _mm256_subs_epi8(low, step);
      high = _mm256_subs_epi8(high, step);
    }
    _mm256_storeu_si256((__m256i*)(y + at), found);
  }
  return at;
}
#endif

// y may be q.
inline void look_up_bytes(const std::uint8_t* q, const std::uint8_t* table, std::uint8_t* y,
                          std::int64_t size) {
  std::int64_t i = 0;
#if defined(__AVX512BW__)
  static const bool permutes = __builtin_cpu_supports("avx512vbmi");
  if (permutes) return look_up_permuted(q, table, y, size);
#endif
#if defined(__AVX2__)
  if (size >= 64) i = look_up_shuffled(q, table, y, size);
#endif
  for (; i < size; ++i) y[i] = table[q[i]];
}

// What follows a quantized layer of bytes; see DirectOf.
struct ByteTable {
  const std::uint8_t* table;  // [256] or null: nothing follows

  void apply(std::uint8_t* y, std::int64_t pitch, std::int64_t rows, int channels) const {
    if (!table) return;
    if (pitch == channels) {
      look_up_bytes(y, table, y, rows * channels);
      return;
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      look_up_bytes(y + i * pitch, table, y + i * pitch, channels);
    }
  }
};

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
