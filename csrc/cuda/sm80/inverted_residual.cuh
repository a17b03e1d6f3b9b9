// The kernel of inverted_residual: small images in 16 bits, the products on tensor cores.
//
// A block makes some columns of one row of y, all channels of them. It multiplies all positions of
// x that these need, so that each row of what is between is made by as many blocks as the kernel
// has rows: few images leave multiprocessors idle otherwise, and nothing but x and y is in memory.
// All weights are in registers and shared memory before it waits for x, in the order of the
// operands of products.
#pragma once

#include <type_traits>

#include "cuda/common/strided.cuh"
#include "cuda/sm80/inverted.cuh"

namespace cnn_engine::cuda::inverted_residuals {

constexpr int kThreads = 512, kWarps = kThreads / kWarpThreads;
constexpr int kTile = 16;          // positions, channels and terms of a product
constexpr int kOperand = 8;        // numbers of a lane's, of 16 terms by 16 channels
constexpr int kPieces = 2;         // of x, of a thread
constexpr int kKernelOffsets = 3;  // rows and columns of a kernel
constexpr int kMostSteps = 5;      // of 16 channels of x

struct Block {
  const float *first_bias, *second_bias, *third_bias;
  void* y;
  Overflow overflow;
  int channels, wide, filters;  // of x, between, of y
  int h, w, out_w;
  int stride_h, stride_w, pad_top, pad_left;
  bool adds;
  int columns;                // of y that a block makes
  int in_columns, positions;  // of x that they need
  int pairs;                  // of channels between, padded
  int pitch, between_pitch;   // of a position of x and between in shared memory, in bytes
  int first_tiles, third_tiles, third_steps, parts, accumulator_pitch;
  int between_at, middle_at, weights_at, end;  // in shared memory, in bytes, behind x
  int once;                                    // 1
  Divisor by_pieces, by_columns, by_pairs, by_filters;
  Activation inner, middle, outer;
};

// Blocks: images; columns of y; rows of y. kSteps: of 16 channels of x, or 0 where nothing is
// multiplied before the kernel. kKnown: of the first and the second convolution; the third has
// clamps, or any.
template <typename T, int kSteps, KnownActivation kKnown>
__global__ void __launch_bounds__(kThreads, 1)
    inverted_residual_kernel(const T* x, const uint4* first, const T* second, const uint4* third,
                             const __grid_constant__ Block p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kSteps >= 0) return;  // there is nothing to wait for: never launched
#endif
  using Mma = std::conditional_t<std::is_same_v<T, __half>, Half, Bfloat16>;
  extern __shared__ __align__(16) char memory[];
  char *const between = memory + p.between_at, *const middle = memory + p.middle_at;
  char* const weights = memory + p.weights_at;                    // of the third product
  float* const accumulators = reinterpret_cast<float*>(between);  // when that has been read
  const int thread = threadIdx.x, warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const int g = lane / 4, t = lane % 4;
  const int first_column = static_cast<int>(blockIdx.y) * p.columns;
  const int columns = min(p.columns, p.out_w - first_column);
  const int top = static_cast<int>(blockIdx.z) * p.stride_h - p.pad_top;
  const int left = first_column * p.stride_w - p.pad_left;
  const auto inside = [&](int position) {
    const int line = p.by_columns.quotient(position), column = position - line * p.in_columns;
    return position < p.positions && top + line >= 0 && top + line < p.h && left + column >= 0 &&
           left + column < p.w;
  };
  let_successors_start();

  // A warp has 16 channels of the first product, of every so many positions.
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
      for (int position = thread; position < p.positions; position += kThreads) {
        *reinterpret_cast<uint4*>(memory + position * p.pitch + p.channels * 2) = uint4{};
      }
    }
  }
  // A thread has two channels of the second, at every so many positions.
  const int slot = p.by_pairs.quotient(thread), pair = thread - slot * p.pairs;
  const int slots = kThreads / p.pairs;
  std::uint32_t second_weights[kKernelOffsets * kKernelOffsets];
