// quantized_conv2d, compiled once for each set of instructions that multiplies integers.
#include "ops/quantized_conv2d.h"

#include <cstring>

#include "cpu/byte_table.h"
#include "cpu/integer_lanes.h"
#include "cpu/integer_tiles.h"
#include "cpu/kernels.h"
#include "cpu/quantized_depthwise.h"

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

// The sum of (x - zero) * w is that of x * w less zero times that of w, modulo 2^32.
void subtract_zero(const std::int16_t* weight, std::int32_t* bias, const Conv2dShape& p, int zero) {
  for (int k = 0; k < p.k; ++k) {
    std::uint32_t sum = 0;
    for (int t = 0; t < p.filter_size(); ++t) sum += *weight++;
    bias[k] = static_cast<std::int32_t>(static_cast<std::uint32_t>(bias[k]) - sum * zero);
  }
}

// Floats of an image of planes whose channels are brought side by side.
std::int64_t turned_bytes(const Conv2dShape& p, bool planar) {
  return planar ? std::int64_t{p.n} * p.h * p.w * 4 * units<Integer>(p.c) + 64 : 0;
}

// [N, C, H, W] to [N, H, W, whole units], four channels at once.
void turn(const std::uint8_t* from, std::uint8_t* to, const Conv2dShape& p, int threads) {
  const std::int64_t area = std::int64_t{p.h} * p.w, pitch = 4 * units<Integer>(p.c);
  parallel_for(std::int64_t{p.n} * p.h, std::int64_t{p.w} * p.c, threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   const std::uint8_t* own = from + row / p.h * p.c * area + row % p.h * p.w;
                   for (int c = 0; c < pitch; c += 4) {
                     // Channels past the last one are read as another, and taken out.
                     const std::uint8_t* planes[4];
                     std::uint32_t mask = 0;
                     for (int i = 0; i < 4; ++i) {
                       planes[i] = own + (c + i < p.c ? c + i : 0) * area;
                       if (c + i < p.c) mask |= 0xffu << (8 * i);
                     }
                     std::uint8_t* position = to + row * p.w * pitch + c;
                     for (int x = 0; x < p.w; ++x) {
                       const std::uint32_t unit = planes[0][x] | planes[1][x] << 8 |
                                                  planes[2][x] << 16 |
                                                  static_cast<std::uint32_t>(planes[3][x]) << 24;
                       const std::uint32_t kept = unit & mask;
                       __builtin_memcpy(position + x * pitch, &kept, sizeof kept);
                     }
                   }
                 }
               });
}

// Of which the compiler knows nothing from here on.
template <typename V>
CNN_ENGINE_INLINE void opaque(V& value) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(value));
#else
  asm volatile("" : "+w"(value));
#endif
}

std::int64_t scratch_floats(const Conv2dShape& p) {
  if (is_depthwise(p)) return depthwise_floats(p);
  return direct_scratch<Integer>(p);
}

void check_instructions(const Packed& packed) {
  if (std::strcmp(packed.header().instructions, kInstructions) != 0) {
    throw std::invalid_argument(std::string("packed weights: expected those of ") + kInstructions +
                                ", found those of " + packed.header().instructions);
  }
}

// What a call reads and writes beside weights.
struct Operands {
  const void *input, *residual, *table;
  void* output;
  Conv2dPitches pitches;
};

void run(const Operands& at, const std::int32_t* weights, const Requantize& last, int passes,
         char* workspace, const Conv2dShape& shape, bool planar, int threads) {
  const Conv2dShape p = shape;
  if (p.n == 0) return;
  auto* turned = reinterpret_cast<std::uint8_t*>(workspace);
  const Scratch scratch(turned + turned_bytes(p, planar), threads, scratch_floats(p));
  const auto* x = static_cast<const std::uint8_t*>(at.input);
  const auto* added = static_cast<const std::uint8_t*>(at.residual);
  auto* y = static_cast<std::uint8_t*>(at.output);
  const ByteTable then{static_cast<const std::uint8_t*>(at.table)};
  Conv2dPitches own = at.pitches;
  if (planar) {
    turn(x, turned, p, threads);
    x = turned;
    own.x = 4 * units<Integer>(p.c);
  }
  if (is_depthwise(p)) {
    const DepthwiseCall call{x, weights, last, added, then, y, own, passes};
    return depthwise(call, scratch, p, threads);
  }
  const DirectOf<Integer, Centring, ByteTable> call{
      x,   weights, added, Centring(last.types, p, own.x), y,
      own, last,    then,  step_of(last.types.y),          passes};
  if (is_pointwise(p)) return pointwise(call, scratch, p, threads);
  banded(call, scratch, p, false, threads);
}

