// Depthwise convolutions of 8-bit integers: one channel and one filter a group.
//
// A lane of 32 bits is a channel. It holds kernel offsets that lie below each other, four bytes
// (VPDPBUSD) or two 16-bit integers (PMADDWD). Rows are interleaved so for a strip of output rows,
// once for all outputs that read a column; each output row has weights of its own, zero where it
// reads no kernel offset. Included only by files that are compiled once for each instruction set.
#pragma once

#include "cpu/byte_table.h"
#include "cpu/integer_lanes.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Of channels of a block, at most.
constexpr int kBlockBytes = 4 * kWide;
// Of the interleaved rows of a block: a part of the first-level cache.
constexpr int kStripBytes = 32 << 10;
constexpr int kLeastOutputs = 8;
constexpr int kOutputTile = kRegisters == 32 ? 4 : 2;

inline bool is_depthwise(const Conv2dShape& p) {
  return p.groups > 1 && p.c == p.groups && p.k == p.c;
}

// int8 is read as uint8, by another sign bit: its number and 128.
inline bool flips(ElementType type) { return type == ElementType::int8; }
inline int unsigned_zero(ElementType type, int zero) { return zero + (flips(type) ? 128 : 0); }

inline int kernel_offsets_of_unit(int passes) {
#if defined(CNN_ENGINE_QUADS)
  return passes == 1 ? 4 : 2;  // wider weights need 16 bits
#else
  return passes > 0 ? 2 : 0;
#endif
}

// Output rows that are computed together, and what is interleaved for them.
struct Strip {
  int kernel_offsets;  // of a unit
  int units;           // of a column
  int rows;            // of outputs
  int outputs;         // of a row, at most
  int columns;         // of inputs, for so many outputs

  Strip(const Conv2dShape& p, int kernel_offsets)
      : kernel_offsets(kernel_offsets),
        units((p.r + kernel_offsets - 1) / kernel_offsets),
        rows(p.dilation_h == 1 ? (units * kernel_offsets - p.r) / p.stride_h + 1 : 1) {
    const int window = (p.s - 1) * p.dilation_w + 1;
    const int most = (kStripBytes / (4 * kBlockBytes * units) - window) / p.stride_w + 1;
    outputs = most > kLeastOutputs ? most : kLeastOutputs;
    if (outputs > p.out_w()) outputs = p.out_w();
    columns = (outputs - 1) * p.stride_w + window;
  }
  // The kernel offset at a position of a column that an output row multiplies; outside of [0, p.r):
  // none.
  int kernel_offset(const Conv2dShape& p, int row, int position) const {
    return position - row * p.stride_h;
  }
  // Units of a block's weights, for each channel; before them are its bias and its scale.
  std::int64_t weights(const Conv2dShape& p) const { return std::int64_t{rows} * units * p.s; }
  std::int64_t floats() const {
    return kBlockBytes / 4 + std::int64_t{units} * columns * kBlockBytes;
  }
};

// Which channel of a block is in a lane of one of its four vectors: PUNPCK interleaves within 128
// bits.
inline int channel_of(int vector, int lane) { return lane / 4 * 16 + 4 * vector + lane % 4; }

// Calls each(width, first channel) for the blocks after the whole ones. The last one begins earlier
// where that saves it from being cut off.
template <typename Each>
void for_tail(int channels, const Each& each) {
  for (int c = channels / kBlockBytes * kBlockBytes; c < channels;) {
    const int left = channels - c;
    const auto block = [&](auto width) {
      const int first = left < width && channels >= width ? channels - width : c;
      each(width, first);
      c = first + width;
    };
    constexpr int kHalf = kBlockBytes < 32 ? kBlockBytes : 32;
    if (left <= 16 || channels < 32) {
      block(std::integral_constant<int, 16>());
    } else if (left <= kHalf || channels < kBlockBytes) {
      block(std::integral_constant<int, kHalf>());
    } else {
      block(std::integral_constant<int, kBlockBytes>());
    }
  }
}

