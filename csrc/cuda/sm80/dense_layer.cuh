// The kernel of dense_layer: a convolution of 3x3 and the next layer's of 1x1 over clusters.
//
// A cluster makes a tile of whole rows of an image, up to 32 positions. Nearly all that the 1x1
// convolution reads was made layers ago. So before it waits for the kernel before, a block
// multiplies its share of those channels, and the blocks send each other their sums: each finishes
// some positions. Behind the wait a block has 16 or 32 of the 3x3 convolution's channels (and of 16
// blocks half of the kernel offsets); these sums go to the blocks that finish their positions, too.
// The 64 terms that are left there are the layer's before and this one's, so nothing is sent a
// third time.
#pragma once

#include <cstdint>

#include "cuda/common/extremes.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/sm80/cluster.cuh"
#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/inverted.cuh"

namespace cnn_engine::cuda::dense_layers {

constexpr int kThreads = 256, kWarps = kThreads / kWarpThreads;
constexpr int kAllThreads = kThreads + kWarpThreads;  // and those that let the next kernel start
constexpr int kBlocksOfMultiprocessor = 2;            // that have registers
constexpr int kChannels = 128;  // that the 3x3 convolution reads, and filters of the 1x1 one
constexpr int kGrowth = 32;     // filters of the 3x3 convolution
constexpr int kLate = 32;       // channels of the layer before, which are read behind the wait
constexpr int kPositions = 32;  // of a tile, at most
constexpr int kKernelOffsets = 9, kDepth = 16, kEight = 8;
constexpr int kMostSteps = 8;  // of kDepth channels, of a block before the wait
constexpr int kOperand = 8;    // numbers of a lane's operand of 16 x 16 terms
// Positions of the rows and columns that a tile reaches, at most: of one row, or of one column.
constexpr int kReached = 3 * (kPositions + 2);

struct DenseLayer {
  const float *first_bias, *next_bias, *scale, *shift;
  void *y, *z;
  int h, w, lines;                // rows of a tile
  int w_factor, wide_factor;      // that divide by w and w + 2
  int steps;                      // of channels that are multiplied first
  int x_pitch, y_pitch, z_pitch;  // in numbers
  bool ahead, holds;              // whether those are known before the wait
  float floor, inner_low, inner_high, outer_low, outer_high;
  Overflow overflow;
};

// What one of so many blocks of a cluster does.
template <int Blocks>
struct Share {
  static constexpr int kUnits = 16 / Blocks;  // pairs of positions that it finishes
  static constexpr int kGroups = Blocks > 8 ? 1 : 8 / Blocks;  // of kDepth channels of e
  static constexpr int kSharing =
      Blocks > 8 ? Blocks / 8 : 1;  // blocks that share their kernel offsets
  static constexpr int kOwnKernelOffsets = (kKernelOffsets + kSharing - 1) / kSharing;
  static constexpr int kSteps = kGroups * kOwnKernelOffsets;
  static constexpr int kPieces = kGroups * 2;            // of kPiece bytes, of a position of e
  static constexpr int kPitch = (kPieces | 1) * kPiece;  // in banks apart
  static constexpr int kPair = 2 * kGrowth;              // numbers of a pair of positions
  // Whether weights are in shared memory, where registers have no room for them.
  static constexpr bool kKept = kSteps > kKernelOffsets;
  static constexpr int kWindow = kSteps * 2 * kWarpThreads;  // operands
};

// Numbers of a pair of positions and of two filters, eight apart: what a lane has of a product.
using Four = float4;

template <typename T, int Blocks>
struct alignas(16) Memory {
  using Own = Share<Blocks>;
  static constexpr int kPitch = kMostSteps * kDepth + 8, kLatePitch = kLate + kGrowth + 8;
  T first[kPositions][kPitch];                  // known channels as they are multiplied
  Four known[Blocks][kWarps][8 * Own::kUnits];  // each block's sums of them, of own positions
  char reached[kReached * Own::kPitch];         // of e
  float accumulators[Blocks * Own::kUnits * Own::kPair];  // of the 3x3 convolution, of each block
  uint4 window[Own::kKept ? Own::kWindow : 1];            // its weights
  T made[2 * Own::kUnits][kGrowth], late[kEight][kLatePitch];  // as stored; as multiplied
  float scale[kLate + kGrowth], shift[kLate + kGrowth];        // of these
  std::uint64_t known_are_here, accumulators_are_here;
};

template <typename T>
using FormatOf = std::conditional_t<std::is_same_v<T, __half>, Half, Bfloat16>;

// What the second-level cache has, since another kernel may still write beside it; asked for here,
// and not where it is first needed.
__device__ inline uint4 load_piece(const void* from) {
  uint4 found;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "l"(from)
               : "memory");
  return found;
}

