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

// The contract's v of W totals; with a residual, of its integers.
template <int W>
CNN_ENGINE_INLINE Vec<W> scaled(IntVec<W> total, Vec<W> scale) {
  return as_floats<W>(total) * scale;
}
template <int W>
CNN_ENGINE_INLINE Vec<W> scaled(IntVec<W> total, Vec<W> scale, IntVec<W> residual,
                                const QuantizedTypes& types) {
  const Vec<W> added = as_floats<W>(residual - types.residual_zero) * types.residual_scale;
  const Vec<W> v = scaled<W>(total, scale);
  if (types.inner_scale == 0) return v + added;
  const IntVec<W> inner = to_integers<W>(v, 0, types.inner_low, types.inner_high);
  return as_floats<W>(inner) * types.inner_scale + added;
}

// The same with the residual, or null, in memory.
template <int W>
CNN_ENGINE_INLINE Vec<W> scaled(IntVec<W> total, Vec<W> scale, const std::uint8_t* residual,
                                const QuantizedTypes& types) {
  if (!residual) return scaled<W>(total, scale);
  return scaled<W>(total, scale, widened<W>(residual, types.residual == ElementType::int8), types);
}

// The last of the contract's formulas: what is stored of W totals of filters that `q` is at.
template <int W>
CNN_ENGINE_INLINE void requantize(const Requantize& q, IntVec<W> total, Vec<W> scale,
                                  const std::uint8_t* residual, std::uint8_t* y) {
  const QuantizedTypes& types = q.types;
  if (types.y == ElementType::int32) {
    __builtin_memcpy(y, &total, sizeof total);
    return;
  }
  const Vec<W> v = scaled<W>(total, scale, residual, types);
  if (types.y == ElementType::float32) {
    __builtin_memcpy(y, &v, sizeof v);
    return;
  }
  store_rounded<W>(v, types.y_zero, types.low, types.high, y);
}

inline int step_of(ElementType y) { return bytes_of(y); }

// Row `Row` of B vectors, of four vectors of bytes that are in order.
template <int B, int Row, int W, int... I>
CNN_ENGINE_INLINE auto row_of(IntVec<W> bytes, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(bytes, bytes, (Row * B * W / 4 + I)...);
}

CNN_ENGINE_INLINE void copy_some(const std::uint8_t* from, std::uint8_t* to, int count) {
  for (; count >= 8; count -= 8, from += 8, to += 8) __builtin_memcpy(to, from, 8);
  if (count >= 4) {
    __builtin_memcpy(to, from, 4);
    count -= 4, from += 4, to += 4;
  }
  for (int i = 0; i < count; ++i) to[i] = from[i];
}

// Rows of B vectors, four vectors at once (of three, the last one twice), in 8 bits; store(row,
// bytes of the row).
template <int W, int B, typename Total, typename Store>
CNN_ENGINE_INLINE void requantize_fours(const Requantize& own, int rows, const Total& total,
                                        const std::uint8_t* residual, std::int64_t residual_stride,
                                        const Store& store) {
  constexpr int kRows = 4 / B;
  const QuantizedTypes types = own.types;
  Vec<W> scale[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) scale[b] = load<W>(own.scale + b * W);
#pragma GCC unroll 12
  for (int first = 0; first < rows; first += kRows) {
    // Where rows are left over, those before them come out again, the same.
    const int t = first + kRows > rows ? rows - kRows : first;
    Vec<W> v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int row = t + i / B % kRows, b = i < B ? i : B == 3 ? 2 : i % B;
      const std::uint8_t* added = residual ? residual + row * residual_stride + b * W : nullptr;
      v[i] = scaled<W>(total(row, b), scale[b], added, types);
    }
    const IntVec<W> bytes = in_order<W>(to_bytes<W>(v, types.y_zero, types.low, types.high));
    constexpr std::make_integer_sequence<int, W / kRows> lanes;
    store(t, row_of<B, 0, W>(bytes, lanes));
    if constexpr (kRows > 1) store(t + 1, row_of<B, 1, W>(bytes, lanes));
    if constexpr (kRows > 2) {
      store(t + 2, row_of<B, 2, W>(bytes, lanes));
      store(t + 3, row_of<B, 3, W>(bytes, lanes));
    }
  }
}

// The same of `rows` rows of B * W totals, of which the first `valid` are stored. Common cases are
// compiled by themselves.
template <int W, int B, typename Total>
CNN_ENGINE_INLINE void requantize_rows(const Requantize& q, int rows, int valid, const Total& total,
                                       const std::uint8_t* residual, std::int64_t residual_stride,
                                       std::uint8_t* y, std::int64_t y_stride) {
  const int step = step_of(q.types.y);
  if constexpr (W >= 4) {
    if (step == 1 && rows >= 4 / B) {
      const auto whole = [&](int t, const auto& bytes) {
        __builtin_memcpy(y + t * y_stride, &bytes, B * W);
      };
      const auto some = [&](int t, const auto& bytes) {
        std::uint8_t all[sizeof bytes];
        __builtin_memcpy(all, &bytes, sizeof bytes);
        copy_some(all, y + t * y_stride, valid);
      };
      if (valid < B * W && !residual) {
        return requantize_fours<W, B>(q, rows, total, nullptr, 0, some);
      }
      if (valid >= B * W && !residual) {
        return requantize_fours<W, B>(q, rows, total, nullptr, 0, whole);
      }
      if (valid >= B * W) {
        return requantize_fours<W, B>(q, rows, total, residual, residual_stride, whole);
      }
    }
  }
  for (int t = 0; t < rows; ++t) {
    std::uint8_t all[4 * B * W], added[B * W] = {};
    if (residual) copy_some(residual + t * residual_stride, added, valid < B * W ? valid : B * W);
    for (int b = 0; b < B; ++b) {
      requantize<W>(q, total(t, b), load<W>(q.scale + b * W), residual ? added + b * W : nullptr,
                    all + b * W * step);
    }
    copy_some(all, y + t * y_stride, (valid < B * W ? valid : B * W) * step);
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

#if defined(CNN_ENGINE_QUADS)
// sum += products of four unsigned and four signed bytes.
template <typename V>
CNN_ENGINE_INLINE void multiply_quads(V& sum, V x, V weights) {
#if defined(__AVX512VNNI__)
  if constexpr (sizeof(V) == 64) {
    sum = (V)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)weights);
  } else if constexpr (sizeof(V) == 32) {
    sum = (V)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)x, (__m256i)weights);
  } else {
    sum = (V)_mm_dpbusd_epi32((__m128i)sum, (__m128i)x, (__m128i)weights);
  }
#else
  if constexpr (sizeof(V) == 32) {
    sum = (V)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)weights);
  } else {
    sum = (V)_mm_dpbusd_avx_epi32((__m128i)sum, (__m128i)x, (__m128i)weights);
  }
#endif
}
#endif

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
  static constexpr bool kInParts = false, kJoinsKernelOffsets = true;
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
#if defined(CNN_ENGINE_QUADS)
    multiply_quads(sum, x, weights);
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
  bool aligned;  // whether positions can be read where they are

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
