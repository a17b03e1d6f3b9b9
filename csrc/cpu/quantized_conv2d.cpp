// quantized_conv2d, compiled once for each set of instructions that multiplies integers.
#include "ops/quantized_conv2d.h"

#include <cstring>

#include "cpu/channels.h"
#include "cpu/integer_lanes.h"
#include "cpu/integer_tiles.h"
#include "cpu/kernels.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Before the packed weights: what they were packed for, and numbers of each filter, with as many
// more as a vector may read past them.
struct Packed {
  static constexpr int kHeader = 64, kPast = 64;

  struct Header {
    char instructions[16];
    int passes;
  };

  static std::int64_t numbers(const Conv2dShape& p) {
    return (std::int64_t{p.k} + kPast + 15) / 16 * 64;
  }
  static std::int64_t before(const Conv2dShape& p) { return kHeader + 2 * numbers(p); }

  char* memory;
  const Conv2dShape& p;

  Header& header() const { return *reinterpret_cast<Header*>(memory); }
  std::int32_t* bias() const { return reinterpret_cast<std::int32_t*>(memory + kHeader); }
  float* scale() const { return reinterpret_cast<float*>(memory + kHeader + numbers(p)); }
  std::int32_t* weights() const { return reinterpret_cast<std::int32_t*>(memory + before(p)); }
};

#define CNN_ENGINE_TEXT_OF(name) #name
#define CNN_ENGINE_TEXT(name) CNN_ENGINE_TEXT_OF(name)
constexpr const char* kInstructions = CNN_ENGINE_TEXT(CNN_ENGINE_ISA);

bool is_depthwise(const Conv2dShape& p) { return p.groups > 1 && p.c == p.groups && p.k == p.c; }

// The sum of (x - zero) * w is that of x * w less zero times that of w, modulo 2^32.
void subtract_zero(const std::int16_t* weight, std::int32_t* bias, const Conv2dShape& p, int zero) {
  for (int k = 0; k < p.k; ++k) {
    std::uint32_t sum = 0;
    for (int t = 0; t < p.taps(); ++t) sum += *weight++;
    bias[k] = static_cast<std::int32_t>(static_cast<std::uint32_t>(bias[k]) - sum * zero);
  }
}

// ---- one channel and one filter a group ----

// Pairs of taps, which PMADDWD sums: [pairs][C], each with the weights of both in 16 bits.
int tap_pairs(const Conv2dShape& p) { return (p.r * p.s + 1) / 2; }

void pack_depthwise(const std::int16_t* weight, std::int32_t* packed, const Conv2dShape& p) {
  const int area = p.r * p.s;
  for (int pair = 0; pair < tap_pairs(p); ++pair) {
    for (int c = 0; c < p.c; ++c) {
      const std::int16_t* own = weight + std::int64_t{c} * area + 2 * pair;
      const std::uint32_t high = 2 * pair + 1 < area ? static_cast<std::uint16_t>(own[1]) : 0;
      *packed++ = static_cast<std::int32_t>(high << 16 | static_cast<std::uint16_t>(own[0]));
    }
  }
}

// Of each thread: a place of x_zero, and where an output's taps are.
std::int64_t depthwise_floats(const Conv2dShape& p) {
  return (p.c + 63) / 64 * 16 + (std::int64_t{4} * tap_pairs(p) + 15) / 16 * 16;
}

// W channels of an output. Zero points are in the bias.
template <bool Signed, int W>
CNN_ENGINE_INLINE void depthwise_block(const std::uint8_t* const* taps, const std::int32_t* weights,
                                       const Requantize& last, const Conv2dShape& p, int c,
                                       const std::uint8_t* residual, std::uint8_t* y) {
  IntVec<W> total = load_as<IntVec<W>>(last.bias + c);
  for (int pair = 0; pair < tap_pairs(p); ++pair) {
    IntVec<W> even = widened<W>(taps[2 * pair] + c, Signed);
    if (Signed) even &= 0xffff;
    const IntVec<W> odd = widened<W>(taps[2 * pair + 1] + c, Signed);
    multiply_pairs(total, even | (odd << 16),
                   load_as<IntVec<W>>(weights + std::int64_t{pair} * p.c + c));
  }
  requantize<W>(last, total, load_as<Vec<W>>(last.scale + c), residual ? residual + c : nullptr,
                y + c * step_of(last.types.y));
}

