// The lanes of 8-bit integers (nhwc.h), by instruction set, and what follows their sums.
//
//   baseline, avx2, avx512      two channels in a unit, widened to 16 bits: PMADDWD, exactly
//   avx_vnni, avx512_vnni       four channels in a unit, unsigned by signed: VPDPBUSD
//   amx                         the same units, in tiles of 16 rows by 64 channels
//   (integer_tiles.h)
//
// PMADDUBSW, which adds two products in 16 bits and saturates, is not among them. Compiled without
// contraction of floating-point operations: the contract rounds each by itself.
#pragma once

#include "cpu/conv2d_nhwc_direct.h"
#include "cpu/nhwc_tiles.h"
#include "cpu/requantize.h"
#include "ops/quantized_conv2d.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

#if defined(__AMX_INT8__)
#define CNN_ENGINE_INTEGER_TILES
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define CNN_ENGINE_QUADS
#endif

// What follows a sum.
struct Requantize {
  const std::int32_t* bias;
  const float* scale;
  QuantizedTypes types;

  Requantize at(std::int64_t k) const { return {bias + k, scale + k, types}; }
};

// The last of the contract's formulas: what is stored of W totals of filters that `q` is at.
template <int W>
CNN_ENGINE_INLINE void requantize(const Requantize& q, IntVec<W> total, Vec<W> scale,
                                  const std::uint8_t* residual, std::uint8_t* y) {
  const QuantizedTypes& types = q.types;
  if (types.y == ElementType::int32) {
    __builtin_memcpy(y, &total, sizeof total);
    return;
  }
  Vec<W> v = as_floats<W>(total) * scale;
  if (residual) {
    const IntVec<W> r = widened<W>(residual, types.residual == ElementType::int8);
    v = v + as_floats<W>(r - types.residual_zero) * types.residual_scale;
  }
  if (types.y == ElementType::float32) {
    __builtin_memcpy(y, &v, sizeof v);
    return;
  }
  store_rounded<W>(v, types.y_zero, types.low, types.high, y);
}

inline int step_of(ElementType y) { return bytes_of(y); }

// The same of `rows` rows of B * W totals, of which the first `valid` are stored. The common case
// is compiled by itself.
template <int W, int B, typename Total>
CNN_ENGINE_INLINE void requantize_rows(const Requantize& q, int rows, int valid, const Total& total,
                                       const std::uint8_t* residual, std::int64_t residual_stride,
                                       std::uint8_t* y, std::int64_t y_stride) {
  const int step = step_of(q.types.y);
  const auto each = [&](const Requantize& own) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const Vec<W> scale = load<W>(own.scale + b * W);
#pragma GCC unroll 16
      for (int t = 0; t < rows; ++t) {
        const std::uint8_t* added = residual ? residual + t * residual_stride + b * W : nullptr;
        requantize<W>(own, total(t, b), scale, added, y + t * y_stride + b * W * step);
      }
    }
  };
  if (valid >= B * W) {
    if (step == 4 || residual) return each(q);
    Requantize plain = q;
    plain.types.y = ElementType::uint8;  // int8 and uint8 are stored alike
    return each(plain);
  }
  for (int t = 0; t < rows; ++t) {
    std::uint8_t some[4 * B * W], added[B * W] = {};
    if (residual) __builtin_memcpy(added, residual + t * residual_stride, valid);
    for (int b = 0; b < B; ++b) {
      requantize<W>(q, total(t, b), load<W>(q.scale + b * W), residual ? added + b * W : nullptr,
                    some + b * W * step);
    }
    __builtin_memcpy(y + t * y_stride, some, std::int64_t{valid} * step);
  }
}

// sum += products of pairs of 16-bit integers.
template <typename V>
CNN_ENGINE_INLINE void multiply_pairs(V& sum, V a, V b) {
#if defined(__AVX512VNNI__)
  if constexpr (sizeof(V) == 64) {
    sum = (V)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
    return;
  }
#endif
#if defined(__AVX512BW__)
  if constexpr (sizeof(V) == 64) {
    sum += (V)_mm512_madd_epi16((__m512i)a, (__m512i)b);
    return;
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) {
    sum += (V)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    return;
  }
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16) {
    sum += (V)_mm_madd_epi16((__m128i)a, (__m128i)b);
    return;
  }
#endif
  sum += (a >> 16) * (b >> 16) + ((a << 16) >> 16) * ((b << 16) >> 16);
}

struct Integer {
  using Input = std::uint8_t;
  using Unit = std::int32_t;
  using Residual = std::uint8_t;
  using Output = std::uint8_t;
  using Last = Requantize;
#if defined(CNN_ENGINE_QUADS)
  static constexpr int kChannels = 4;
  static constexpr bool kWritten = false;
#else
  static constexpr int kChannels = 2;
  static constexpr bool kWritten = true;
#endif
  static constexpr bool kInParts = false, kJoinsTaps = true;
  static constexpr int kRunRows = 384, kSlack = 16, kMostPasses = 3;
#if defined(CNN_ENGINE_INTEGER_TILES)
  static constexpr int kUnrolledRow = 10;  // shorter rows would leave tiles empty
#else
  static constexpr int kUnrolledRow = 0;
#endif
  template <int W>
  using Sum = IntVec<W>;