std::int64_t depthwise_packed(const Conv2dShape& p, int passes) {
  const std::int64_t each = 2 + Strip(p, kernel_offsets_of_unit(passes)).weights(p);
  std::int64_t channels = p.c / kBlockBytes * kBlockBytes;
  for_tail(p.c, [&](int width, int) { channels += width; });
  return channels * each;
}

// Calls block(width, first channel) for all blocks.
template <typename Block>
void for_blocks_of_channels(int channels, const Block& block) {
  for (int c = 0; c + kBlockBytes <= channels; c += kBlockBytes) block(kBlockBytes, c);
  for_tail(channels, block);
}

// Writes value(channel) of the channels of a block, 0 of those past the last one.
template <typename Value>
void write_block(std::int32_t* to, const Conv2dShape& p, int width, int first, const Value& value) {
  for (int i = 0; i < width; ++i) {
    const int k = first + channel_of(i / (width / 4), i % (width / 4));
    to[i] = k < p.k ? value(k) : 0;
  }
}

// The bias and the scale of each block of what depthwise_pack packs.
void depthwise_terms(const std::int32_t* bias, const float* scale, std::int32_t* to,
                     const Conv2dShape& p, int passes) {
  const std::int64_t weights = Strip(p, kernel_offsets_of_unit(passes)).weights(p);
  for_blocks_of_channels(p.c, [&](int width, int first) {
    write_block(to, p, width, first, [&](int k) { return bias[k]; });
    write_block(to + width, p, width, first,
                [&](int k) { return load_as<std::int32_t>(scale + k); });
    to += (2 + weights) * width;
  });
}

// [blocks] of [bias, scale, rows of the strip x units x p.s] x [4 vectors][lanes].
void depthwise_pack(const std::int16_t* weight, const std::int32_t* bias, const float* scale,
                    std::int32_t* to, const Conv2dShape& p, int passes) {
  depthwise_terms(bias, scale, to, p, passes);
  const Strip strip(p, kernel_offsets_of_unit(passes));
  const auto unit = [&](int k, int row, int index, int s) {
    std::uint32_t bits = 0;
    for (int i = 0; i < strip.kernel_offsets; ++i) {
      const int kernel_offset = strip.kernel_offset(p, row, index * strip.kernel_offsets + i);
      if (kernel_offset < 0 || kernel_offset >= p.r) continue;
      const int size = 32 / strip.kernel_offsets;
      const auto w =
          static_cast<std::uint32_t>(weight[(std::int64_t{k} * p.r + kernel_offset) * p.s + s]);
      bits |= (w & ((1u << size) - 1)) << (size * i);
    }
    return static_cast<std::int32_t>(bits);
  };
  for_blocks_of_channels(p.c, [&](int width, int first) {
    to += 2 * width;
    for (int row = 0; row < strip.rows; ++row) {
      for (int index = 0; index < strip.units; ++index) {
        for (int s = 0; s < p.s; ++s, to += width) {
          write_block(to, p, width, first, [&](int k) { return unit(k, row, index, s); });
        }
      }
    }
  });
}

// Of each thread: a position of x_zero, and the interleaved rows of a block.
std::int64_t depthwise_floats(const Conv2dShape& p) {
  const std::int64_t two = Strip(p, 2).floats(), four = Strip(p, 4).floats();
  return two > four ? two : four;
}

// ---- vectors ----

// Bytes or 16-bit integers of the lower or upper half of each 128 bits of a and b, in turns.
#if defined(__AVX512BW__)
#define CNN_ENGINE_OF_64(name) \
  if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_##name(-1, (__m512i)a, (__m512i)b);
#else
#define CNN_ENGINE_OF_64(name)
#endif
#if defined(__AVX2__)
#define CNN_ENGINE_OF_32(name) \
  if constexpr (sizeof(V) == 32) return (V)_mm256_##name((__m256i)a, (__m256i)b);
#else
#define CNN_ENGINE_OF_32(name)
#endif
#if defined(__SSE2__)
#define CNN_ENGINE_OF_16(name, type, size, first) \
  if constexpr (sizeof(V) == 16) return (V)_mm_##name((__m128i)a, (__m128i)b);
