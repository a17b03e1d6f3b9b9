// inverted_residual on CUDA: small images in 16 bits, the products on tensor cores.
//
// A block makes some columns of one row of y, all channels of them. It multiplies all places of x
// that these need, so that each row of what is between is made by as many blocks as the kernel has
// rows: few images leave multiprocessors idle otherwise, and nothing but x and y is in memory. All
// weights are in registers and shared memory before it waits for x, in the order of the operands of
// products.
#include <algorithm>
#include <string>

#include "cuda/inverted.cuh"
#include "cuda/launch.cuh"
#include "cuda/strided.cuh"
#include "ops/inverted_residual.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarpThreads;
constexpr int kTile = 16;               // places, channels and terms of a product
constexpr int kOperand = 8;             // numbers of a lane's, of 16 terms by 16 channels
constexpr int kPieces = 2;              // of x, of a thread
constexpr int kTaps = 3;                // rows and columns of a kernel
constexpr int kMostSteps = 5;           // of 16 channels of x
constexpr int kMostBytes = 100 * 1024;  // of shared memory: the next kernel finds room
constexpr int kFewColumns = 8;          // of a block, which are not parted further
constexpr int kMultiprocessors = 132;   // that all should have some of
constexpr int kMostBlocks = 264;        // of few images: two a multiprocessor

struct Block {
  const float *first_bias, *second_bias, *third_bias;
  void* y;
  Overflow overflow;
  int channels, wide, filters;  // of x, between, of y
  int h, w, out_w;
  int stride_h, stride_w, pad_top, pad_left;
  bool adds;
  int columns;               // of y that a block makes
  int in_columns, places;    // of x that they need
  int pairs;                 // of channels between, padded
  int pitch, between_pitch;  // of a place of x and between in shared memory, in bytes
  int first_tiles, third_tiles, third_steps, parts, sum_pitch;
  int between_at, middle_at, weights_at, end;  // in shared memory, in bytes, behind x
  int once;                                    // 1
  Divisor by_pieces, by_columns, by_pairs, by_filters;
  Activation inner, middle, outer;
};

int in_tiles(int count) { return (count + kTile - 1) / kTile; }

// Bytes of a place of so many tiles of channels: an odd number of pieces, so that eight places
// begin in banks apart.
int pitch_of(int tiles) { return (tiles * kTile * 2 / kPiece | 1) * kPiece; }

// Blocks: images; columns of y; rows of y. kSteps: of 16 channels of x, or 0 where nothing is
// multiplied before the kernel. kEnds: of the first and the second convolution; the third has
// clamps, or any.
template <typename T, int kSteps, Ends kEnds>
__global__ void __launch_bounds__(kThreads, 1)
    inverted_residual_kernel(const T* x, const uint4* first, const T* second, const uint4* third,
                             const __grid_constant__ Block p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kSteps >= 0) return;  // there is nothing to wait for: never launched
#endif
  using Mma = std::conditional_t<std::is_same_v<T, __half>, Half, Bfloat16>;
  extern __shared__ __align__(16) char memory[];
  char *const between = memory + p.between_at, *const middle = memory + p.middle_at;
  char* const weights = memory + p.weights_at;            // of the third product
  float* const sums = reinterpret_cast<float*>(between);  // when that has been read
  const int thread = threadIdx.x, warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const int g = lane / 4, t = lane % 4;
  const int first_column = static_cast<int>(blockIdx.y) * p.columns;
  const int columns = min(p.columns, p.out_w - first_column);
  const int top = static_cast<int>(blockIdx.z) * p.stride_h - p.pad_top;
  const int left = first_column * p.stride_w - p.pad_left;
  const auto inside = [&](int place) {
    const int line = p.by_columns.quotient(place), column = place - line * p.in_columns;
    return place < p.places && top + line >= 0 && top + line < p.h && left + column >= 0 &&
           left + column < p.w;
  };
  let_successors_start();

  // A warp has 16 channels of the first product, of every so many places.
  const int tile = warp % p.first_tiles, group = warp / p.first_tiles;
  const int groups = kWarps / p.first_tiles;
  uint4 first_weights[kSteps > 0 ? kSteps : 1];
  float first_bias[4] = {};
  if constexpr (kSteps > 0) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      first_weights[k] = first[(tile * kSteps + k) * kWarpThreads + lane];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = tile * kTile + i / 2 * 8 + 2 * t + i % 2;
      if (p.first_bias != nullptr && channel < p.wide) first_bias[i] = p.first_bias[channel];
    }
    if (p.channels % kTile != 0) {  // terms that are none
      for (int place = thread; place < p.places; place += kThreads) {
        *reinterpret_cast<uint4*>(memory + place * p.pitch + p.channels * 2) = uint4{};
      }
    }
  }
  // A thread has two channels of the second, at every so many places.
  const int slot = p.by_pairs.quotient(thread), pair = thread - slot * p.pairs;
  const int slots = kThreads / p.pairs;
  std::uint32_t second_weights[kTaps * kTaps];