// Constants, asked for here likewise, or zeros.
__device__ inline uint4 ask_for(const uint4* from, bool some = true) {
  uint4 found = {};
  asm volatile(
      "{\n"
      ".reg .pred some;\n"
      "setp.ne.s32 some, %5, 0;\n"
      "@some ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n"
      "}"
      : "+r"(found.x), "+r"(found.y), "+r"(found.z), "+r"(found.w)
      : "l"(from), "r"(static_cast<int>(some))
      : "memory");
  return found;
}
__device__ inline float ask_for(const float* from) {
  float found;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(found) : "l"(from) : "memory");
  return found;
}

__device__ inline void ask_for_eight(const float* from, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 four = ask_for(reinterpret_cast<const uint4*>(from) + i);
    to[4 * i] = __uint_as_float(four.x);
    to[4 * i + 1] = __uint_as_float(four.y);
    to[4 * i + 2] = __uint_as_float(four.z);
    to[4 * i + 3] = __uint_as_float(four.w);
  }
}

// Quotients of numbers whose product with the divisor is below 2^16, by its factor.
__host__ __device__ inline int factor_of(int divisor) {
  return ((1 << 16) + divisor - 1) / divisor;
}
__device__ inline int quotient(int number, int factor) { return number * factor >> 16; }

// max(floor, x * scale + shift), NaN where that is.
__device__ inline float prepared(float x, float scale, float shift, float floor) {
  return max_nan(fmaf(x, scale, shift), floor);
}