// Biases and scales of a call, and a depthwise convolution's weights, beside which they stand.
std::int64_t terms_bytes(const Conv2dShape& p) {
  const std::int64_t four = depthwise_packed(p, 1), two = depthwise_packed(p, 2);
  const std::int64_t weights = is_depthwise(p) ? 4 * (four > two ? four : two) : 0;
  return (2 * Packed::numbers(p) + weights + 63) / 64 * 64;
}

}  // namespace

std::int64_t quantized_conv2d_packed(const Conv2dShape& p, int largest) {
  const std::int64_t units = is_depthwise(p) ? depthwise_packed(p, passes_of(largest))
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
    subtract_zero(weight, to.bias(), p, unsigned_zero(types.x, types.x_zero));
    return depthwise_pack(weight, to.bias(), to.scale(), to.weights(), p, passes);
  }
#if defined(CNN_ENGINE_QUADS)
  subtract_zero(weight, to.bias(), p, Centring(types, p, p.c).zero);
#endif
  const int area = p.r * p.s, channels = p.group_channels(), own = units<Integer>(channels);
  std::int32_t* unit = to.weights();
  const KernelOffsets<Integer> kernel_offsets(p, false, passes);
  for_packed<Integer>(p, kernel_offsets, [&](int filter, int index, int c) {
    std::int32_t value = 0;
    // Of joined kernel offsets, which one it is, and its unit; the last units may be past all of
    // them.
    const int a = kernel_offsets.first(index) + c / own, first = c % own * Integer::kChannels;
    const int pass = kernel_offsets.pass(index);
    if (filter >= 0 && c < kernel_offsets.joined * own) {
      for (int i = 0; i < Integer::kChannels && first + i < channels; ++i) {
        const int w = weight[std::int64_t{filter} * p.filter_size() + (first + i) * area + a];
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

void quantized_conv2d(const void* input, const void* packed, const void* residual,
                      const void* table, void* output, void* workspace, const Conv2dShape& shape,
                      const Conv2dPitches& pitches, const QuantizedTypes& types, bool planar,
                      int threads) {
  const Packed from{static_cast<char*>(const_cast<void*>(packed)), shape};
  check_instructions(from);
  run({input, residual, table, output, pitches}, from.weights(), {from.bias(), from.scale(), types},
      from.header().passes, static_cast<char*>(workspace), shape, planar, threads);
}

std::int64_t quantized_conv2d_computed_workspace(const Conv2dShape& shape, bool planar,
                                                 int threads) {
  return terms_bytes(shape) + quantized_conv2d_workspace(shape, planar, threads);
}

void quantized_conv2d_computed(const ComputedOperands& at, const Conv2dShape& shape,
                               const Conv2dPitches& pitches, ElementType y, int scales, bool planar,
                               int threads) {
  const Conv2dShape p = shape;
  const Packed from{static_cast<char*>(const_cast<void*>(at.packed)), p};
  check_instructions(from);
  const int zero = at.x_zero ? *at.x_zero : 0;
  auto* terms = static_cast<char*>(at.workspace);
  auto* sums = reinterpret_cast<std::int32_t*>(terms);
  auto* factors = reinterpret_cast<float*>(terms + Packed::numbers(p));
  __builtin_memset(terms, 0, 2 * Packed::numbers(p));
  for (int k = 0; k < p.k; ++k) {
    const std::uint32_t own = at.bias ? at.bias[k] : 0, of_one = from.bias()[k];
    sums[k] = static_cast<std::int32_t>(own + of_one * zero);
    if (at.scale) factors[k] = at.scale[scales == 1 ? 0 : k];
  }
  const std::int32_t* weights = from.weights();
  const int passes = from.header().passes;
  if (is_depthwise(p)) {
    auto* own = reinterpret_cast<std::int32_t*>(terms + 2 * Packed::numbers(p));
    std::memcpy(own, weights, 4 * depthwise_packed(p, passes));
    depthwise_terms(sums, factors, own, p, passes);
    weights = own;
  }
  const QuantizedTypes types{ElementType::uint8, zero, y, 0, 0, 0, ElementType::uint8, 0, 0.0f};
  run({at.input, nullptr, nullptr, at.output, pitches}, weights, {sums, factors, types}, passes,
      terms + terms_bytes(p), p, planar, threads);
}

std::int64_t integer_burst(std::int64_t rounds) {
#if defined(CNN_ENGINE_INTEGER_TILES)
  return burst_of_tiles(rounds);
#else
  using V = IntVec<kWide>;
  V accumulators[8] = {}, weights{};
  std::int32_t x = 0;
  asm volatile("" : "+r"(x));
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 8
    for (V& sum : accumulators) {
      opaque(weights);
      Integer::multiply_add(sum, weights, x);
    }
  }
  for (V& sum : accumulators) opaque(sum);
  return rounds * 8 * kWide * Integer::kChannels;
#endif
}

extern const IntegerKernels integer_kernels = {
#define CNN_ENGINE_INTEGER_OPERATOR(name) name,
#include "ops/operators.def"
};

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