#pragma unroll
  for (int tap = 0; tap < kTaps * kTaps; ++tap) {
    second_weights[tap] =
        *reinterpret_cast<const std::uint32_t*>(second + (tap * p.pairs + pair) * 2);
  }
  const bool real = 2 * pair < p.wide;
  float second_bias[2] = {};
  if (p.second_bias != nullptr && real) {
    second_bias[0] = p.second_bias[2 * pair];
    second_bias[1] = p.second_bias[2 * pair + 1];
  }
  // A warp has 16 filters of the third, of 16 places, and some of its terms.
  const int place_tiles = (p.columns + kTile - 1) / kTile, items = p.third_tiles * place_tiles;
  const int part = warp / items, item = warp - part * items;
  const int filter_tile = item % p.third_tiles, place_tile = item / p.third_tiles;
  const int begin = p.third_steps * part / p.parts;
  const int steps = part < p.parts ? p.third_steps * (part + 1) / p.parts - begin : 0;
  for (int i = thread; i < p.third_tiles * p.third_steps * kWarpThreads; i += kThreads) {
    copy_piece(reinterpret_cast<uint4*>(weights) + i, third + i);
  }
  // Pieces of x.
  const int pieces = p.channels / 8;
  int to[kPieces], from[kPieces];
  bool some[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int index = thread + i * kThreads;
    const int place = p.by_pieces.quotient(index), piece = index - place * pieces;
    const int line = p.by_columns.quotient(place), column = place - line * p.in_columns;
    to[i] = place < p.places ? place * p.pitch + piece * kPiece : -1;
    some[i] = inside(place);
    from[i] = some[i] ? ((top + line) * p.w + left + column) * p.channels + piece * 8 : 0;
  }
  const std::uint32_t rows = lane % kTile, half = lane / kTile * kPiece;
  bool past = false;

  // A loop, though it is gone through once: what is computed before it stays before the wait.
