// quantized_conv2d on tensor cores: an implicit matrix product of bytes.
//
// Rows are positions of the output, columns are filters, and the terms of a sum are a filter's
// kernel offsets, (r, s, c) with c fastest, in steps of 64 bytes of x: as conv2d_nhwc.cuh has them.
// A block sums a tile. Steps come through a ring in shared memory, from 8.0 on by asynchronous
// copies. Positions outside the image are read from the packed weights, which hold x_zero for them.
#pragma once

#include <algorithm>

#include "cuda/common/elements.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/requantize.cuh"
#include "cuda/sm75/integer_mma.cuh"
#include "cuda/sm75/quantized_packed.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kStages = 3;  // for which Turing's 64 KB of shared memory have room

struct QuantizedGemm {
  const std::uint8_t* x;
  const char* packed;
  const std::uint8_t *residual, *table;
  void* y;
  Conv2dShape shape;  // of this part of the batch
  Conv2dPitches pitches;
  QuantizedTypes types;
  int out_h, out_w;
  int rows;  // positions of the output
  int first_group;
  // Bytes of x from one position to the next, from one channel to the next, and that images lie
  // further apart than their positions.
  int position_step;
  std::int64_t channel_step, more_an_image;
  bool fours;  // whether four neighbouring filters of y and of the residual lie together
};

// WarpRows x WarpColumns warps, of 32 x 32 sums each; so many for each of the Splits steps that a
// block takes at once, whose sums are added in the end.
template <int WarpRows, int WarpColumns, int Splits = 1>
struct ByteTile {
  static constexpr int kWarpColumns = WarpColumns, kSplits = Splits;
  static constexpr int kWarps = WarpRows * WarpColumns, kThreads = 32 * kWarps * Splits;
  static constexpr int kRows = 32 * WarpRows, kColumns = 32 * WarpColumns;
  static constexpr int kXBytes = kRows * kStepBytes;
  static constexpr int kBytesAStep = kXBytes + kColumns * kStepBytes;
  static constexpr int kStageBytes = Splits * kBytesAStep;
  static constexpr int kPitch = kColumns + 4;  // of a row of sums
  static constexpr int kSums = kRows * kPitch;
  static constexpr int kBytes = std::max(kStages * kStageBytes, 4 * Splits * kSums);
};

// Where in a row of shared memory a byte lies, so that the rows of a tile that a warp reads at once
// are in different banks.
__device__ inline int swizzled(int row, int byte) { return byte ^ (row / 2 % 4 * 16); }

// `Bytes` (16, 8, 4 or 1) from global to shared memory: there after wait_for_stage and a barrier.
template <int Bytes>
__device__ inline void copy_bytes(char* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (Bytes > 1) return copy_async<Bytes>(to, from);
#endif
  using Run = Neighbours<std::uint8_t, Bytes>;
  *reinterpret_cast<Run*>(to) = *static_cast<const Run*>(from);
}
__device__ inline void commit_stage() {
#if __CUDA_ARCH__ >= 800
  commit_copies();
#endif
}
__device__ inline void wait_for_stage() {
#if __CUDA_ARCH__ >= 800
  wait_for_copies<kStages - 2>();
#endif
}

// What a thread's neighbouring filters have: it reads them once, for all of its positions.
struct FilterNumbers {
  int bias[4];
  float scale[4];

  __device__ FilterNumbers(const QuantizedPacked<const char>& packed, int channel, int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bias[i] = i < count ? packed.bias()[channel + i] : 0;
      scale[i] = i < count ? packed.scale()[channel + i] : 0.0f;
    }
  }
};

// Stores what follows the sums of `count` filters from `channel` on, at a position of the output.
__device__ inline void finish(const QuantizedGemm& p, const FilterNumbers& filters,
                              std::int64_t position, int channel, int count, const int* sums) {
  const QuantizedTypes& types = p.types;
  const std::int64_t to = position * p.pitches.y + channel;
  const std::uint8_t* const residual =
      p.residual ? p.residual + position * p.pitches.residual + channel : nullptr;
  const bool in_bytes = types.y == ElementType::int8 || types.y == ElementType::uint8;
  if (!p.fours || !in_bytes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) break;
      store_requantized(p.y, to + i, sums[i] + filters.bias[i], filters.scale[i],
                        residual ? residual + i : nullptr, types, p.table);
    }
    return;
  }
  using Four = Neighbours<std::uint8_t, 4>;
  Four added{}, made;
  if (residual) added = *reinterpret_cast<const Four*>(residual);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int total = sums[i] + filters.bias[i];
    const float v = residual ? scaled(total, filters.scale[i], added.value[i], types)
                             : scaled(total, filters.scale[i]);
    made.value[i] = static_cast<std::uint8_t>(to_integer(v, types.y_zero, types.low, types.high));
  }
  if (p.table) {
#pragma unroll
    for (int i = 0; i < 4; ++i) made.value[i] = p.table[made.value[i]];
  }
  *reinterpret_cast<Four*>(static_cast<std::uint8_t*>(p.y) + to) = made;
}