void depthwise(const std::uint8_t* input, const std::int32_t* weights, const Requantize& last,
               const std::uint8_t* residual, std::uint8_t* output, const Scratch& scratch,
               const Conv2dShape& p, const Conv2dPitches& pitches, int threads) {
  const int out_h = p.out_h(), out_w = p.out_w(), area = p.r * p.s;
  const std::int64_t cost = std::int64_t{out_w} * p.c * (area + 4) / kNarrow;
  const int step = step_of(last.types.y);
  parallel_for(std::int64_t{p.n} * out_h, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    auto* zeros = reinterpret_cast<std::uint8_t*>(part.data());
    __builtin_memset(zeros, last.types.x_zero, p.c);
    auto** taps = reinterpret_cast<const std::uint8_t**>(part.data() + (p.c + 63) / 64 * 16);
    taps[2 * tap_pairs(p) - 1] = zeros;
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t image = index / out_h * p.h;
      const int top = static_cast<int>(index % out_h) * p.stride_h - p.pad_top;
      for (int j = 0; j < out_w; ++j) {
        for (int a = 0; a < area; ++a) {
          const int y = top + a / p.s * p.dilation_h;
          const int x = j * p.stride_w - p.pad_left + a % p.s * p.dilation_w;
          const bool inside = y >= 0 && y < p.h && x >= 0 && x < p.w;
          taps[a] = inside ? input + ((image + y) * p.w + x) * pitches.x : zeros;
        }
        const std::int64_t place = index * out_w + j;
        const std::uint8_t* added = residual ? residual + place * pitches.residual : nullptr;
        std::uint8_t* to = output + place * pitches.y * step;
        const auto run = [&](auto is_signed) {
          for_channels(p.c, [&](auto width, int c) {
            depthwise_block<is_signed, decltype(width)::value>(taps, weights, last, p, c, added,
                                                               to);
          });
        };
        if (last.types.x == ElementType::int8) {
          run(std::true_type());
        } else {
          run(std::false_type());
        }
      }
    }
  });
}

// ---- all others ----

// Floats of an image of planes whose channels are brought side by side.
std::int64_t turned_bytes(const Conv2dShape& p, bool planar) {
  return planar ? std::int64_t{p.n} * p.h * p.w * 4 * units<Integer>(p.c) + 64 : 0;
}

// [N, C, H, W] to [N, H, W, whole units].
void turn(const std::uint8_t* from, std::uint8_t* to, const Conv2dShape& p, int threads) {
  const std::int64_t area = std::int64_t{p.h} * p.w, pitch = 4 * units<Integer>(p.c);
  parallel_for(std::int64_t{p.n} * p.h, std::int64_t{p.w} * p.c, threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   const std::uint8_t* own = from + row / p.h * p.c * area + row % p.h * p.w;
                   std::uint8_t* place = to + row * p.w * pitch;
                   for (int c = 0; c < p.c; ++c) {
                     const std::uint8_t* plane = own + c * area;
                     for (int x = 0; x < p.w; ++x) place[x * pitch + c] = plane[x];
                   }
                   for (int c = p.c; c < pitch; ++c) {
                     for (int x = 0; x < p.w; ++x) place[x * pitch + c] = 0;
                   }
                 }
               });
}

std::int64_t scratch_floats(const Conv2dShape& p) {
  if (is_depthwise(p)) return depthwise_floats(p);
  return direct_scratch<Integer>(p);
}

}  // namespace

std::int64_t quantized_conv2d_packed(const Conv2dShape& p, int largest) {
  const std::int64_t units = is_depthwise(p) ? std::int64_t{tap_pairs(p)} * p.c
                                             : direct_packed<Integer>(p, false, passes_of(largest));
  return Packed::before(p) + 4 * units;
}