#pragma unroll 1
  for (int once = p.once; once > 0; --once) {
    wait_for_inputs();
    const T* const image = x + static_cast<std::int64_t>(blockIdx.x) * p.h * p.w * p.channels;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (to[i] >= 0) copy_piece(memory + to[i], image + from[i], some[i]);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    if constexpr (kSteps > 0) {
      const int place_tiles = (p.places + kTile - 1) / kTile;
      // Two tiles of places at once; where there is one, the last is multiplied for nothing.
      if (group < groups) {
#pragma unroll 1
        for (int at = group; at < place_tiles; at += 2 * groups) {
          const int tiles[2] = {at, min(at + groups, place_tiles - 1)};
          float sum[2][2][4] = {};
#pragma unroll
          for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              std::uint32_t a[4];
              load_tiles(a, shared_address(memory) + (tiles[i] * kTile + rows) * p.pitch + half +
                                k * kTile * 2);
              const std::uint32_t b[4] = {first_weights[k].x, first_weights[k].y,
                                          first_weights[k].z, first_weights[k].w};
              Mma::mma16(sum[i][0], a, b);
              Mma::mma16(sum[i][1], a, b + 2);
            }
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (i > 0 && at + groups >= place_tiles) break;
            const int place = tiles[i] * kTile + g;
            const bool is_inside[2] = {inside(place), inside(place + 8)};
            float value[8];
#pragma unroll
            for (int v = 0; v < 8; ++v) {
              value[v] = sum[i][v / 4][v % 4] + first_bias[v / 4 * 2 + v % 2];
            }
            end_in<kEnds, T>(p.inner, value);
#pragma unroll
            for (int v = 0; v < 8; ++v) value[v] = is_inside[v / 2 % 2] ? value[v] : 0.0f;
            past |= some_past<T>(value);
#pragma unroll
            for (int v = 0; v < 8; v += 2) {
              *reinterpret_cast<std::uint32_t*>(
                  between + (place + v / 2 % 2 * 8) * p.between_pitch +
                  (tile * kTile + v / 4 * 8 + 2 * t) * 2) = Mma::pack(value[v], value[v + 1]);
            }
          }
        }
      }
      __syncthreads();
    }

    const char* const read = kSteps > 0 ? between : memory;
    const int read_pitch = kSteps > 0 ? p.between_pitch : p.pitch;
    if (slot < slots) {
      for (int column = slot; column < columns; column += slots) {
        const char* const at = read + column * p.stride_w * read_pitch + pair * 4;
        float value[2] = {second_bias[0], second_bias[1]};
#pragma unroll
        for (int tap = 0; tap < kTaps * kTaps; ++tap) {
          const int place = tap / kTaps * p.in_columns + tap % kTaps;
          const float2 e =
              Mma::unpack(*reinterpret_cast<const std::uint32_t*>(at + place * read_pitch));
          const float2 weight = Mma::unpack(second_weights[tap]);
          value[0] = fmaf(e.x, weight.x, value[0]);
          value[1] = fmaf(e.y, weight.y, value[1]);
        }
        end_in<kEnds, T>(p.middle, value);
        if (!real) value[0] = value[1] = 0.0f;
        past |= some_past<T>(value);
        *reinterpret_cast<std::uint32_t*>(middle + column * p.between_pitch + pair * 4) =
            Mma::pack(value[0], value[1]);
      }
    }
    __syncthreads();

    if (part < p.parts) {
      float sum[2][4] = {};
#pragma unroll 3
      for (int k = begin; k < begin + steps; ++k) {
        std::uint32_t a[4];
        load_tiles(a, shared_address(middle) + (place_tile * kTile + rows) * p.between_pitch +
                          half + k * kTile * 2);
        const uint4 weight = reinterpret_cast<const uint4*>(
            weights)[(filter_tile * p.third_steps + k) * kWarpThreads + lane];
        const std::uint32_t b[4] = {weight.x, weight.y, weight.z, weight.w};
        Mma::mma16(sum[0], a, b);
        Mma::mma16(sum[1], a, b + 2);
      }
      float* const at = sums + (part * place_tiles + place_tile) * kTile * p.sum_pitch +
                        filter_tile * kTile + 2 * t;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<float2*>(at + (g + i % 2 * 8) * p.sum_pitch + i / 2 * 8) =
            make_float2(sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]);
      }
    }
    __syncthreads();

    const int filter_pairs = p.filters / 2;
    T* const out = static_cast<T*>(p.y) +
                   ((static_cast<std::int64_t>(blockIdx.x) * gridDim.z + blockIdx.z) * p.out_w +
                    first_column) *
                       p.filters;
    for (int i = thread; i < columns * filter_pairs; i += kThreads) {
      const int column = p.by_filters.quotient(i), filter = (i - column * filter_pairs) * 2;
      float value[2] = {};
      for (int part = 0; part < p.parts; ++part) {
        const float2 sum = *reinterpret_cast<const float2*>(
            sums + (part * place_tiles * kTile + column) * p.sum_pitch + filter);
        value[0] += sum.x;
        value[1] += sum.y;
      }
      if (p.third_bias != nullptr) {
        const float2 bias = *reinterpret_cast<const float2*>(p.third_bias + filter);
        value[0] += bias.x;
        value[1] += bias.y;
      }
      if (p.adds) {
        const int place = p.pad_top * p.in_columns + p.pad_left + column;
        const float2 added = Mma::unpack(
            *reinterpret_cast<const std::uint32_t*>(memory + place * p.pitch + filter * 2));
        value[0] += added.x;
        value[1] += added.y;
      }
      end_in<kEnds == Ends::any ? Ends::any : Ends::clamps, T>(p.outer, value);
      past |= some_past<T>(value);
      *reinterpret_cast<std::uint32_t*>(out + column * p.filters + filter) =
          Mma::pack(value[0], value[1]);
    }
    if (past) tell(p.overflow);
  }
}