#pragma unroll
  for (int kernel_offset = 0; kernel_offset < kKernelOffsets * kKernelOffsets; ++kernel_offset) {
    second_weights[kernel_offset] =
        *reinterpret_cast<const std::uint32_t*>(second + (kernel_offset * p.pairs + pair) * 2);
  }
  const bool real = 2 * pair < p.wide;
  float second_bias[2] = {};
  if (p.second_bias != nullptr && real) {
    second_bias[0] = p.second_bias[2 * pair];
    second_bias[1] = p.second_bias[2 * pair + 1];
  }
  // A warp has 16 filters of the third, of 16 positions, and some of its terms.
  const int position_tiles = (p.columns + kTile - 1) / kTile,
            items = p.third_tiles * position_tiles;
  const int part = warp / items, item = warp - part * items;
  const int filter_tile = item % p.third_tiles, position_tile = item / p.third_tiles;
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
    const int position = p.by_pieces.quotient(index), piece = index - position * pieces;
    const int line = p.by_columns.quotient(position), column = position - line * p.in_columns;
    to[i] = position < p.positions ? position * p.pitch + piece * kPiece : -1;
    some[i] = inside(position);
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
      const int position_tiles = (p.positions + kTile - 1) / kTile;
      // Two tiles of positions at once; where there is one, the last is multiplied for nothing.
      if (group < groups) {
#pragma unroll 1
        for (int at = group; at < position_tiles; at += 2 * groups) {
          const int tiles[2] = {at, min(at + groups, position_tiles - 1)};
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
            if (i > 0 && at + groups >= position_tiles) break;
            const int position = tiles[i] * kTile + g;
            const bool is_inside[2] = {inside(position), inside(position + 8)};
            float value[8];
#pragma unroll
            for (int v = 0; v < 8; ++v) {
              value[v] = sum[i][v / 4][v % 4] + first_bias[v / 4 * 2 + v % 2];
            }
            apply_known<kKnown, T>(p.inner, value);
#pragma unroll
            for (int v = 0; v < 8; ++v) value[v] = is_inside[v / 2 % 2] ? value[v] : 0.0f;
            past |= some_past<T>(value);
#pragma unroll
            for (int v = 0; v < 8; v += 2) {
              *reinterpret_cast<std::uint32_t*>(
                  between + (position + v / 2 % 2 * 8) * p.between_pitch +
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
        for (int kernel_offset = 0; kernel_offset < kKernelOffsets * kKernelOffsets;
             ++kernel_offset) {
          const int position =
              kernel_offset / kKernelOffsets * p.in_columns + kernel_offset % kKernelOffsets;
          const float2 e =
              Mma::unpack(*reinterpret_cast<const std::uint32_t*>(at + position * read_pitch));
          const float2 weight = Mma::unpack(second_weights[kernel_offset]);
          value[0] = fmaf(e.x, weight.x, value[0]);
          value[1] = fmaf(e.y, weight.y, value[1]);
        }
        apply_known<kKnown, T>(p.middle, value);
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
        load_tiles(a, shared_address(middle) + (position_tile * kTile + rows) * p.between_pitch +
                          half + k * kTile * 2);
        const uint4 weight = reinterpret_cast<const uint4*>(
            weights)[(filter_tile * p.third_steps + k) * kWarpThreads + lane];
        const std::uint32_t b[4] = {weight.x, weight.y, weight.z, weight.w};
        Mma::mma16(sum[0], a, b);
        Mma::mma16(sum[1], a, b + 2);
      }
      float* const at = accumulators +
                        (part * position_tiles + position_tile) * kTile * p.accumulator_pitch +
                        filter_tile * kTile + 2 * t;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<float2*>(at + (g + i % 2 * 8) * p.accumulator_pitch + i / 2 * 8) =
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
            accumulators + (part * position_tiles * kTile + column) * p.accumulator_pitch + filter);
        value[0] += sum.x;
        value[1] += sum.y;
      }
      if (p.third_bias != nullptr) {
        const float2 bias = *reinterpret_cast<const float2*>(p.third_bias + filter);
        value[0] += bias.x;
        value[1] += bias.y;
      }
      if (p.adds) {
        const int position = p.pad_top * p.in_columns + p.pad_left + column;
        const float2 added = Mma::unpack(
            *reinterpret_cast<const std::uint32_t*>(memory + position * p.pitch + filter * 2));
        value[0] += added.x;
        value[1] += added.y;
      }
      apply_known<kKnown == KnownActivation::any ? KnownActivation::any : KnownActivation::clamps,
                  T>(p.outer, value);
      past |= some_past<T>(value);
      *reinterpret_cast<std::uint32_t*>(out + column * p.filters + filter) =
          Mma::pack(value[0], value[1]);
    }
    if (past) tell(p.overflow);
  }
}

}  // namespace cnn_engine::cuda::inverted_residuals
