// conv2d_nhwc on CUDA: an implicit matrix product on tensor cores.
//
// Rows are positions of the output, columns are filters, and the terms of a sum are a filter's
// kernel offsets, (r, s, c) with c fastest, in steps of 128 bytes of x. A block sums one tile over
// its part of the steps; the blocks of a cluster have the other parts. Each of them gets the
// partial sums of some of the tile's rows from all, and adds them up in the order of their ranks:
// the bits depend on the shape alone.
//
// x lies in shared memory as it does in memory, float32 or of the operands' 16 bits; float32 is
// rounded or divided on its way to registers, where x may also get its prologue. A lane reads four
// neighbouring terms of a row at once, and takes them for the four that PTX's layout gives it: the
// packed weights are permuted alike (conv2d_nhwc_pack.cuh). They are asked for before the kernel
// waits for its inputs.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "cuda/common/extremes.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/unary.cuh"
#include "cuda/sm80/conv2d_nhwc_gemm.h"
#include "cuda/sm80/conv2d_nhwc_pack.cuh"
#include "cuda/sm80/conv2d_nhwc_terms.cuh"
#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/sm80/tf32.cuh"

namespace cnn_engine::cuda::nhwc {

constexpr int kNowhere = -(1 << 29);  // a row outside every image

// How a block's tile is shared out: WarpRows x WarpColumns warps of (16 Rows) x (16 Columns), and
// TermWarps times so many, each with their own part of every step's terms.
template <int WarpRows_, int WarpColumns_, int Rows_, int Columns_, int TermWarps_ = 1>
struct Tile {
  static constexpr int kWarpColumns = WarpColumns_, kTermWarps = TermWarps_;
  static constexpr int kRows16 = Rows_, kColumns16 = Columns_;
  static constexpr int kWarps = WarpRows_ * WarpColumns_;  // that share the tile
  static constexpr int kThreads = 32 * kWarps * kTermWarps;
  static constexpr int kRows = 16 * kRows16 * WarpRows_;
  static constexpr int kColumns = 16 * kColumns16 * WarpColumns_;
};

// Shared memory: a ring of stages, the partial sums that the block adds up, the residual where
// there is room, the bias, and where each row's window begins.
template <typename Operand, typename Tile>
struct Memory {
  static_assert(Operand::kUnits % Tile::kTermWarps == 0);
  static constexpr int kXRowBytes = 128;
  static constexpr int kXBytes = Tile::kRows * kXRowBytes;
  static constexpr int kUnitBytes = 32 * Operand::kLaneBytes;
  static constexpr int kStepBytes = Operand::kUnits * kUnitBytes;  // of the weights of 16 filters
  static constexpr int kStageBytes = kXBytes + Tile::kColumns / 16 * kStepBytes;

  // Of one row of sums, in floats: neighbouring rows' columns are in banks apart.
  static constexpr int kPitch = Tile::kColumns + 8;
  static constexpr int kAccumulatorBytes = Tile::kTermWarps * Tile::kRows * kPitch * 4;
  static constexpr int kBiasBytes = Tile::kColumns * 4;
  static constexpr int kTableBytes = Tile::kRows * static_cast<int>(sizeof(int4));

  // 99 KiB are what every GPU from 8.6 on has; two blocks of that fit on a 9.0.
  static constexpr int kLeft = 99 * 1024 - kBiasBytes - kTableBytes;
  // The sums of a large tile lie where the stages were, and its residual is read when it is needed.
  static constexpr bool kAccumulatorsInRing = Tile::kRows * Tile::kColumns > 64 * 64;
  static constexpr int kQuadBytes = 4 * sizeof(typename Operand::X);  // of the residual
  static constexpr int kRowBytes = Tile::kColumns / 4 * kQuadBytes;
  static constexpr bool kResidual =
      !kAccumulatorsInRing &&
      kLeft - kAccumulatorBytes - Tile::kRows * kRowBytes >= 4 * kStageBytes;
  static constexpr int kResidualBytes = kResidual ? Tile::kRows * kRowBytes : 0;
  static constexpr int kFit =
      (kLeft - kResidualBytes - (kAccumulatorsInRing ? 0 : kAccumulatorBytes)) / kStageBytes;
  static constexpr int kStages = kFit > 12 ? 12 : kFit;
  static_assert(kStages >= 3);