// Where the parts of packed weights begin, in numbers: those of products as operands of 16 terms by
// 16 channels, [tiles][steps][lanes][8]; between them the second's, [R S][K padded].
struct Packing {
  std::int64_t second, third, end;

  Packing(const Conv2dShape& shape, int channels, int filters, bool expands) {
    constexpr std::int64_t each = kWarpThreads * kOperand;
    const std::int64_t tiles = in_tiles(shape.k);
    second = expands ? tiles * in_tiles(channels) * each : 0;
    third = second + tiles * kTile * shape.r * shape.s;
    end = third + in_tiles(filters) * tiles * each;
  }
};

// Of a product's weights [outputs, terms] the operands of 16 terms by 16 outputs; zeros past the
// last.
template <typename T>
__global__ void pack_operands_kernel(const float* __restrict__ weights, T* __restrict__ packed,
                                     int outputs, int terms, int tiles, int steps) {
  const std::int64_t index = grid_thread();
  const int i = index % kOperand, lane = index / kOperand % kWarpThreads;
  const std::int64_t step_tile = index / (kOperand * kWarpThreads);
  if (step_tile >= std::int64_t{tiles} * steps) return;
  const int step = step_tile % steps;
  const int tile = step_tile / steps;
  const int output = tile * kTile + i / 4 * 8 + lane / 4;
  const int term = step * kTile + i / 2 % 2 * 8 + lane % 4 * 2 + i % 2;
  const bool some = output < outputs && term < terms;
  packed[index] = narrowed<T>(some ? weights[std::int64_t{output} * terms + term] : 0.0f);
}

// [taps][channels padded] of [channels][taps].
template <typename T>
__global__ void pack_taps_kernel(const float* __restrict__ weights, T* __restrict__ packed,
                                 int channels, int padded, int taps) {
  const std::int64_t index = grid_thread();
  const int tap = index / padded, channel = index % padded;
  if (tap >= taps) return;
  packed[index] = narrowed<T>(channel < channels ? weights[channel * taps + tap] : 0.0f);
}

Block parted(const Conv2dShape& shape, int channels, int filters, bool expands, int columns) {
  Block p = {};
  p.channels = channels;
  p.wide = shape.k;
  p.filters = filters;
  p.h = shape.h;
  p.w = shape.w;
  p.out_w = shape.out_w();
  p.stride_h = shape.stride_h;
  p.stride_w = shape.stride_w;
  p.pad_top = shape.pad_top;
  p.pad_left = shape.pad_left;
  p.columns = columns;
  p.in_columns = (columns - 1) * shape.stride_w + shape.s;
  p.places = shape.r * p.in_columns;
  p.first_tiles = in_tiles(shape.k);
  p.pairs = p.first_tiles * kTile / 2;
  p.pitch = pitch_of(in_tiles(channels));
  p.between_pitch = pitch_of(p.first_tiles);
  p.third_tiles = in_tiles(filters);
  p.third_steps = p.first_tiles;
  const int items = p.third_tiles * in_tiles(columns);
  p.parts = std::clamp(kWarps / items, 1, p.third_steps);
  p.sum_pitch = p.third_tiles * kTile + 8;
  p.between_at = in_tiles(p.places) * kTile * p.pitch;
  const int between = expands ? in_tiles(p.places) * kTile * p.between_pitch : 0;
  const int sums = p.parts * in_tiles(columns) * kTile * p.sum_pitch * 4;
  p.middle_at = p.between_at + std::max(between, sums);
  p.weights_at = p.middle_at + in_tiles(columns) * kTile * p.between_pitch;
  p.end = p.weights_at + p.third_tiles * p.third_steps * kTile * kTile * 2;
  p.once = 1;
  p.by_pieces = Divisor(channels / 8);
  p.by_columns = Divisor(p.in_columns);
  p.by_pairs = Divisor(p.pairs);
  p.by_filters = Divisor(filters / 2);
  return p;
}

