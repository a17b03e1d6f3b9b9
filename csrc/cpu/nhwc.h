// The inner loop of products over images whose channels lie side by side:
//
//   y[t, k] += sum over kernel offsets a, channels c of x[t * stride + kernel_offsets[a] + c] *
//   w[a, c, k]
//
// with k on SIMD lanes and a tile of rows t by vectors of k in registers. Channels are cut into
// parts, each summed by itself in the order a, c and then added to what the parts before it gave:
// rounding errors are those of short sums, and a part's weights stay in the first-level cache,
// while those that follow are asked for. Included only by files that are compiled once for each
// instruction set.
//
// x and the packed weights consist of units of four bytes. A lane says what a unit holds, and how
// units are multiplied: one channel in float32, two in bfloat16 or 16-bit integers, four in 8-bit
// integers. With the instruction set it is one entry of a table: of the code below, only what a
// lane says of itself differs.
#pragma once

#include <limits>
#include <type_traits>
#include <utility>

#include "cpu/blocked.h"
#include "cpu/sigmoid.h"
#include "ops/unary.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void unary(const float* input, float* output, std::int64_t size, UnaryFunction function,
           float alpha, float beta, int threads);

// Filters are packed in groups of so many, whatever the width of the vectors is, missing ones zero:
// [groups][parts][kernel offsets][channels of the part][kFilterGroup].
constexpr int kFilterGroup = 16;

// Types and tables that files of one instruction set share, which is why they are in no unnamed
// namespace.

// What comes next, so many runs of lines: they are asked for while others are multiplied, a line a
// product. First weights, and then what is read and written after them.
struct Prefetch {
  const float* run;
  std::int64_t lines, step;  // of a run; from one to the next
  int runs;
  Prefetch* then = nullptr;
  std::int64_t asked = 0;

  // The next `count` lines, one after the other; null where all have been asked for.
  CNN_ENGINE_INLINE const float* take(std::int64_t count) {
    Prefetch* at = this;
    while (at->runs <= 0) {
      at = at->then;
      if (!at) return nullptr;
    }
    const float* from = at->run + at->asked * kFilterGroup;
    at->asked += count;
    if (at->asked >= at->lines) {
      at->asked = 0;
      at->run += at->step;
      --at->runs;
    }
    return from;
  }
};

// One channel in a unit: what a lane says of itself.
struct Float32 {
  using Input = float;  // of x in memory, before a prologue or a border makes units of it
  using Unit = float;
  using Residual = float;
  using Output = float;
  using Last = Epilogue;                   // what follows a sum
  static constexpr int kChannels = 1;      // of a unit
  static constexpr bool kWritten = false;  // whether units are always written out before
  static constexpr bool kInParts = true;   // whether long sums are summed in parts, through y
  // Whether what is side by side in a band, kernel offsets of a row among it, is one run of
  // channels.
  static constexpr bool kJoinsKernelOffsets = false;
  static constexpr int kRunRows = 96;  // positions of a run of a 1x1 convolution, at most
  // Outputs of a row up to which what they read is written out for each, though it is as often.
  static constexpr int kUnrolledRow = 0;
  static constexpr int kMostPasses = 1;
  static constexpr int kSlack = 0;  // units that are read past the last one, and not used
  template <int W>
  using Sum = Vec<W>;

  // Units of a run of channels as weights are packed.
  static constexpr int padded(int units) { return units; }
  // The unit of packed weights that begins at `weight`: see direct_pack.
  CNN_ENGINE_INLINE static float packed(const float* weight, int, int) { return *weight; }
  template <typename V>
  CNN_ENGINE_INLINE static void multiply_add(V& sum, V weights, float value) {
    sum += weights * value;
  }
};

// The kernel offsets of some outputs, where they are not all: offsets in x, and which of all kernel
// offsets they are.
struct KernelOffsetsInside {
  const std::int64_t* kernel_offsets;
  const std::int64_t* positions;
  int count;
};

// Tiles of B vectors of W filters, one below the other.
template <typename Lane>
struct TileOf {
  int tiles;
  const typename Lane::Unit* x;
  std::int64_t x_stride;
  const std::int64_t* kernel_offsets;
  int kernel_offset_count, channels;
  const typename Lane::Unit* w;
  std::int64_t group_size;
  typename Lane::Output* y;
  std::int64_t y_stride;
  bool first;                       // y is not read
  const typename Lane::Last* last;  // what follows the sum, or null
  std::int64_t residual_stride = 0;
  const typename Lane::Residual* residual;  // or null
  int valid;                                // filters that there are
  Prefetch* prefetch;                       // what is brought to the second-level cache meanwhile
  const std::int64_t* positions =
      nullptr;  // of the kernel offsets' weights; null: one after the other
};