// A thread's position among the kernel offsets, of the terms that it copies in every step.
struct ByteOffsets {
  int c, r, s, left;  // left: terms from here to the end of the last pass

  __device__ ByteOffsets(const Conv2dShape& p, int term, int terms) : left(terms - term) {
    const int channels = p.group_channels(), offset = term / channels;
    c = term - offset * channels;
    r = offset / p.s % p.r;
    s = offset % p.s;
  }
  __device__ void next_step(const Conv2dShape& p) {
    left -= kStepBytes;
    c += kStepBytes;
    const int channels = p.group_channels();
    while (c >= channels) {
      c -= channels;
      if (++s < p.s) continue;
      s = 0;
      if (++r == p.r) r = 0;  // the next pass
    }
  }
};

// Blocks that a multiprocessor has at least. Turing has shared memory for one of the largest.
template <typename Tile>
constexpr int kBlocks =
#if __CUDA_ARCH__ >= 800
    Tile::kWarps == 8 ? 3 : 1;
#else
    1;
#endif

template <typename Tile, bool Signed, int Width>
__global__ __launch_bounds__(Tile::kThreads,
                             kBlocks<Tile>) void quantized_conv2d_kernel(const QuantizedGemm p) {
  extern __shared__ __align__(128) char memory[];
  __shared__ int4 table[Tile::kRows];  // position, row, column, image
  wait_for_inputs();
  let_successors_start();
  const QuantizedPacked<const char> packed(p.packed, p.shape);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int group = p.first_group + static_cast<int>(blockIdx.z);
  const int first_row = static_cast<int>(blockIdx.x) * Tile::kRows;
  const int first_filter = static_cast<int>(blockIdx.y) * Tile::kColumns;
  const int filters = p.shape.group_filters(), channels = p.shape.group_channels();
  const int passes = packed.header().passes;
  const int steps = steps_of(p.shape, passes);

  // Where each row's window begins.
  for (int row = thread; row < Tile::kRows; row += Tile::kThreads) {
    constexpr int kNowhere = -(1 << 29);
    int4 position = {0, kNowhere, kNowhere, 0};
    const int index = first_row + row;
    if (index < p.rows) {
      const int line = index / p.out_w;
      position.w = line / p.out_h;
      position.y = (line - position.w * p.out_h) * p.shape.stride_h - p.shape.pad_top;
      position.z = (index - line * p.out_w) * p.shape.stride_w - p.shape.pad_left;
      position.x = (position.w * p.shape.h + position.y) * p.shape.w + position.z;
    }
    table[row] = position;
  }
  __syncthreads();

  constexpr int kChunks = Tile::kColumns / 8 * kFilterStepBytes / 16 / Tile::kThreads;
  const auto copy_weights = [&](int step, char* to) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = i * Tile::kThreads + thread;
      const int own = first_filter / 8 + chunk / (kFilterStepBytes / 16);
      const int block = min(own, (filters + 7) / 8 - 1);  // those past the last are not looked at
      const char* const from = packed.weights(group, block, step, steps);
      copy_bytes<16>(to + chunk * 16, from + chunk % (kFilterStepBytes / 16) * 16);
    }
  };
  constexpr int kThreadsARow = kStepBytes / Width, kRowsAtOnce = Tile::kThreads / kThreadsARow;
  const int byte = thread % kThreadsARow * Width;
  ByteOffsets offsets(p.shape, byte, passes * p.shape.filter_size());
  const auto copy_x = [&](char* to) {  // in the order of the steps
    const int down = offsets.r * p.shape.dilation_h, right = offsets.s * p.shape.dilation_w;
    const std::uint8_t* const x = p.x + (group * channels + offsets.c) * p.channel_step;
    const int offset = down * p.shape.w + right;
#pragma unroll 4
    for (int row = thread / kThreadsARow; row < Tile::kRows; row += kRowsAtOnce) {
      const int4 position = table[row];
      const bool inside =
          (offsets.left > 0) &
          (static_cast<unsigned>(position.y + down) < static_cast<unsigned>(p.shape.h)) &
          (static_cast<unsigned>(position.z + right) < static_cast<unsigned>(p.shape.w));
      const std::int64_t at =
          std::int64_t{position.x + offset} * p.position_step + position.w * p.more_an_image;
      const void* const from = inside ? static_cast<const void*>(x + at) : packed.header().zeros;
      copy_bytes<Width>(to + row * kStepBytes + swizzled(row, byte), from);
    }
    offsets.next_step(p.shape);
  };
  const auto copy_stage = [&](int stage) {
    char* to = memory + stage % kStages * Tile::kStageBytes;
    for (int i = 0; i < Tile::kSplits; ++i, to += Tile::kBytesAStep) {
      const int step = stage * Tile::kSplits + i;
      if (step >= steps) break;
      copy_weights(step, to + Tile::kXBytes);
      copy_x(to);
    }
    commit_stage();
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) copy_stage(stage);

  const int own_filter = first_filter + thread % (Tile::kColumns / 4) * 4;
  const FilterNumbers numbers(packed, group * filters + own_filter, filters - own_filter);
  int sums[2][4][4] = {};
  const int split = warp / Tile::kWarps;
  const int warp_row = warp % Tile::kWarps / Tile::kWarpColumns * 32;
  const int warp_column = warp % Tile::kWarpColumns * 32;