// Whether a block has room for what it makes.
bool fits(const Block& p) {
  const int items = p.third_tiles * in_tiles(p.columns);
  return p.places * (p.channels / 8) <= kPieces * kThreads && items <= kWarps &&
         p.end <= kMostBytes;
}

// By as few columns as leave no multiprocessor more than one block, but not less than a few.
Block chosen(const Conv2dShape& shape, int channels, int filters, bool expands) {
  Block p = {};
  for (int columns = shape.out_w();; columns = (columns + 1) / 2) {
    p = parted(shape, channels, filters, expands, columns);
    const std::int64_t blocks =
        std::int64_t{shape.n} * shape.out_h() * ((shape.out_w() + columns - 1) / columns);
    if (columns <= 1 || (fits(p) && (columns <= kFewColumns || 2 * blocks > kMultiprocessors))) {
      return p;
    }
  }
}

// What a shape is expected to be and is not, or null.
const char* why_not(const Conv2dShape& shape, int channels, int filters, bool expands, bool adds) {
  if (shape.groups != shape.c || shape.k != shape.c) return "one channel and one filter a group";
  if (channels < 8 || channels % 8 != 0 || filters < 8 || filters % 8 != 0 || shape.c < 8 ||
      shape.c % 8 != 0 || shape.c > kWarps * kTile || channels > kWarps * kTile ||
      filters > kWarps * kTile || (expands && channels > kMostSteps * kTile)) {
    return "channels in eights, at most 256, and 80 that are expanded";
  }
  if (!expands && channels != shape.c) return "as many channels as are convolved";
  if (shape.r != kTaps || shape.s != kTaps || shape.stride_h > 2 || shape.stride_w > 2 ||
      shape.dilation_h * shape.dilation_w != 1) {
    return "a kernel of 3x3, strides of at most 2 and no dilation";
  }
  if (shape.h > 4096 || shape.w > 4096 || shape.out_h() < 1 || shape.out_w() < 1 ||
      shape.out_h() > 4096 || shape.out_w() > 4096 || shape.h * shape.w > (1 << 22)) {
    return "images of at most 4096 rows and columns and 4194304 places";
  }
  if (adds &&
      (shape.stride_h * shape.stride_w != 1 || channels != filters || shape.out_h() != shape.h ||
       shape.out_w() != shape.w || shape.pad_top >= shape.r || shape.pad_left >= shape.s)) {
    return "results as large as what is added";
  }
  if (!fits(chosen(shape, channels, filters, expands))) return "rows for which there is room";
  return nullptr;
}

void check(const Conv2dShape& shape, int channels, int filters, bool expands, bool adds) {
  if (const char* expected = why_not(shape, channels, filters, expands, adds)) {
    throw std::invalid_argument(std::string("inverted_residual: expected ") + expected);
  }
}

// Calls body(the kernel) for the steps of the first product, from `kSteps` down.
template <typename T, Ends kEnds, int kSteps = kMostSteps, typename Body>
void with_steps(int steps, const Body& body) {
  if constexpr (kSteps > 0) {
    if (steps < kSteps) return with_steps<T, kEnds, kSteps - 1>(steps, body);
  }
  body(inverted_residual_kernel<T, kSteps, kEnds>);
}

}  // namespace

std::int64_t inverted_residual_takes(const Conv2dShape& shape, int channels, int filters,
                                     bool expands, bool adds, int device) {
  int major = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != 9 || !waits_in_kernels() ||
      why_not(shape, channels, filters, expands, adds) != nullptr) {
    return 0;
  }
  const int columns = chosen(shape, channels, filters, expands).columns;
  return std::int64_t{shape.n} * shape.out_h() * ((shape.out_w() + columns - 1) / columns) <=
         kMostBlocks;
}