using NhwcTile = TileOf<Float32>;

template <typename Lane>
using TileFunction = void (*)(const TileOf<Lane>&);
using NhwcTileFunction = TileFunction<Float32>;

constexpr int kNhwcMostRows = 14;
// Vectors of a tile: as many as one group of filters at least where registers are few.
constexpr int kNhwcVectors = kRegisters == 32 ? 4 : 2;

// By vectors and rows; null where there is none of so many rows.
template <typename Lane>
struct TilesOf {
  TileFunction<Lane> wide[kNhwcVectors + 1][kNhwcMostRows + 1] = {};
  TileFunction<Lane> narrow[kNhwcMostRows + 1] = {};  // one vector of kNarrow
};
extern const TilesOf<Float32> nhwc_tiles;  // nhwc_tiles.h

namespace {

inline const TilesOf<Float32>& tiles_of(Float32) { return nhwc_tiles; }

// What is done to a sum: in registers where that takes a few instructions, else to rows that are
// still in a cache.
struct Activation {
  UnaryFunction function;
  float alpha, beta;
  float lowest = -std::numeric_limits<float>::infinity();
  float highest = std::numeric_limits<float>::infinity();
  bool hard_swish = false;
  bool in_registers = true;

  Activation(UnaryFunction function, float alpha, float beta)
      : function(function), alpha(alpha), beta(beta) {
    if (function == UnaryFunction::relu) {
      lowest = 0.0f;
    } else if (function == UnaryFunction::clip) {
      lowest = alpha;
      highest = beta;
    } else if (function == UnaryFunction::hard_swish) {
      hard_swish = true;
    } else {
      in_registers = false;
    }
  }

  Epilogue epilogue(const float* bias) const {
    return {bias, nullptr, lowest, highest, hard_swish};
  }

  void apply(float* y, std::int64_t stride, std::int64_t rows, int count) const {
    if (in_registers) return;
    const std::int64_t runs = stride == count ? 1 : rows,
                       run = stride == count ? rows * count : count;
    for (std::int64_t i = 0; i < runs; ++i, y += stride) {
#if defined(__AVX512F__)
      if (const auto part = sixteens_of(function)) {
        part(y, y, run, alpha);
        continue;
      }
#endif
      unary(y, y, run, function, alpha, beta, 1);
    }
  }
};

// Products of a part of a sum: of a block of filters, their weights fill 32 KB at most.
constexpr int kPartTerms = 128;
// The same of sums of fewer products than kLongSum: one part would be nearly all of them, and its
// error, in the light networks that have such sums, the largest.
constexpr int kShortPartTerms = 64, kLongSum = 256;

constexpr int filter_groups(int filters) { return (filters + kFilterGroup - 1) / kFilterGroup; }

// Filters of a share: a multiple of so many.
constexpr int kShareFilters = 64;

// The first filter of a share, or of the one past the last.
inline int share_begin(int filters, int share, int shares) {
  const int blocks = (filters + kShareFilters - 1) / kShareFilters;
  const int first = static_cast<int>(std::int64_t{blocks} * share / shares) * kShareFilters;
  return first < filters ? first : filters;
}

// Rows of a product in tasks, and the filters of each in shares, so that there is something for
// each thread. Where the weights are more than what they are multiplied by, threads share out the
// filters first, so that each reads only some of the weights; else the rows.
struct TaskSplit {
  std::int64_t rows, tasks;
  int shares = 1;