#else
#define CNN_ENGINE_OF_16(name, type, size, first)      \
  typedef type Parts __attribute__((vector_size(16))); \
  Parts made = (Parts)a;                               \
  for (int i = 0; i < size / 2; ++i) {                 \
    made[2 * i] = ((Parts)a)[first + i];               \
    made[2 * i + 1] = ((Parts)b)[first + i];           \
  }                                                    \
  return (V)made;
#endif
#define CNN_ENGINE_UNPACK(function, name, type, size, first) \
  template <typename V>                                      \
  CNN_ENGINE_INLINE V function(V a, V b) {                   \
    CNN_ENGINE_OF_64(name)                                   \
    CNN_ENGINE_OF_32(name)                                   \
    CNN_ENGINE_OF_16(name, type, size, first)                \
  }
CNN_ENGINE_UNPACK(low_bytes, unpacklo_epi8, std::uint8_t, 16, 0)
CNN_ENGINE_UNPACK(high_bytes, unpackhi_epi8, std::uint8_t, 16, 8)
CNN_ENGINE_UNPACK(low_words, unpacklo_epi16, std::uint16_t, 8, 0)
CNN_ENGINE_UNPACK(high_words, unpackhi_epi16, std::uint16_t, 8, 4)
#undef CNN_ENGINE_UNPACK
#undef CNN_ENGINE_OF_16
#undef CNN_ENGINE_OF_32
#undef CNN_ENGINE_OF_64

// The bytes of a block as 32-bit integers, in the order of channel_of.
template <typename V>
CNN_ENGINE_INLINE void widen_block(V bytes, V (&to)[4]) {
  const V none{}, low = low_bytes(bytes, none), high = high_bytes(bytes, none);
  to[0] = low_words(low, none);
  to[1] = high_words(low, none);
  to[2] = low_words(high, none);
  to[3] = high_words(high, none);
}

// ---- a block of channels ----

struct DepthwiseCall {
  const std::uint8_t* input;
  const std::int32_t* packed;
  Requantize last;
  const std::uint8_t* residual;
  ByteTable then;
  std::uint8_t* output;
  Conv2dPitches pitches;
  int passes;
};

// Outputs [first, first + count) of some rows of an image.
struct Segment {
  const std::uint8_t* image;
  int top;  // the strip's first input row
  int first, count;
  int rows;               // of outputs
  std::int64_t position;  // of the first output of the first row, in the batch
};

template <int PerUnit, int Width>
struct DepthwiseBlock {
  static constexpr int W = Width / 4;
  using V = IntVec<W>;

  const DepthwiseCall& call;
  const Conv2dShape& p;
  const Strip& strip;
  int c;
  const std::int32_t* packed;
  const std::uint8_t* zeros;
  std::int32_t* columns;

  void run(const Segment& at) const {
    const int channels = p.c - c < Width ? p.c - c : Width;
    if (channels < Width) {
      interleave(at, [=](const std::uint8_t* from) {
        std::uint8_t some[Width] = {};
        __builtin_memcpy(some, from, channels);
        return load_as<V>(some);
      });
    } else {
      interleave(at, [](const std::uint8_t* from) { return load_as<V>(from); });
    }
    for (int row = 0; row < at.rows; ++row) {
      int j = 0;
      for (; j + kOutputTile <= at.count; j += kOutputTile) tile<kOutputTile>(at, row, j, channels);
      for (; j < at.count; ++j) tile<1>(at, row, j, channels);
    }
  }