#pragma unroll 1
  for (int stage = 0; stage * Tile::kSplits < steps; ++stage) {
    wait_for_stage();
    __syncthreads();
    copy_stage(stage + kStages - 1);  // to where the stage before this one was
    if (stage * Tile::kSplits + split >= steps) continue;
    const char* const x = memory + stage % kStages * Tile::kStageBytes + split * Tile::kBytesAStep;
    const char* const weights = x + Tile::kXBytes;
#pragma unroll
    for (int unit = 0; unit < kStepBytes / 32; ++unit) {
      std::uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Of the four 8x8 tiles of pairs of bytes, lane l has row l % 8 of tile l / 8.
        const int row = warp_row + 16 * i + lane % 16;
        load_tiles(
            a[i], shared_address(x + row * kStepBytes + swizzled(row, unit * 32 + lane / 16 * 16)));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const char* const from = weights + (warp_column / 8 + j) * kFilterStepBytes + unit * 256;
        const uint2 b = reinterpret_cast<const uint2*>(from)[lane];
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_bytes<Signed>(sums[i][j], a[i], b);
      }
    }
  }

  // Through shared memory, so that a thread has four neighbouring filters.
  __syncthreads();
  int* const totals = reinterpret_cast<int*>(memory);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int* const to = totals + split * Tile::kSums + (warp_row + 16 * i + lane / 4) * Tile::kPitch +
                      warp_column + 8 * j + lane % 4 * 2;
      *reinterpret_cast<int2*>(to) = make_int2(sums[i][j][0], sums[i][j][1]);
      *reinterpret_cast<int2*>(to + 8 * Tile::kPitch) = make_int2(sums[i][j][2], sums[i][j][3]);
    }
  }
  __syncthreads();
  constexpr int kQuads = Tile::kColumns / 4;
  static_assert(Tile::kThreads % kQuads == 0);  // so that a thread's filters stay
  if (own_filter >= filters) return;
  for (int row = thread / kQuads; row < Tile::kRows; row += Tile::kThreads / kQuads) {
    const int index = first_row + row;
    if (index >= p.rows) return;
    int sums_of_four[4] = {};
    const int* from = totals + row * Tile::kPitch + thread % kQuads * 4;
#pragma unroll
    for (int i = 0; i < Tile::kSplits; ++i, from += Tile::kSums) {
      const int4 part = *reinterpret_cast<const int4*>(from);
      sums_of_four[0] += part.x, sums_of_four[1] += part.y;
      sums_of_four[2] += part.z, sums_of_four[3] += part.w;
    }
    finish(p, numbers, index, group * filters + own_filter, min(4, filters - own_filter),
           sums_of_four);
  }
}

}  // namespace
}  // namespace cnn_engine::cuda