  // `most`, `least`: rows of a task; fewer than the least are made only where there are no more.
  // `images`: how many times there are such rows.
  TaskSplit(std::int64_t rows, std::int64_t most, std::int64_t least, int filters, bool by_filters,
            int threads, int images = 1)
      : rows(rows), tasks((rows + most - 1) / most) {
    if (threads == 1) return;
    const std::int64_t wanted = (std::int64_t{4} * threads + images - 1) / images;
    const auto share_filters = [&] {
      const int blocks = filters / kShareFilters;
      while (shares < blocks && (tasks * shares < wanted || tasks * images * shares % threads)) {
        ++shares;
      }
    };
    if (by_filters) share_filters();
    if (tasks * shares < 2 * wanted) {
      const std::int64_t even = (tasks * shares + wanted - 1) / wanted * wanted / shares;
      const std::int64_t possible = (rows + least - 1) / least;
      const std::int64_t more = even < possible ? even : possible;
      if (more > tasks && !(by_filters && tasks * shares >= wanted)) tasks = more;
    }
    if (!by_filters) share_filters();
  }
  std::int64_t first(std::int64_t task) const { return rows * task / tasks; }
};

// The channels of a sum in parts of nearly the same length.
struct ChannelParts {
  int channels, count;

  CNN_ENGINE_INLINE explicit ChannelParts(int channels) : channels(channels), count(1) {}
  CNN_ENGINE_INLINE ChannelParts(int channels, int kernel_offsets) : channels(channels) {
    const std::int64_t terms = std::int64_t{channels} * kernel_offsets;
    const int most = terms < kLongSum ? kShortPartTerms : kPartTerms;
    count = static_cast<int>((terms + most - 1) / most);
    if (count > channels) count = channels;
  }
  CNN_ENGINE_INLINE int first(int part) const {
    return static_cast<int>(std::int64_t{channels} * part / count);
  }
};

template <typename Lane>
struct GemmOf {
  const std::int64_t* kernel_offsets;  // offsets in x
  int kernel_offset_count;
  ChannelParts parts;
  std::int64_t stride;                 // of x, from row to row
  const typename Lane::Unit* weights;  // packed
  int filters;
  std::int64_t y_stride, residual_stride;
  int y_step = 1;  // of y, from filter to filter

  CNN_ENGINE_INLINE std::int64_t group_size() const {
    return std::int64_t{kernel_offset_count} * parts.channels * kFilterGroup;
  }
};
using Gemm = GemmOf<Float32>;

#if defined(__AVX2__)
CNN_ENGINE_INLINE __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// The first `count` lanes of a vector, of at least one: the others are not read or written, and 0.
template <int W>
CNN_ENGINE_INLINE void store_some(float* to, Vec<W> value, int count) {
  if (count >= W) return store<W>(to, value);
#if defined(__AVX512F__)
  if constexpr (W == 16) return _mm512_mask_storeu_ps(to, (1u << count) - 1, value);
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) return _mm256_maskstore_ps(to, first_lanes(count), value);
#endif
  for (int i = 0; i < count; ++i) to[i] = value[i];
}

template <int W>
CNN_ENGINE_INLINE Vec<W> load_some(const float* from, int count) {
  if (count >= W) return load<W>(from);
#if defined(__AVX512F__)
  if constexpr (W == 16) return _mm512_maskz_loadu_ps((1u << count) - 1, from);
#endif
#if defined(__AVX2__)
  if constexpr (W == 8) return _mm256_maskload_ps(from, first_lanes(count));
#endif
  Vec<W> value{};
  for (int i = 0; i < count; ++i) value[i] = from[i];
  return value;
}

// Rows of a tile that fit the registers beside B weights and a value; of one vector as many as half
// of the usual rows of an image have.
template <int B>
constexpr int kNhwcRows = kRegisters == 32 ? (B == 4   ? 6
                                              : B == 3 ? 8
                                              : B == 2 ? 12
                                                       : 14)
                                           : (B == 2 ? 6 : 12);

// Filters [begin, end) as blocks of vectors of one width: body(first filter, functions by rows,
// most rows, filters of the block).
template <typename Lane = Float32, typename Body>
CNN_ENGINE_INLINE void for_filter_blocks(int begin, int end, const Body& body) {
  const TilesOf<Lane>& functions = tiles_of(Lane());
  int vectors = (end - begin) / kWide;
  int k = begin;
  // Blocks of nearly the same number of vectors.
  for (int blocks = (vectors + kNhwcVectors - 1) / kNhwcVectors; blocks > 0; --blocks) {
    const int size = kWide < kFilterGroup ? (vectors < kNhwcVectors ? vectors : kNhwcVectors)
                                          : (vectors + blocks - 1) / blocks;
    constexpr int rows[] = {0, kNhwcRows<1>, kNhwcRows<2>, kNhwcRows<3>, kNhwcRows<4>};
    body(k, functions.wide[size], rows[size], size * kWide);
    k += size * kWide;
    vectors -= size;
  }
  while (k < end) {
    if (kNarrow < kWide && end - k <= kNarrow) {
      body(k, functions.narrow, kNhwcRows<1>, end - k);
      k = end;
    } else {
      const int count = end - k < kWide ? end - k : kWide;
      body(k, functions.wide[1], kNhwcRows<1>, count);
      k += count;
    }
  }
}