  // In tiles a run of units is cut into equal ones of at most 16.
  static constexpr int tile_units(int units) {
    const int tiles = (units + 15) / 16;
    return (units + tiles - 1) / tiles;
  }
  static constexpr int padded(int units) {
#if defined(CNN_ENGINE_INTEGER_TILES)
    return (units + 15) / 16 * tile_units(units);
#else
    return units;
#endif
  }
  template <typename V>
  CNN_ENGINE_INLINE static void multiply_add(V& sum, V weights, std::int32_t value) {
    const V x = value - V{};
#if defined(__AVX512VNNI__)
    if constexpr (sizeof(V) == 64) {
      sum = (V)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)weights);
    } else {
      sum = (V)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)x, (__m256i)weights);
    }
#elif defined(__AVXVNNI__)
    sum = (V)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)weights);
#else
    multiply_pairs(sum, x, weights);
#endif
  }
};

// Between x in memory and units. Where an instruction takes unsigned numbers alone, int8 becomes
// uint8 by another sign bit, which is its number and 128.
struct Centring {
  int zero;  // that stands for 0, of what is written
  std::uint8_t flip;
  bool aligned;  // whether places can be read where they are

  // Whether int8 is taken as it is.
  static constexpr bool kTakesSigned =
#if defined(CNN_ENGINE_INTEGER_TILES) || !defined(CNN_ENGINE_QUADS)
      true;
#else
      false;
#endif

  Centring(const QuantizedTypes& types, const Conv2dShape& p, int pitch)
      : zero(types.x_zero), flip(0), is_signed(types.x == ElementType::int8) {
    if (is_signed && !kTakesSigned) {
      flip = 0x80;
      zero += 128;
    }
    const int channels = p.group_channels(), own = units<Integer>(channels);
    const bool whole = channels % Integer::kChannels == 0;
    aligned = pitch % 4 == 0 && (whole || (p.groups == 1 && pitch >= 4 * own)) &&
              Integer::padded(own) == own;
  }
  bool any() const { return flip != 0 || !aligned; }
  Centring of_image(std::int64_t, int) const { return *this; }

  CNN_ENGINE_INLINE void write(const std::uint8_t* from, std::int32_t* to, int channels,
                               int) const {
#if defined(CNN_ENGINE_QUADS)
    auto* bytes = reinterpret_cast<std::uint8_t*>(to);
    const int whole = channels / 4 * 4;
    if (flip == 0) {
      __builtin_memcpy(bytes, from, whole);
    } else {
      for (int c = 0; c < whole; ++c) bytes[c] = from[c] ^ flip;
    }
    if (whole == channels) return;
    std::uint32_t last = 0;
    for (int c = whole; c < channels; ++c) {
      last |= static_cast<std::uint32_t>(from[c] ^ flip) << (8 * (c - whole));
    }
    to[whole / 4] = static_cast<std::int32_t>(last);
#else
    auto* wide = reinterpret_cast<std::int16_t*>(to);
    if (is_signed) {
      for (int c = 0; c < channels; ++c) {
        wide[c] = static_cast<std::int16_t>(static_cast<std::int8_t>(from[c]) - zero);
      }
    } else {
      for (int c = 0; c < channels; ++c) wide[c] = static_cast<std::int16_t>(from[c] - zero);
    }
    if (channels % 2) wide[channels] = 0;
#endif
  }
  void write_border(std::int32_t* to, int count) const {
#if defined(CNN_ENGINE_QUADS)
    __builtin_memset(to, zero, std::int64_t{4} * count);
#else
    __builtin_memset(to, 0, std::int64_t{4} * count);
#endif
  }

 private:
  bool is_signed;
};

// Times that products are made of weights in [-largest - 1, largest]: an instruction takes 8 bits.
constexpr int passes_of(int largest) {
#if defined(CNN_ENGINE_QUADS)
  return largest <= 127 ? 1 : (largest + 127) / 127;
#else
  return largest < 0 ? 0 : 1;
#endif
}

// The share of a weight that one pass multiplies; all shares are of nearly the same size.
inline int share_of(int weight, int pass, int passes) {
  return weight * (pass + 1) / passes - weight * pass / passes;
}

struct Nothing {
  template <typename... Any>
  void apply(const Any&...) const {}
};

// ---- tiles ----

template <int W, int B, int T>
CNN_ENGINE_INLINE void finish_tile(const TileOf<Integer>& p, const IntVec<W> (&sum)[T][B],
                                   std::uint8_t* output, const std::uint8_t* residual) {
  const Requantize& q = *p.last;
  requantize_rows<W, B>(
      q, T, p.valid, [&](int t, int b) { return sum[t][b] + load_as<IntVec<W>>(q.bias + b * W); },
      residual, p.residual_stride, output, p.y_stride);
}
template <int W, int B, int T>
CNN_ENGINE_INLINE void finish_edge(const TileOf<Integer>& p, const IntVec<W> (&sum)[T][B],
                                   std::uint8_t* output, const std::uint8_t* residual) {
  finish_tile<W, B, T>(p, sum, output, residual);
}

#if !defined(CNN_ENGINE_INTEGER_TILES)
constexpr TilesOf<Integer> kIntegerTiles = make_tiles<Integer>();
inline const TilesOf<Integer>& tiles_of(Integer) { return kIntegerTiles; }
#endif

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