  static constexpr int kRingBytes = kStages * kStageBytes;
  static_assert(!kAccumulatorsInRing || kAccumulatorBytes <= kRingBytes);
  static constexpr int kAccumulators = kAccumulatorsInRing ? 0 : kRingBytes;
  static constexpr int kResiduals =
      kAccumulatorsInRing ? kRingBytes : kAccumulators + kAccumulatorBytes;
  static constexpr int kBias = kResiduals + kResidualBytes;
  static constexpr int kTable = kBias + kBiasBytes;
  static constexpr int kBytes = kTable + kTableBytes;
};

// `Bytes` (16, 8, 4 or 2) come from memory, or are zeros.
template <int Bytes>
__device__ inline void copy_or_zero(std::uint32_t to, const void* from, bool some) {
  const int bytes = some ? Bytes : 0;
  if constexpr (Bytes == 2) {  // which no asynchronous copy has
    const unsigned short value = some ? *static_cast<const unsigned short*>(from) : 0;
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
  } else if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes),
                 "r"(bytes)
                 : "memory");
  }
}

// A thread's position among the kernel offsets: of the terms that it copies in every step.
struct KernelOffsets {
  int c, r, s, left;           // left: terms from here to the end
  int offsets_per_step, rest;  // of a step's terms

  __device__ KernelOffsets(const Gemm& p, int term, int step_terms) : left(p.terms - term) {
    const int kernel_offset = term / p.channels;
    c = term - kernel_offset * p.channels;
    r = kernel_offset / p.shape.s;
    s = kernel_offset - r * p.shape.s;
    offsets_per_step = step_terms / p.channels;
    rest = step_terms - offsets_per_step * p.channels;
  }

  __device__ void next_step(const Gemm& p, int step_terms) {
    left -= step_terms;
    s += offsets_per_step;
    c += rest;
    if (c >= p.channels) {
      c -= p.channels;
      ++s;
    }
    for (; s >= p.shape.s; ++r) s -= p.shape.s;
  }
};

__device__ inline float activated(const Gemm& p, float x) {
  if (p.activation == UnaryFunction::clip) return clamp(x, p.alpha, p.beta);
  if (p.activation == UnaryFunction::relu) return unary_relu::of(x, 0.0f, 0.0f);
  if (p.activation == UnaryFunction::hard_swish) return unary_hard_swish::of(x, 0.0f, 0.0f);
  if (p.activation == UnaryFunction::swish) return unary_swish::of(x, p.alpha, 0.0f);
  return unary_of(p.activation, x, p.alpha, p.beta);
}