// Some rows, in tiles of nearly the same number.
template <typename Lane>
CNN_ENGINE_INLINE void multiply_rows(TileOf<Lane>& tile, const TileFunction<Lane>* functions,
                                     int most, const typename Lane::Unit* x,
                                     typename Lane::Output* y, int rows, Prefetch& prefetch,
                                     const typename Lane::Residual* residual) {
  for (int row = 0; row < rows;) {
    const int left = rows - row;
    int tiles = (left + most - 1) / most;
    while (!functions[(left + tiles - 1) / tiles]) ++tiles;
    const int count = (left + tiles - 1) / tiles;
    // As many as leave tiles of a row less, where there are such.
    tile.tiles = functions[count - 1] ? left - tiles * (count - 1) : left / count;
    if (tile.tiles <= 0 || tile.tiles > tiles) tile.tiles = 1;
    tile.x = x + row * tile.x_stride;
    tile.y = y + row * tile.y_stride;
    tile.residual = residual ? residual + row * tile.residual_stride : nullptr;
    tile.prefetch = &prefetch;
    functions[count](tile);
    row += tile.tiles * count;
  }
}

// Filters [begin, end), whose first is a group's first, for all runs of rows. runs(body) calls
// body(x, y, residual or null, rows) for each, all pointing at channel and filter 0; behind them
// may be the kernel offsets of these rows. `then`: what is asked for after weights, or null.
template <typename Lane, typename Runs>
void multiply_runs(const GemmOf<Lane>& p, int begin, int end, const typename Lane::Last& epilogue,
                   Prefetch* then, const Runs& runs) {
  using Unit = typename Lane::Unit;
  for (int part = 0; part < p.parts.count; ++part) {
    const int from = p.parts.first(part), channels = p.parts.first(part + 1) - from;
    const bool is_last = part + 1 == p.parts.count;
    // The weights of the block from filter k on, or of the next part's first.
    const auto prefetch_of = [&](int k) {
      const bool same = k < end;
      const int at = same ? k : begin, i = same ? part : part + 1;
      if (i == p.parts.count) return Prefetch{nullptr, 0, 0, 0, then};
      const int groups = filter_groups(end - at), most = kNhwcVectors * kWide / kFilterGroup;
      return Prefetch{reinterpret_cast<const float*>(p.weights) +
                          at / kFilterGroup * p.group_size() +
                          std::int64_t{p.parts.first(i)} * p.kernel_offset_count * kFilterGroup,
                      std::int64_t{p.parts.first(i + 1) - p.parts.first(i)} * p.kernel_offset_count,
                      p.group_size(), groups < most ? groups : most, then};
    };
    for_filter_blocks<Lane>(
        begin, end, [&](int k, const TileFunction<Lane>* functions, int most, int valid) {
          const typename Lane::Last last = epilogue.at(k);
          TileOf<Lane> tile;
          tile.x_stride = p.stride;
          tile.channels = channels;
          tile.w = p.weights + k / kFilterGroup * p.group_size() + k % kFilterGroup +
                   std::int64_t{from} * p.kernel_offset_count * kFilterGroup;
          tile.group_size = p.group_size();
          tile.y_stride = p.y_stride;
          tile.first = part == 0;
          tile.last = is_last ? &last : nullptr;
          tile.residual_stride = p.residual_stride;
          tile.valid = valid;
          Prefetch prefetch = prefetch_of(k + valid);
          runs([&](const Unit* x, typename Lane::Output* y, const typename Lane::Residual* residual,
                   int rows, const KernelOffsetsInside* inside = nullptr) {
            tile.kernel_offsets = inside ? inside->kernel_offsets : p.kernel_offsets;
            tile.positions = inside ? inside->positions : nullptr;
            tile.kernel_offset_count = inside ? inside->count : p.kernel_offset_count;
            multiply_rows<Lane>(tile, functions, most, x + from, y + std::int64_t{k} * p.y_step,
                                rows, prefetch, residual ? residual + k : nullptr);
          });
        });
  }
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