// Stores eight numbers as the 1x1 convolution reads them.
template <typename T>
__device__ inline void store_prepared(PastRange<T>& past, T* to, const uint4& read,
                                      const float (&scale)[8], const float (&shift)[8],
                                      float floor) {
  using Format = FormatOf<T>;
  const std::uint32_t words[4] = {read.x, read.y, read.z, read.w};
  std::uint32_t made[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = Format::unpack(words[i]);
    made[i] = Format::pack(prepared(two.x, scale[2 * i], shift[2 * i], floor),
                           prepared(two.y, scale[2 * i + 1], shift[2 * i + 1], floor));
    past.look(words[i], made[i]);
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(made[0], made[1], made[2], made[3]);
}

// Blocks: tiles along x, images along y; of a cluster along z.
template <typename T, int Blocks>
__global__ void __launch_bounds__(kAllThreads, kBlocksOfMultiprocessor)
    dense_layer_kernel(const T* x, const T* e,
                       const uint4* __restrict__ first_weights,  // [step][warp][lane]
                       const uint4* __restrict__ late_weights,   // [warp][step][lane]
                       const uint4* __restrict__ window,  // [group][kernel offset][half][lane]
                       const __grid_constant__ DenseLayer p) {
  using Own = Share<Blocks>;
  using Format = FormatOf<T>;
  constexpr int kUnits = Own::kUnits;
  extern __shared__ __align__(16) char shared_memory[];
  auto& memory = *reinterpret_cast<Memory<T, Blocks>*>(shared_memory);
  const int thread = threadIdx.x, warp = same_in_warp(thread / kWarpThreads);
  const int lane = thread % kWarpThreads;
  const int rank = static_cast<int>(cluster_rank());
  const int image = static_cast<int>(blockIdx.y), line = static_cast<int>(blockIdx.x) * p.lines;
  const int positions = min(p.lines, p.h - line) * p.w;  // that there are
  const int first_position = rank * 2 * kUnits;          // that this block finishes
  const std::int64_t begin = (std::int64_t{image} * p.h + line) * p.w;
  const std::uint32_t known_are_here = shared_address(&memory.known_are_here),
                      accumulators_are_here = shared_address(&memory.accumulators_are_here);
  if (thread == 0) {
    const int pairs = min(max((positions - first_position + 1) / 2, 0), kUnits);
    init_barrier(known_are_here);
    init_barrier(accumulators_are_here);
    expect_tx(known_are_here, pairs * (sizeof(memory.known) / kUnits));
    expect_tx(accumulators_are_here, pairs * (sizeof(memory.accumulators) / kUnits));
  }
  __syncwarp();
  arrive_at_cluster_barrier_relaxed();
  if (warp == kWarps) {  // not when this block has done what it can: the next one has as much to do
    wait_at_cluster_barrier();
    if (p.holds) wait_for_inputs();
    let_successors_start();
    return;
  }

  // ---- channels that are known: this block's share of the steps ----
  const int from = rank * p.steps / Blocks, own = (rank + 1) * p.steps / Blocks - from;
  const int late = p.steps * kDepth;  // the first channel of the layer before
  if (!p.ahead) wait_for_inputs();
  constexpr int kRow = kMostSteps * 2, kRows = kThreads / kRow;  // pieces of a position; positions
  constexpr int kReads = kPositions / kRows;
  const int piece = thread % kRow;
  uint4 read[kReads], weights[kMostSteps];
  float scale[8], shift[8];
  {
    const int column = from * kDepth + min(piece, max(2 * own - 1, 0)) * kEight;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int position = min(thread / kRow + i * kRows, positions - 1);
      read[i] = load_piece(x + (begin + position) * p.x_pitch + column);
    }
    ask_for_eight(p.scale + column, scale);
    ask_for_eight(p.shift + column, shift);
  }
  const uint4* const first = first_weights + (from * kWarps + warp) * kWarpThreads + lane;
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) {
    weights[i] = ask_for(first + i * (kWarps * kWarpThreads), i < own);
  }

  // ---- meanwhile, what is needed behind the wait ----
  const int half = warp / 4, eighth = warp % 4;           // of the 3x3's filters; of its positions
  const int group = rank / Own::kSharing * Own::kGroups;  // of its channels
  const int kernel_offset = rank % Own::kSharing * Own::kOwnKernelOffsets;
  // A lane has two filters of the 1x1 convolution, of a pair of positions.
  const int filter = warp * 16 + lane / 4;
  // A thread adds up a number of the 3x3's: that of a filter, of a position.
  const bool adds = thread < kUnits * Own::kPair;
  const int made_at = thread / Own::kPair % kUnits * 2 + thread % 2;
  const int made_filter = thread / 32 % 2 * 16 + thread / 4 % 8 + thread / 2 % 2 * 8;
  // Positions of e that a thread copies pieces of, in numbers from its beginning.
  constexpr int kAtOnce = kThreads / Own::kPieces;
  constexpr int kCopies = (kReached + kAtOnce - 1) / kAtOnce;
  const int wide = p.w + 2;
  int reached[kCopies];
  bool there[kCopies], copied[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int at = thread / Own::kPieces + i * kAtOnce, down = quotient(at, p.wide_factor);
    const int h = line + down - 1, w = at - down * wide - 1;
    copied[i] = at < (p.lines + 2) * wide;
    there[i] = copied[i] && h >= 0 && h < p.h && w >= 0 && w < p.w;
    const int position = there[i] ? (image * p.h + h) * p.w + w : 0;
    reached[i] = position * kChannels + group * kDepth + thread % Own::kPieces * kEight;
  }
  // Where a lane's rows of tiles of e begin, two steps at once.
  std::uint32_t tiles[(Own::kSteps + 1) / 2];
  {
    const int position = eighth * kEight + lane % 8, down = quotient(position, p.w_factor);
    const int first = down < p.lines ? down * wide + position - down * p.w : 0;
#pragma unroll
    for (int s = 0; s < Own::kSteps; s += 2) {
      const int step = min(s + lane / 16, Own::kSteps - 1);
      const int of = min(kernel_offset + step % Own::kOwnKernelOffsets, kKernelOffsets - 1);
      const int at = first + of / 3 * wide + of % 3;
      tiles[s / 2] = shared_address(memory.reached) + at * Own::kPitch +
                     step / Own::kOwnKernelOffsets * (2 * kPiece) + lane / 8 % 2 * kPiece;
    }
  }
  // The last warp reads the layer before.
  constexpr int kLatePieces = kLate / kEight;
  const int late_position = lane / kLatePieces, late_piece = lane % kLatePieces * kEight;
  const bool reads_late = warp == kWarps - 1 && late_position < 2 * kUnits &&
                          first_position + late_position < positions;
  constexpr int kLateFours = (kLate + kGrowth) / 4;
  if (thread < 2 * kLateFours) {
    const int at = thread % kLateFours * 4;
    const bool shifts = thread >= kLateFours;
    copy_piece((shifts ? memory.shift : memory.scale) + at,
               (shifts ? p.shift : p.scale) + late + at);
  }
  commit_copies();
  if constexpr (Own::kKept) {
    for (int i = thread; i < Own::kWindow; i += kThreads) {
      copy_piece(&memory.window[i], window + group * kKernelOffsets * 2 * kWarpThreads + i);
    }
    commit_copies();
  }

  // ---- the known channels' sums, each to the block that finishes its position ----
  PastRange<T> prepared_range;
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    store_prepared(prepared_range, &memory.first[thread / kRow + i * kRows][piece * kEight],
                   read[i], scale, shift, p.floor);
  }
  uint4 kernel_offsets[Own::kSteps];