__device__ inline float4 operator+(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// But with single reads, four neighbouring filters of y and of the residual lie together.
template <typename Operand, typename Tile, Reads reads>
__global__ __launch_bounds__(Tile::kThreads, 2) void conv2d_nhwc_kernel(const Gemm p) {
  using At = Memory<Operand, Tile>;
  using X = typename Operand::X;
  constexpr bool Vectors = reads != Reads::single, Prologue = reads == Reads::prologue;
  constexpr int kStepTerms = Operand::kStepTerms, kUnits = Operand::kUnits;
  extern __shared__ __align__(128) char memory[];
  int4* const table = reinterpret_cast<int4*>(memory + At::kTable);  // position, row, column, image
  const std::uint32_t shared = shared_address(memory);

  let_successors_start();
  const int thread = threadIdx.x, lane = thread % 32;
  const int split = p.split;
  const int rank = split > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int group = p.first_group + static_cast<int>(blockIdx.z) / split;
  const int first_row = static_cast<int>(blockIdx.x) * Tile::kRows;
  const int first_filter = static_cast<int>(blockIdx.y) * Tile::kColumns;
  const int first_step = rank * p.steps_a_block;
  const int steps = max(0, min(p.steps_a_block, p.steps - first_step));
  // Accumulators may be sent to a block that runs, once it needs none of the memory where they go.
  if (split > 1 && !At::kAccumulatorsInRing) arrive_at_cluster_barrier();

  // The weights of the first steps, which no kernel of the pass writes.
  const int filters16 = (p.filters + 15) / 16;
  constexpr int kChunks = At::kStepBytes / 16;  // of a step of 16 filters
  constexpr int kAllChunks = Tile::kColumns / 16 * kChunks;
  constexpr int kOwnChunks = (kAllChunks + Tile::kThreads - 1) / Tile::kThreads;
  const char* weights[kOwnChunks];  // null: filters past the last, zeros
#pragma unroll
  for (int i = 0; i < kOwnChunks; ++i) {
    const int chunk = thread + i * Tile::kThreads;
    const int block = first_filter / 16 + chunk / kChunks;
    const std::int64_t units = static_cast<std::int64_t>(group * filters16 + block) * p.steps;
    weights[i] = block < filters16
                     ? static_cast<const char*>(p.packed) + (units + first_step) * At::kStepBytes +
                           chunk % kChunks * 16
                     : nullptr;
  }
  const auto copy_weights = [&](int stage) {  // in the order of the steps
    const std::uint32_t to = shared + stage * At::kStageBytes + At::kXBytes + thread * 16;
#pragma unroll
    for (int i = 0; i < kOwnChunks; ++i) {
      if (kAllChunks % Tile::kThreads != 0 && thread + i * Tile::kThreads >= kAllChunks) break;
      const bool some = weights[i] != nullptr;
      copy_or_zero<16>(to + i * Tile::kThreads * 16, some ? weights[i] : p.packed, some);
      if (some) weights[i] += At::kStepBytes;
    }
  };
  constexpr int kPrefetch = At::kStages - 1;
#pragma unroll 1
  for (int step = 0; step < min(kPrefetch, steps); ++step) copy_weights(step);

  // Where each row's window begins.
  for (int row = thread; row < Tile::kRows; row += Tile::kThreads) {
    int4 position = {0, kNowhere, kNowhere, 0};
    const unsigned index = static_cast<unsigned>(first_row) + row;
    if (index < static_cast<unsigned>(p.rows)) {
      const int line = index / p.out_w;
      position.w = line / p.out_h;
      position.y = (line - position.w * p.out_h) * p.shape.stride_h - p.shape.pad_top;
      position.z = (index - line * p.out_w) * p.shape.stride_w - p.shape.pad_left;
      position.x = (position.w * p.shape.h + position.y) * p.shape.w + position.z;
    }
    table[row] = position;
  }
  __syncthreads();

  // Terms that a thread copies at once.
  constexpr int kWidth = reads == Reads::single  ? 1
                         : reads == Reads::fours ? 4
                                                 : 16 / static_cast<int>(sizeof(X));
  constexpr int kThreadsARow = kStepTerms / kWidth;
  constexpr int kRowsAtOnce = Tile::kThreads / kThreadsARow;
  const int term = thread % kThreadsARow * kWidth;
  const int pitch_bytes = p.x_pitch * static_cast<int>(sizeof(X));
  KernelOffsets kernel_offsets(p, first_step * kStepTerms + term, kStepTerms);
  const auto copy_x = [&](int stage) {  // in the order of the steps
    const std::uint32_t to = shared + stage * At::kStageBytes;
    // Of what is outside nothing is read, at the first place.
    const X* const x = static_cast<const X*>(p.x) + group * p.channels +
                       (kernel_offsets.left > 0 ? kernel_offsets.c : 0);
    const int down = kernel_offsets.r * p.shape.dilation_h,
              right = kernel_offsets.s * p.shape.dilation_w;
    const int offset = down * p.shape.w + right;
#pragma unroll
    for (int i = 0; i < (Tile::kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
      const int row = thread / kThreadsARow + i * kRowsAtOnce;
      if (Tile::kRows % kRowsAtOnce != 0 && row >= Tile::kRows) break;
      const int4 position = table[row];
      // No branches: the lanes of a warp would go different ways.
      const bool some =
          (kernel_offsets.left > 0) &
          (static_cast<unsigned>(position.y + down) < static_cast<unsigned>(p.shape.h)) &
          (static_cast<unsigned>(position.z + right) < static_cast<unsigned>(p.shape.w));
      const int byte = (term * static_cast<int>(sizeof(X))) ^ Operand::swizzle(row);
      const int at = some ? position.x + offset : 0;
      const char* const from =  // one multiplication with a sum of 64 bits
          reinterpret_cast<const char*>(x) + std::int64_t{at} * pitch_bytes;
      copy_or_zero<static_cast<int>(sizeof(X)) * kWidth>(to + row * At::kXRowBytes + byte, from,
                                                         some);
    }
    kernel_offsets.next_step(p, kStepTerms);
  };

  wait_for_inputs();
#pragma unroll 1
  for (int step = 0; step < kPrefetch; ++step) {
    if (step < steps) copy_x(step);
    commit_copies();  // the first one has the weights of all of them
  }

  // The bias, and the residual where it is copied, come with the next copies.
  const int first_channel = group * p.filters + first_filter;
  for (int column = thread; column < Tile::kColumns; column += Tile::kThreads) {
    const bool some = p.bias && first_filter + column < p.filters;
    const float* const from = some ? p.bias + first_channel + column : nullptr;
    copy_or_zero<4>(shared + At::kBias + 4 * column, some ? from : p.packed, some);
  }

  // The block adds up and writes so many rows of the tile.
  static_assert((Tile::kRows & (Tile::kRows - 1)) == 0);  // and split is a power of two
  const int own_rows_log2 = __ffs(Tile::kRows) - __ffs(split);
  const int own_rows = 1 << own_rows_log2, first_own = rank << own_rows_log2;
  constexpr int kQuads = Tile::kColumns / 4;
  const bool residual_is_copied =
      At::kResidual && Vectors && p.residual && p.residual_is_rounded == (sizeof(X) == 2);
  if (residual_is_copied) {
    for (int quad = thread; quad < own_rows * kQuads; quad += Tile::kThreads) {
      const int index = first_row + first_own + quad / kQuads;
      const int column = quad % kQuads * 4;
      const bool some = index < p.rows && first_filter + column < p.filters;
      const X* from = static_cast<const X*>(p.residual);
      if (some)
        from += static_cast<std::int64_t>(index) * p.residual_pitch + first_channel + column;
      copy_or_zero<At::kQuadBytes>(shared + At::kResiduals + quad * At::kQuadBytes, from, some);
    }
  }

  const int g = lane / 4, t = lane % 4;
  const int term_warp = thread / (32 * Tile::kWarps), warp = thread / 32 % Tile::kWarps;
  const int warp_row = warp / Tile::kWarpColumns * (16 * Tile::kRows16);
  const int warp_column16 = warp % Tile::kWarpColumns * Tile::kColumns16;
  using Accumulators = float[Tile::kRows16][2 * Tile::kColumns16][4];
  Accumulators accumulators = {};
  PastRange<X> past;  // before the products
  int stage = 0, next = kPrefetch;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kPrefetch - 1>();
    __syncthreads();
    if (step + kPrefetch < steps) {
      copy_weights(next);
      copy_x(next);
    }
    commit_copies();
    const char* const from = memory + stage * At::kStageBytes;
    stage = stage == At::kStages - 1 ? 0 : stage + 1;
    next = next == At::kStages - 1 ? 0 : next + 1;
#pragma unroll
    for (int i_unit = 0; i_unit < kUnits / Tile::kTermWarps; ++i_unit) {
      const int unit = i_unit * Tile::kTermWarps + term_warp;
      float4 factors, added;
      const int term = (first_step + step) * kStepTerms + unit * 16 + 4 * t;
      const int channel = group * p.channels + term;  // where there is a prologue
      if constexpr (Prologue) {
        const auto four = [&](const float* from, float other) {
          if (!from || term >= p.channels) return make_float4(other, other, other, other);
          return *reinterpret_cast<const float4*>(from + channel);
        };
        factors = four(p.scale_per_image ? nullptr : p.scale, 1.0f);
        added = four(p.shift, 0.0f);
      }
      const auto read = [&](int row) {
        const int byte =
            ((unit * 16 + t * 4) * static_cast<int>(sizeof(X))) ^ Operand::swizzle(row);
        const auto four =
            *reinterpret_cast<const typename Operand::Four*>(from + row * At::kXRowBytes + byte);
        if constexpr (!Prologue) {
          return four;
        } else {
          if (p.scale_per_image && term < p.channels) {
            factors = *reinterpret_cast<const float4*>(
                p.scale + static_cast<std::int64_t>(table[row].w) * p.shape.c + channel);
          }
          const auto one = [&](float v, float a, float b) {
            return max_nan(fmaf(v, a, b), p.floor);
          };
          const float4 x = Operand::widen(four);
          const auto made = Operand::narrow(
              make_float4(one(x.x, factors.x, added.x), one(x.y, factors.y, added.y),
                          one(x.z, factors.z, added.z), one(x.w, factors.w, added.w)));
          if constexpr (sizeof(X) == 2) {
            const bool counts = table[row].y >= 0;
            past.look(four.x, made.x, counts);
            past.look(four.y, made.y, counts);
          }
          return made;
        }
      };
#pragma unroll
      for (int i = 0; i < Tile::kRows16; ++i) {
        const int row = warp_row + 16 * i + g;
        const typename Operand::A a(read(row), read(row + 8));
#pragma unroll
        for (int j = 0; j < Tile::kColumns16; ++j) {
          const typename Operand::B b(from + At::kXBytes +
                                      ((warp_column16 + j) * kUnits + unit) * At::kUnitBytes +
                                      lane * Operand::kLaneBytes);
          Operand::multiply(accumulators[i][2 * j], accumulators[i][2 * j + 1], a, b);
        }
      }
    }
  }

  if (Prologue && past.found()) tell(p.overflow);

  // Partial sums go to the block that adds them up: [split][term warps][own rows][kPitch].
  wait_for_copies<0>();
  if constexpr (At::kAccumulatorsInRing) {
    __syncthreads();
    if (split > 1) arrive_at_cluster_barrier();
  }
  if (split > 1) wait_at_cluster_barrier();
  const auto send = [&](int row, int column, float x, float y) {
    const int owner = row >> own_rows_log2;
    const int slot =
        ((rank * Tile::kTermWarps + term_warp) << own_rows_log2) + (row & (own_rows - 1));
    const int offset = At::kAccumulators + (slot * At::kPitch + column) * 4;
    if (split > 1) {
      store_cluster(cluster_address(shared + offset, owner), x, y);
    } else {
      *reinterpret_cast<float2*>(memory + offset) = make_float2(x, y);
    }
  };
#pragma unroll
  for (int i = 0; i < Tile::kRows16; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * Tile::kColumns16; ++j) {
      const int row = warp_row + 16 * i + g, column = 16 * warp_column16 + 8 * j + 2 * t;
      send(row, column, accumulators[i][j][0], accumulators[i][j][1]);
      send(row + 8, column, accumulators[i][j][2], accumulators[i][j][3]);
    }
  }
  if (split > 1) {
    cluster_barrier();
  }
  __syncthreads();  // what each thread's copies brought, and, alone, the sums

  const int slots = split * Tile::kTermWarps;
#pragma unroll 1
  for (int quad = thread; quad < own_rows * kQuads; quad += Tile::kThreads) {
    const int row = quad / kQuads, column = quad % kQuads * 4;
    const int index = first_row + first_own + row, filter = first_filter + column;
    if (index >= p.rows || filter >= p.filters) continue;
    const float4* part = reinterpret_cast<const float4*>(memory + At::kAccumulators +
                                                         (row * At::kPitch + column) * 4);
    const int apart = own_rows * At::kPitch / 4;
    float4 sum = part[0];
    if (slots > 1) sum = sum + part[apart];
    for (int slot = 2; slot < slots; slot += 2) {
      part += 2 * apart;
      sum = sum + part[0];
      if (slot + 1 < slots) sum = sum + part[apart];
    }
    sum = sum + *reinterpret_cast<const float4*>(memory + At::kBias + column * 4);
    const int channel = first_channel + column;
    const std::int64_t to = static_cast<std::int64_t>(index) * p.y_pitch + channel;
    const std::int64_t added = static_cast<std::int64_t>(index) * p.residual_pitch + channel;
    float four[4] = {sum.x, sum.y, sum.z, sum.w};
    constexpr bool kRounds = sizeof(X) == 2;
    if constexpr (Vectors) {
      float more[4] = {};
      if (residual_is_copied) {
        const char* const from = memory + At::kResiduals + quad * At::kQuadBytes;
        load_neighbours(reinterpret_cast<const X*>(from), more);
      } else if (p.residual) {
        if (kRounds && p.residual_is_rounded) {
          load_neighbours(static_cast<const X*>(p.residual) + added, more);
        } else {
          load_neighbours(static_cast<const float*>(p.residual) + added, more);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = activated(p, four[i] + more[i]);
      if (kRounds && p.y_is_rounded) {
        store_neighbours(static_cast<X*>(p.y) + to, four, p.overflow);
      } else {
        store_neighbours(static_cast<float*>(p.y) + to, four, p.overflow);
      }
    } else {
      for (int i = 0; i < min(4, p.filters - filter); ++i) {
        float one[1] = {0.0f};
        if (p.residual && kRounds && p.residual_is_rounded) {
          load_neighbours(static_cast<const X*>(p.residual) + added + i, one);
        } else if (p.residual) {
          load_neighbours(static_cast<const float*>(p.residual) + added + i, one);
        }
        one[0] = activated(p, four[i] + one[0]);
        if (kRounds && p.y_is_rounded) {
          store_neighbours(static_cast<X*>(p.y) + to + i, one, p.overflow);
        } else {
          store_neighbours(static_cast<float*>(p.y) + to + i, one, p.overflow);
        }
      }
    }
  }
}

// ---- which tile, and how many blocks share it ----

using TileList = std::tuple<Tile<2, 2, 2, 2>,     // 64 x 64
                            Tile<2, 2, 1, 2, 2>,  // 32 x 64
                            Tile<1, 4, 1, 1, 2>,  // 16 x 64
                            Tile<4, 1, 1, 2, 2>,  // 64 x 32
                            Tile<4, 2, 2, 2>,     // 128 x 64
                            Tile<2, 4, 4, 2>,     // 128 x 128
                            Tile<4, 2, 1, 2>>;    // 64 x 64, twice the warps
static_assert(std::tuple_size_v<TileList> == kTiles);

template <typename Operand, typename Tile, Reads reads>
void launch_tile(Gemm p, int split, Stream stream) {
  const auto kernel = conv2d_nhwc_kernel<Operand, Tile, reads>;
  constexpr int kBytes = Memory<Operand, Tile>::kBytes;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  if (split > 8) allow_large_clusters(kernel);
  p.split = split;
  p.steps_a_block = (p.steps + split - 1) / split;
  constexpr int kMostLayers = 65535;  // of a grid, along z
  const int most = kMostLayers / split;
  for (p.first_group = 0; p.first_group < p.shape.groups; p.first_group += most) {
    const dim3 grid(static_cast<unsigned>((std::int64_t{p.rows} + Tile::kRows - 1) / Tile::kRows),
                    (p.filters + Tile::kColumns - 1) / Tile::kColumns,
                    std::min(most, p.shape.groups - p.first_group) * split);
    launch("conv2d_nhwc_kernel", kernel, grid, dim3(Tile::kThreads), kBytes, stream, split, p);
  }
}

template <typename Operand, Reads reads, int Index = 0>
void launch_tiles(const Gemm& p, const Choice& choice, Stream stream) {
  if constexpr (Index < kTiles) {
    if constexpr (is_compiled(Index, Operand::kOperands, reads)) {
      if (choice.tile == Index) {
        return launch_tile<Operand, std::tuple_element_t<Index, TileList>, reads>(p, choice.split,
                                                                                  stream);
      }
    }
    return launch_tiles<Operand, reads, Index + 1>(p, choice, stream);
  } else {
    throw std::logic_error("conv2d_nhwc: expected a tile that is compiled, found number " +
                           std::to_string(choice.tile));
  }
}

template <typename Operand>
void launch_gemm(const Gemm& p, Reads reads, const Choice& choice, Stream stream) {
  switch (reads) {
    case Reads::vectors:
      return launch_tiles<Operand, Reads::vectors>(p, choice, stream);
    case Reads::prologue:
      return launch_tiles<Operand, Reads::prologue>(p, choice, stream);
    case Reads::fours:
      return launch_tiles<Operand, Reads::fours>(p, choice, stream);
    case Reads::single:
      return launch_tiles<Operand, Reads::single>(p, choice, stream);
  }
}

// Each is compiled in a file of its own.
#define CNN_ENGINE_OPERANDS(Operand)                                             \
  template void launch_gemm<Operand>(const Gemm&, Reads, const Choice&, Stream); \
  template void launch_pack<Operand>(const float*, void*, const Conv2dShape&, int, int, Stream);

}  // namespace cnn_engine::cuda::nhwc