void quantized_conv2d_pack(const std::int16_t* weight, const std::int32_t* bias, const float* scale,
                           void* packed, const Conv2dShape& shape, const QuantizedTypes& types,
                           int largest) {
  const Conv2dShape p = shape;
  const Packed to{static_cast<char*>(packed), p};
  __builtin_memset(packed, 0, Packed::before(p));
  std::strncpy(to.header().instructions, kInstructions, 15);
  const int passes = to.header().passes = passes_of(largest);
  if (bias) std::memcpy(to.bias(), bias, sizeof *bias * p.k);
  if (scale) std::memcpy(to.scale(), scale, sizeof *scale * p.k);
  if (is_depthwise(p)) {
    subtract_zero(weight, to.bias(), p, types.x_zero);
    return pack_depthwise(weight, to.weights(), p);
  }
#if defined(CNN_ENGINE_QUADS)
  subtract_zero(weight, to.bias(), p, Centring(types, p, p.c).zero);
#endif
  const int area = p.r * p.s, channels = p.group_channels(), own = units<Integer>(channels);
  std::int32_t* unit = to.weights();
  const Taps<Integer> taps(p, false, passes);
  for_packed<Integer>(p, taps, [&](int filter, int index, int c) {
    std::int32_t value = 0;
    // Of joined taps, which one it is, and its unit; the last units may be past all of them.
    const int a = taps.first(index) + c / own, first = c % own * Integer::kChannels;
    const int pass = taps.pass(index);
    if (filter >= 0 && c < taps.taps * own) {
      for (int i = 0; i < Integer::kChannels && first + i < channels; ++i) {
        const int w = weight[std::int64_t{filter} * p.taps() + (first + i) * area + a];
        constexpr int kBits = 32 / Integer::kChannels;
        const auto share = static_cast<std::uint32_t>(share_of(w, pass, passes));
        const std::uint32_t bits = share & ((1u << kBits) - 1);
        value |= static_cast<std::int32_t>(bits << (kBits * i));
      }
    }
    *unit++ = value;
  });
}

std::int64_t quantized_conv2d_workspace(const Conv2dShape& shape, bool planar, int threads) {
  return turned_bytes(shape, planar) + Scratch::bytes(threads, scratch_floats(shape));
}

void quantized_conv2d(const void* input, const void* packed, const void* residual, void* output,
                      void* workspace, const Conv2dShape& shape, const Conv2dPitches& pitches,
                      const QuantizedTypes& types, bool planar, int threads) {
  const Conv2dShape p = shape;
  const Packed from{static_cast<char*>(const_cast<void*>(packed)), p};
  if (std::strcmp(from.header().instructions, kInstructions) != 0) {
    throw std::invalid_argument(std::string("packed weights: expected those of ") + kInstructions +
                                ", found those of " + from.header().instructions);
  }
  if (p.n == 0) return;
  auto* turned = static_cast<std::uint8_t*>(workspace);
  const Scratch scratch(turned + turned_bytes(p, planar), threads, scratch_floats(p));
  const auto* x = static_cast<const std::uint8_t*>(input);
  const auto* added = static_cast<const std::uint8_t*>(residual);
  auto* y = static_cast<std::uint8_t*>(output);
  const Requantize last{from.bias(), from.scale(), types};
  Conv2dPitches own = pitches;
  if (planar) {
    turn(x, turned, p, threads);
    x = turned;
    own.x = 4 * units<Integer>(p.c);
  }
  if (is_depthwise(p)) {
    return depthwise(x, from.weights(), last, added, y, scratch, p, own, threads);
  }
  const DirectOf<Integer, Centring, Nothing> call{
      x,   from.weights(), added, Centring(types, p, own.x), y,
      own, last,           {},    step_of(types.y),          from.header().passes};
  if (is_pointwise(p)) return pointwise(call, scratch, p, threads);
  banded(call, scratch, p, false, threads);
}

extern const IntegerKernels integer_kernels = {
#define CNN_ENGINE_INTEGER_OPERATOR(name) name,
#include "ops/operators.def"
};

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