std::int64_t inverted_residual_packed(const Conv2dShape& shape, int channels, int filters,
                                      bool expands, Conv2dOperands, int) {
  check(shape, channels, filters, expands, false);
  return Packing(shape, channels, filters, expands).end * 2;
}

void inverted_residual_pack(const float* first, const float* second, const float* third,
                            void* packed, const Conv2dShape& shape, int channels, int filters,
                            bool expands, Conv2dOperands operands, Stream stream) {
  check(shape, channels, filters, expands, false);
  with_halves("inverted_residual", operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Packing at(shape, channels, filters, expands);
    T* const to = static_cast<T*>(packed);
    const int tiles = in_tiles(shape.k), taps = shape.r * shape.s;
    if (expands) {
      pack_operands_kernel<T><<<blocks_for(at.second), kBlockThreads, 0, stream>>>(
          first, to, shape.k, channels, tiles, in_tiles(channels));
    }
    pack_taps_kernel<T><<<blocks_for(at.third - at.second), kBlockThreads, 0, stream>>>(
        second, to + at.second, shape.k, tiles * kTile, taps);
    pack_operands_kernel<T><<<blocks_for(at.end - at.third), kBlockThreads, 0, stream>>>(
        third, to + at.third, filters, shape.k, in_tiles(filters), tiles);
    CUDA_CHECK_LAUNCH("inverted_residual_pack's kernels");
  });
}

void inverted_residual(const void* x, const void* packed, const float* first_bias,
                       const float* second_bias, const float* third_bias, void* y,
                       const Conv2dShape& shape, int channels, int filters, bool expands, bool adds,
                       const Overflow& overflow, Conv2dOperands operands, UnaryFunction inner,
                       float inner_alpha, float inner_beta, UnaryFunction middle,
                       float middle_alpha, float middle_beta, UnaryFunction outer,
                       float outer_alpha, float outer_beta, Stream stream) {
  check(shape, channels, filters, expands, adds);
  if (!is_aligned(x, kPiece) || !is_aligned(packed, kPiece) || !is_aligned(y, 4)) {
    throw std::invalid_argument("inverted_residual: expected addresses that are multiples of 16");
  }
  if (!waits_in_kernels()) {
    throw std::invalid_argument("inverted_residual: expected a GPU of compute capability 9.0");
  }
  if (shape.n == 0) return;
  Block p = chosen(shape, channels, filters, expands);
  p.first_bias = first_bias;
  p.second_bias = second_bias;
  p.third_bias = third_bias;
  p.y = y;
  p.adds = adds;
  p.overflow = overflow;
  p.middle = clamps_of({middle, middle_alpha, middle_beta});
  p.inner = expands ? clamps_of({inner, inner_alpha, inner_beta}) : p.middle;
  p.outer = clamps_of({outer, outer_alpha, outer_beta});
  const dim3 grid(static_cast<unsigned>(shape.n),
                  static_cast<unsigned>((p.out_w + p.columns - 1) / p.columns),
                  static_cast<unsigned>(shape.out_h()));
  with_halves("inverted_residual", operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Packing at(shape, channels, filters, expands);
    const T* const weights = static_cast<const T*>(packed);
    const auto launched = [&](auto kernel) {
      CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.end));
      launch("launch of inverted_residual_kernel", kernel, grid, kThreads,
             static_cast<unsigned>(p.end), stream, 1, static_cast<const T*>(x),
             reinterpret_cast<const uint4*>(weights), weights + at.second,
             reinterpret_cast<const uint4*>(weights + at.third), p);
    };
    const int steps = expands ? in_tiles(channels) : 0;
    const bool known = ends_of(p.outer) == Ends::clamps;
    with_ends(p.inner, p.middle, [&](auto ends) {
      if (known) return with_steps<T, ends.value>(steps, launched);
      with_steps<T, Ends::any>(steps, launched);
    });
  });
}

}  // namespace cnn_engine::cuda