 private:
  template <typename Load>
  CNN_ENGINE_INLINE void interleave(const Segment& at, const Load& load) const {
    const int left = at.first * p.stride_w - p.pad_left;
    const int count = (at.count - 1) * p.stride_w + (p.s - 1) * p.dilation_w + 1;
    const int begin = left < 0 ? (-left < count ? -left : count) : 0;
    const int end = p.w - left < count ? (p.w - left > begin ? p.w - left : begin) : count;
    const std::uint32_t flip = flips(call.last.types.x) ? 0x80808080u : 0;
    const V sign = static_cast<std::int32_t>(flip) - V{};
    for (int unit = 0; unit < strip.units; ++unit) {
      std::int32_t* to = columns + std::int64_t{unit} * strip.columns * Width;
      const std::uint8_t* from[PerUnit];
      std::int64_t step[PerUnit];
      for (int i = 0; i < PerUnit; ++i) {
        const int row = at.top + (unit * PerUnit + i) * p.dilation_h;
        const bool inside = row >= 0 && row < p.h;
        step[i] = inside ? call.pitches.x : 0;
        from[i] = inside ? at.image + (std::int64_t{row} * p.w + left) * step[i] + c : zeros;
      }
      V border[PerUnit];
      for (V& one : border) one = load_as<V>(zeros) ^ sign;
      for (int x = 0; x < begin; ++x) store(border, to + std::int64_t{x} * Width);
      for (int x = begin; x < end; ++x) {
        V rows[PerUnit];
#pragma GCC unroll 4
        for (int i = 0; i < PerUnit; ++i) rows[i] = load(from[i] + x * step[i]) ^ sign;
        store(rows, to + std::int64_t{x} * Width);
      }
      for (int x = end; x < count; ++x) store(border, to + std::int64_t{x} * Width);
    }
  }

  CNN_ENGINE_INLINE static void store(const V (&rows)[PerUnit], std::int32_t* to) {
    V made[4];
    const V low = low_bytes(rows[0], rows[1]), high = high_bytes(rows[0], rows[1]);
    if constexpr (PerUnit == 4) {
      const V next = low_bytes(rows[2], rows[3]), last = high_bytes(rows[2], rows[3]);
      made[0] = low_words(low, next);
      made[1] = high_words(low, next);
      made[2] = low_words(high, last);
      made[3] = high_words(high, last);
    } else {
      const V none{};
      made[0] = low_bytes(low, none);
      made[1] = high_bytes(low, none);
      made[2] = low_bytes(high, none);
      made[3] = high_bytes(high, none);
    }
    __builtin_memcpy(to, made, sizeof made);
  }

  // T outputs of a row.
  template <int T>
  CNN_ENGINE_INLINE void tile(const Segment& at, int row, int first, int channels) const {
    V total[T][4];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) total[t][j] = load_as<V>(packed + j * W);
    }
    const std::int32_t* w = packed + (2 + std::int64_t{row} * strip.units * p.s) * Width;
    for (int unit = 0; unit < strip.units; ++unit) {
      const std::int32_t* x =
          columns + (std::int64_t{unit} * strip.columns + first * p.stride_w) * Width;
      for (int s = 0; s < p.s; ++s, w += Width, x += p.dilation_w * Width) {
        V weights[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) weights[j] = load_as<V>(w + j * W);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            const V inputs = load_as<V>(x + (t * p.stride_w * 4 + j) * W);
#if defined(CNN_ENGINE_QUADS)
            if constexpr (PerUnit == 4) {
              multiply_quads(total[t][j], inputs, weights[j]);
              continue;
            }
#endif
            multiply_pairs(total[t][j], inputs, weights[j]);
          }
        }
      }
    }
    const std::int64_t position = at.position + std::int64_t{row} * p.out_w() + first;
    const std::int64_t step = call.pitches.y * step_of(call.last.types.y);
    std::uint8_t* y = call.output + position * step + c * step_of(call.last.types.y);
    const std::uint8_t* residual =
        call.residual ? call.residual + position * call.pitches.residual + c : nullptr;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      finish(total[t], residual, channels, y + t * step);
      if (residual) residual += call.pitches.residual;
    }
  }

  CNN_ENGINE_INLINE void finish(const V (&total)[4], const std::uint8_t* residual, int channels,
                                std::uint8_t* y) const {
    QuantizedTypes types = call.last.types;
    const auto scale = [&](int j) {
      return load_as<Vec<W>>(packed + Width + j * W);
    };
    if (step_of(types.y) == 4) {
      for (int i = 0; i < Width; ++i) {
        const int j = i / W, k = channel_of(j, i % W);
        const IntVec<1> one = {total[j][i % W]};
        if (k < channels)
          requantize<1>(call.last, one, Vec<1>{scale(j)[i % W]}, nullptr, y + 4 * k);
      }
      return;
    }
    Vec<W> v[4];
    if (residual) {
      std::uint8_t some[Width] = {};
      __builtin_memcpy(some, residual, channels);
      const std::int32_t sign = flips(types.residual) ? static_cast<std::int32_t>(0x80808080u) : 0;
      types.residual_zero = unsigned_zero(types.residual, types.residual_zero);
      V added[4];
      widen_block(load_as<V>(some) ^ (sign - V{}), added);
      for (int j = 0; j < 4; ++j) v[j] = scaled<W>(total[j], scale(j), added[j], types);
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) v[j] = scaled<W>(total[j], scale(j));
    }
    const V bytes = to_bytes<W>(v, types.y_zero, types.low, types.high);
    if (channels == Width) {
      __builtin_memcpy(y, &bytes, sizeof bytes);
    } else {
      __builtin_memcpy(y, &bytes, channels);
    }
  }
};