#pragma unroll
  for (int s = 0; s < Own::kSteps && !Own::kKept; ++s) {
    const int of = kernel_offset + s % Own::kOwnKernelOffsets;
    const int at = ((group + s / Own::kOwnKernelOffsets) * kKernelOffsets + of) * 2 + half;
    kernel_offsets[s] = ask_for(window + at * kWarpThreads + lane, of < kKernelOffsets);
  }
  wait_for_copies<Own::kKept ? 1 : 0>();
  named_barrier<kThreads>(1);
  {
    // Tiles of operands: a lane gives the address of row lane % 8 of tile lane / 8.
    const std::uint32_t rows =
        shared_address(&memory.first[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
    constexpr int kHalf = 16 * sizeof(memory.first[0]);
    const bool both_halves = positions > 16;
    float accumulators[4][4] = {};
#pragma unroll
    for (int i = 0; i < kMostSteps; ++i) {
      if (i >= own) continue;
      const std::uint32_t a[4] = {weights[i].x, weights[i].y, weights[i].z, weights[i].w};
      std::uint32_t b[4];
      load_tiles(b, rows + i * kDepth * sizeof(T));
      Format::mma16(accumulators[0], a, b);
      Format::mma16(accumulators[1], a, b + 2);
      if (both_halves) {
        load_tiles(b, rows + kHalf + i * kDepth * sizeof(T));
        Format::mma16(accumulators[2], a, b);
        Format::mma16(accumulators[3], a, b + 2);
      }
    }
    wait_at_cluster_barrier();  // all blocks can be sent to
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int pair = j * 4 + lane % 4, owner = pair / kUnits;
      const Four* const slot = &memory.known[rank][warp][lane / 4 * kUnits + pair % kUnits];
      if (2 * pair < positions) {
        store_cluster_async(cluster_address(shared_address(slot), owner),
                            cluster_address(known_are_here, owner), accumulators[j][0],
                            accumulators[j][1], accumulators[j][2], accumulators[j][3]);
      }
    }
  }

  // ---- constants for behind the wait ----
  float next_bias[2] = {};
  if (p.next_bias != nullptr) {
    next_bias[0] = ask_for(p.next_bias + filter);
    next_bias[1] = ask_for(p.next_bias + filter + 8);
  }
  const float first_bias = p.first_bias != nullptr ? ask_for(p.first_bias + made_filter) : 0.0f;
  uint4 last[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    last[i] = ask_for(late_weights + (warp * 4 + i) * kWarpThreads + lane);
  }

  // ---- what the kernel before made ----
  if (p.ahead) wait_for_inputs();
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int at = thread / Own::kPieces + i * kAtOnce;
    if (copied[i]) {
      copy_piece(memory.reached + at * Own::kPitch + thread % Own::kPieces * kPiece, e + reached[i],
                 there[i]);
    }
  }
  commit_copies();
  if (reads_late) {
    const uint4 piece =
        load_piece(x + (begin + first_position + late_position) * p.x_pitch + late + late_piece);
    float scale[8], shift[8];
    load_neighbours(memory.scale + late_piece, scale);
    load_neighbours(memory.shift + late_piece, shift);
    store_prepared(prepared_range, &memory.late[late_position][late_piece], piece, scale, shift,
                   p.floor);
  }
  wait_for_copies<0>();
  named_barrier<kThreads>(1);
  {
    float accumulators[2][4] = {};
#pragma unroll
    for (int s = 0; s < Own::kSteps; s += 2) {
      std::uint32_t b[4];
      load_tiles(b, tiles[s / 2]);
#pragma unroll
      for (int i = 0; i < 2 && s + i < Own::kSteps; ++i) {
        uint4 of;
        if constexpr (Own::kKept) {
          of = memory.window[((s + i) * 2 + half) * kWarpThreads + lane];
        } else {
          of = kernel_offsets[s + i];
        }
        const std::uint32_t a[4] = {of.x, of.y, of.z, of.w};
        Format::mma16(accumulators[i], a, b + 2 * i);
      }
    }
    const int pair = eighth * 4 + lane % 4, owner = pair / kUnits;
    const int slot = (rank * kUnits + pair % kUnits) * 16 + half * 8 + lane / 4;
    if (2 * pair < positions) {
      store_cluster_async(
          cluster_address(shared_address(memory.accumulators + slot * 4), owner),
          cluster_address(accumulators_are_here, owner), accumulators[0][0] + accumulators[1][0],
          accumulators[0][1] + accumulators[1][1], accumulators[0][2] + accumulators[1][2],
          accumulators[0][3] + accumulators[1][3]);
    }
  }

  // ---- y, and what z has of other layers ----
  wait_for_cluster_bytes(known_are_here);
  float z[4] = {};
  if (lane % 4 < kUnits) {
#pragma unroll
    for (int i = 0; i < Blocks; ++i) {
      const Four& one = memory.known[i][warp][lane / 4 * kUnits + lane % 4];
      z[0] += one.x;
      z[1] += one.y;
      z[2] += one.z;
      z[3] += one.w;
    }
  }
  const std::uint32_t operand = shared_address(&memory.late[lane % 8][lane / 8 * kEight]);
  const auto multiply = [&](int i) {  // two steps
    std::uint32_t b[4];
    load_tiles(b, operand + i * kDepth * sizeof(T));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4& of = last[i + j];
      const std::uint32_t a[4] = {of.x, of.y, of.z, of.w};
      Format::mma16(z, a, b + 2 * j);
    }
  };
  multiply(0);
  bool past = false;
  if (adds) {
    wait_for_cluster_bytes(accumulators_are_here);
    const float scale = memory.scale[kLate + made_filter],
                shift = memory.shift[kLate + made_filter];
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
      sum += memory.accumulators[block * kUnits * Own::kPair + thread];
    }
    sum = clamp(sum + first_bias, p.inner_low, p.inner_high);
    const T y = narrowed<T>(sum);
    memory.made[made_at][made_filter] = y;
    const float next = prepared(widened(y), scale, shift, p.floor);
    memory.late[made_at][kLate + made_filter] = narrowed<T>(next);
    past |= std::is_same_v<T, __half> && (is_past_float16(sum) || is_past_float16(next)) &&
            first_position + made_at < positions;
  }
  named_barrier<kThreads>(1);
  multiply(2);

  // ---- z: a lane has two neighbouring filters of one position, twice ----
  const bool odd = lane / 4 % 2 == 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float two[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      two[j] = clamp(z[2 * i + j] + next_bias[i], p.outer_low, p.outer_high);
    }
    const float got = __shfl_xor_sync(kFullMask, odd ? two[0] : two[1], 4);
    (odd ? two[0] : two[1]) = got;
    const int position = first_position + lane % 4 * 2 + odd;
    if (lane % 4 >= kUnits || position >= positions) continue;
    *reinterpret_cast<std::uint32_t*>(static_cast<T*>(p.z) + (begin + position) * p.z_pitch +
                                      filter - odd + 8 * i) = Format::pack(two[0], two[1]);
    past |= some_past<T>(two);
  }
  constexpr int kStored = 2 * kUnits * (kGrowth / kEight);  // pieces of y
  const int stored_at = thread / (kGrowth / kEight), column = thread % (kGrowth / kEight) * kEight;
  if (thread < kStored && first_position + stored_at < positions) {
    *reinterpret_cast<uint4*>(static_cast<T*>(p.y) +
                              (begin + first_position + stored_at) * p.y_pitch + column) =
        *reinterpret_cast<const uint4*>(&memory.made[stored_at][column]);
  }
  if (past || prepared_range.found()) tell(p.overflow);
}

}  // namespace cnn_engine::cuda::dense_layers