// ---- all ----

template <int PerUnit>
void depthwise_of(const DepthwiseCall& call, const Scratch& scratch, const Conv2dShape& p,
                  int threads) {
  const Strip strip(p, PerUnit);
  const int out_h = p.out_h(), out_w = p.out_w(), whole = p.c / kBlockBytes;
  const int strips = (out_h + strip.rows - 1) / strip.rows;
  const std::int64_t tasks = std::int64_t{p.n} * strips;
  // Where strips are few, blocks of channels are shared out too; the tail overlaps the last one.
  int shares = 1;
  while (2 * shares <= whole && tasks * shares < 4 * threads && threads > 1) shares *= 2;
  const std::int64_t cost = std::int64_t{strip.rows} * out_w * p.c * (p.r * p.s + 4) / kNarrow;
  const std::int64_t block_size = (2 + strip.weights(p)) * kBlockBytes;
  parallel_for(tasks * shares, cost / shares, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    auto* zeros = reinterpret_cast<std::uint8_t*>(part.data());
    __builtin_memset(zeros, call.last.types.x_zero, kBlockBytes);
    auto* columns = reinterpret_cast<std::int32_t*>(zeros + kBlockBytes);
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t n = index / shares / strips;
      const int row = static_cast<int>(index / shares % strips) * strip.rows;
      const int share = static_cast<int>(index % shares);
      const int from = whole * share / shares, to = whole * (share + 1) / shares;
      const bool has_tail = share == shares - 1;
      const int c = from * kBlockBytes, channels = (has_tail ? p.c : to * kBlockBytes) - c;
      for (int first = 0; first < out_w; first += strip.outputs) {
        const Segment at{call.input + n * p.h * p.w * call.pitches.x,
                         row * p.stride_h - p.pad_top,
                         first,
                         out_w - first < strip.outputs ? out_w - first : strip.outputs,
                         out_h - row < strip.rows ? out_h - row : strip.rows,
                         (n * out_h + row) * out_w + first};
        const std::int32_t* packed = call.packed + from * block_size;
        const auto block = [&](auto width, int channel) {
          constexpr int Width = decltype(width)::value;
          DepthwiseBlock<PerUnit, Width>{call, p, strip, channel, packed, zeros, columns}.run(at);
          packed += block_size / kBlockBytes * Width;
        };
        for (int i = from; i < to; ++i) {
          block(std::integral_constant<int, kBlockBytes>(), i * kBlockBytes);
        }
        if (has_tail) for_tail(p.c, block);
        for (int i = 0; i < at.rows; ++i) {
          const std::int64_t position = at.position + std::int64_t{i} * out_w;
          call.then.apply(call.output + position * call.pitches.y + c, call.pitches.y, at.count,
                          channels);
        }
      }
    }
  });
}

void depthwise(const DepthwiseCall& call, const Scratch& scratch, const Conv2dShape& p,
               int threads) {
#if defined(CNN_ENGINE_QUADS)
  if (kernel_offsets_of_unit(call.passes) == 4) return depthwise_of<4>(call, scratch, p, threads);
#endif
  depthwise_of<2>(call, scratch, p, threads);
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
