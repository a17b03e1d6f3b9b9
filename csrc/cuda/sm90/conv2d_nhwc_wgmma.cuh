// conv2d_nhwc as a product of matrices that the copy engine brings and wgmma multiplies.
//
// D [filters, positions]: a tile has 64 filters a warpgroup and any multiple of eight positions, so
// that few positions waste nothing. K are a filter's kernel offsets, (r, s, c) with c fastest, in
// steps of 128 bytes of one kernel offset's channels. Warps of their own ask for what the steps
// need, weights before the kernel waits for its inputs, into a ring of stages; warpgroups multiply.
// Weights are packed as the stages have them (conv2d_nhwc_wgmma_pack.cuh). Images come by im2col
// copies, or as rows; float32 becomes two parts of float16 in the stage
// (conv2d_nhwc_wgmma_split.cuh).
//
// The blocks of a cluster have parts of a tile's steps. Each adds up every split-th eight of the
// tile's positions: the others send it what they hold of them, and it adds in a fixed order: the
// bits depend on the shape alone.
//
// Clamped results are made as products are held, with bias and residual. Those that are stored in
// 16 bits leave through shared memory; of float32 and tf32 at once (AtOnce), 32 bytes of a position
// by eight lanes. All others leave through shared memory as sums, which what follows is applied to
// as rows are written.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_epilogue.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_im2col.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_prologue.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_split.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda {
namespace wgmma {

template <int Groups, int Columns, bool Split = false>
struct Tile {
  static constexpr int kWeightBytes = Groups * kFilters * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + Columns * kRowBytes;
  // Lanes that store sums at once have four positions and eight filters: all banks.
  static constexpr int kPitch = Groups * kFilters + 4;
  static constexpr int kMadePitch = Groups * kFilters * 2 + 16;  // bytes, of rows of 8x8 tiles
  // Pairs of warps that ask for copies. What one asks for takes 220 cycles, longer than the
  // products of a small tile's step: two take turns.
  static constexpr int kPairs = Groups == 1 && Columns <= 128 && !Split ? 2 : 1;
  // Threads that multiply, and that make two parts of positions.
  static constexpr int kMultiplying = 128 * Groups, kSplitting = Split ? 128 : 0;
  // A block by itself whose sums need more registers than threads have at first: all others, whole
  // warpgroups, give up some of theirs.
  static constexpr bool kGives = Split && Groups * Columns > 128;
  static constexpr int kThreads = kMultiplying + kSplitting + (kGives ? 128 : 64 * kPairs);
  static constexpr int kBlocks =  // of a multiprocessor
      TileShape{Groups, Columns, false, Split}.is_alone() ? 1
      : Columns > 128                                     ? 3 - Groups
                                                          : 2;
  // Barriers of a stage: it is full, and empty, and its positions are two parts.
  static constexpr int kStageBarriers = Split ? 3 : 2;
};

template <typename T, int Groups, int Columns>
using TileOf = Tile<Groups, Columns, std::is_same_v<T, float>>;

template <typename T, int Groups, int Columns, bool Prologue, bool Both, bool AtOnce>
__global__ void __launch_bounds__(TileOf<T, Groups, Columns>::kThreads,
                                  TileOf<T, Groups, Columns>::kBlocks)
    conv2d_nhwc_wgmma_kernel(const __grid_constant__ CUtensorMap images,
                             const __grid_constant__ CUtensorMap others,
                             const __grid_constant__ CUtensorMap residuals,
                             const __grid_constant__ Gemm p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using At = TileOf<T, Groups, Columns>;
  constexpr int kTileFilters = Groups * kFilters, kThreads = At::kMultiplying;
  constexpr bool kRounds = sizeof(T) == 2;  // results that are stored as what is multiplied
  constexpr bool kSplits = std::is_same_v<T, float>;
  // Those that made parts of positions help to write rows, where all threads have as many
  // registers.
  constexpr bool kHelps = kSplits && !AtOnce && !At::kGives;
  using Rows = RowsEpilogue<T, kThreads + (kHelps ? At::kSplitting : 0), Groups, Columns>;
  using Splitter = Splitting<kSplits ? Columns : 64, Prologue>;  // of float32 alone
  const bool in_fragments = kRounds && p.in_fragments;
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t ring = shared_address(memory);
  const std::uint32_t received = ring + p.at.received;
  const std::uint32_t full = ring + p.at.barriers;
  const std::uint32_t empty = full + 8 * p.stages, split = empty + 8 * p.stages;
  const std::uint32_t residual_is_here = full + At::kStageBarriers * 8 * p.stages;
  const std::uint32_t all_received = residual_is_here + 8;
  const std::uint32_t accumulators_are_complete =
      residual_is_here;  // of float32, whose residual is not copied

  if (!p.holds) let_successors_start();
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32);
  const int rank = p.split > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int first_row = static_cast<int>(blockIdx.x) * Columns;
  const int first_filter = static_cast<int>(blockIdx.y) * kTileFilters;
  const Gemm::Steps own = p.steps_at<Both>(first_filter);
  const int first_step = own.first + rank * p.steps_a_block;
  const int steps = max(0, min(p.steps_a_block, own.end - first_step));
  // The block adds up and writes every p.split-th eight of the tile's positions.
  const int own_eights = (Columns / 8 - rank + p.split - 1) >> p.log_split;
  const int units = min(Groups, (p.filters - first_filter + kFilters - 1) / kFilters);

  if (thread == kThreads) {
    prefetch_tensor_map(&images);
    if constexpr (Both) prefetch_tensor_map(&others);
    if (p.residual_rows > 0) prefetch_tensor_map(&residuals);
    init_mbarrier(residual_is_here, kHelps ? kThreads / 32 * kWarpArrivals : 1);
    for (int stage = 0; stage < p.stages; ++stage) {
      init_mbarrier(full + 8 * stage, 1);
      // Products tell at once for a warpgroup, who reads scales for a warp.
      init_mbarrier(empty + 8 * stage, kSplits ? 4 * Groups * kWarpArrivals : Groups);
      if constexpr (kSplits) {
        init_mbarrier(split + 8 * stage, Splitter::kTeamWarps * kWarpArrivals);
      }
    }
    if (p.split > 1) {
      init_mbarrier(all_received, 1);
      expect_tx(all_received, (p.split - 1) * own_eights * kThreads * 16);
    }
    fence_mbarrier_init();
  }
  __syncwarp();
  if (p.split > 1) arrive_at_cluster_barrier_relaxed();
  __syncthreads();
  if (kForRacecheck && p.split > 1) wait_at_cluster_barrier();  // else it does not end

  const auto position_of = [&](int row) {
    return first_row + ((((row >> 3) << p.log_split) + rank) << 3) + row % 8;
  };
  const auto scales_of = [&](int stage) {
    return reinterpret_cast<float*>(memory + p.at.scales) + stage * Columns;
  };
  if constexpr (At::kGives) {
    if (warp >= kThreads / 32) setmaxnreg_dec<96>();
  }
  if constexpr (kSplits) {
    const int splitter = warp - kThreads / 32;
    if (splitter >= 0 && splitter < Splitter::kWarps) {
      if (p.ahead == 0) wait_for_inputs();
      if constexpr (Prologue) {
        ask_for_affine<kRowBytes / sizeof(T), At::kSplitting, Columns>(
            p, first_step, steps, first_row, thread - kThreads);
      }
      Splitter splitting(p, first_row, splitter);
      int stage = splitting.team(), parity = 0;
#pragma unroll 1
      for (int step = stage; step < steps; step += Splitter::kTeams) {
        splitting.load(first_step + step);
        // Scales that were read are written again: what orders that is not the copy alone.
        wait_mbarrier(empty + 8 * stage, parity ^ 1);
        wait_mbarrier(full + 8 * stage, parity);
        splitting.apply(memory + stage * At::kStageBytes + At::kWeightBytes, scales_of(stage));
        fence_async_proxy();
        arrive_for_warp(split + 8 * stage);
        stage += Splitter::kTeams;
        if (stage >= p.stages) {
          stage -= p.stages;
          parity ^= 1;
        }
      }
      if constexpr (kHelps) {
        const Rows rows(p, first_filter, thread);
        wait_for_inputs();  // the residual may be one
        wait_mbarrier(accumulators_are_complete, 0);
        rows.template write<At::kPitch>(p, memory, own_eights * 8, position_of);
      }
      return;
    }
  }
  if (warp >= (kThreads + At::kSplitting) / 32) {
    // One of a pair asks for weights and one for images, of every kPairs-th step.
    constexpr int kPairs = At::kPairs;
    const int helper = warp - (kThreads + At::kSplitting) / 32, first = helper / 2;
    if (helper >= 2 * kPairs) return;
    const bool leads = leads_warp();
    int stage = first, parity = 1;
    const auto next = [&] {
      stage += kPairs;
      if (stage >= p.stages) {
        stage -= p.stages;
        parity ^= 1;
      }
    };
    if (helper % 2 == 0) {
      const std::int64_t before =
          p.weights_at<Both>(first_filter) + (first_step - own.first) + first;
      const char* weights = p.packed + before * kUnitBytes;
      const std::int64_t unit_bytes = std::int64_t{own.end - own.first} * kUnitBytes;
#pragma unroll 1
      for (int step = first; step < steps; step += kPairs) {
        const std::uint32_t to = ring + stage * At::kStageBytes, barrier = full + 8 * stage;
        wait_mbarrier(empty + 8 * stage, parity);
        if (leads) {
          expect_tx(barrier, units * kUnitBytes + Columns * kRowBytes);
          copy_bulk(to, weights, kUnitBytes, barrier);
          if (Groups > 1 && units > 1) {
            copy_bulk(to + kUnitBytes, weights + unit_bytes, kUnitBytes, barrier);
          }
        }
        weights += kPairs * kUnitBytes;
        next();
      }
    } else {
      KernelOffsets<T, Both> kernel_offsets(p, images, others, first_row);
      kernel_offsets.seek(first_step + first);
      if (kernel_offsets.is_nowhere()) return;
      bool waited = false;
      const auto wait = [&] {
        wait_for_inputs();
        if (p.holds) let_successors_start();
        waited = true;
      };
#pragma unroll 1
      for (int step = first; step < steps; step += kPairs) {
        const std::uint32_t to = ring + stage * At::kStageBytes + At::kWeightBytes,
                            barrier = full + 8 * stage;
        if (!waited && first_step + step >= p.ahead) wait();
        wait_mbarrier(empty + 8 * stage, parity);
        if (leads) kernel_offsets.copy(to, barrier);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) kernel_offsets.next();
        next();
      }
      if (!waited) wait();
    }
    return;
  }

  if constexpr (At::kGives) setmaxnreg_inc<160>();
  float bias[2], filters[2];  // of the rows of D that a thread has, and their scales
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int filter = first_filter + warp * 16 + thread % 32 / 4 + 8 * i;
    bias[i] = p.bias && filter < p.filters ? p.bias[filter] : 0.0f;
    filters[i] = kSplits && filter < p.filters ? p.filter_scales[filter] : 0.0f;
  }

  const Rows rows(p, first_filter, thread);

  // Others have made their barriers.
  if (!kForRacecheck && p.split > 1) wait_at_cluster_barrier();
  const auto wait = [&] {
    wait_for_inputs();
    if (p.residual_rows > 0 && thread == 0) {
      expect_tx(residual_is_here, units * p.residual_rows * kRowBytes);
      const int copied = p.split > 1 ? 8 : Columns;
#pragma unroll 1
      for (int unit = 0; unit < units; ++unit) {
#pragma unroll 1
        for (int row = 0; row < p.residual_rows; row += copied) {
          tma_load_tile(ring + p.at.residual + (unit * p.residual_rows + row) * kRowBytes,
                        &residuals, first_filter + unit * kFilters,
                        first_row + (row << p.log_split) + rank * 8, residual_is_here);
        }
      }
    }
  };
  if (p.ahead == 0) wait();
  if constexpr (Prologue && !kSplits) {
    ask_for_affine<kRowBytes / sizeof(T), kThreads, Columns>(p, first_step, steps, first_row,
                                                             thread);
  }

  float accumulators[Columns / 2] = {};
  if constexpr (kSplits) {
    const std::uint64_t weights = matrix_descriptor(ring + warp / 4 * kUnitBytes);
    const std::uint64_t positions = matrix_descriptor(ring + At::kWeightBytes);
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      float of_step[Columns / 2];
      wait_mbarrier(split + 8 * stage, parity);
      const int at = stage * (At::kStageBytes >> 4);
      multiply_parts<Columns>(of_step, weights + at, positions + at);
      wgmma_wait<0>();
      take(of_step);
      add_scaled(accumulators, of_step, scales_of(stage));
      arrive_for_warp(empty + 8 * stage);
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) {
      accumulators[i] = compensated(accumulators[i], p.cut_off) * filters[i % 4 / 2];
    }
  } else {
    const std::uint64_t weights = matrix_descriptor(ring + warp / 4 * kUnitBytes);
    const std::uint64_t positions = matrix_descriptor(ring + At::kWeightBytes);
    int stage = 0, parity = 0, before = 0;
    Preparation<T, kThreads, Columns, Prologue> preparation(p, first_row, thread);
    preparation.load(first_step);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_mbarrier(full + 8 * stage, parity);
      const int at = stage * (At::kStageBytes >> 4);
      if constexpr (Prologue) {
        preparation.apply(memory + stage * At::kStageBytes + At::kWeightBytes);
        preparation.load(first_step + step + 1);
      }
      multiply_rows<T, Columns>(accumulators, weights + at, positions + at);
      wgmma_commit();
      wgmma_wait<1>();  // those of the step before
      if (step > 0 && thread % 128 == 0) arrive(empty + 8 * before);
      before = stage;
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    wgmma_wait<0>();
    preparation.end();
  }
  const auto ready = [&] {
    if (p.ahead > 0) wait();
    if (p.residual_rows > 0) wait_mbarrier(residual_is_here, 0);
  };
  // What is made: rounded, [own positions][kMadePitch], or sums, [own positions][kPitch].
  const std::uint32_t made = ring + p.at.made;
  const std::uint32_t tiles_to =
      made + row_of_tiles(thread) * At::kMadePitch + warp * 32 + piece_of_tiles(thread) * 16;
  const std::uint32_t tiles_from =
      ring + p.at.residual + (warp / 4 * p.residual_rows + row_of_tiles(thread)) * kRowBytes +
      swizzled(row_of_tiles(thread), warp % 4 * 2 + piece_of_tiles(thread)) * 16;
  float* const made_accumulators =
      reinterpret_cast<float*>(memory + p.at.made) + accumulator_index<At::kPitch>(thread);
  bool past = false;
  const auto load_residual = [&](int eight, std::uint32_t (&tiles)[2]) {
    tiles[0] = tiles[1] = 0;
    if (p.residual_rows > 0) load_two_tiles(tiles, tiles_from + eight * 8 * kRowBytes);
  };
  const auto end = [&](int eight, const float (&sum)[4], const std::uint32_t (&tiles)[2]) {
    if constexpr (kRounds) {
      past |= epilogue_in_fragments<T>(Clamp{p.low, p.high}, sum, bias, tiles,
                                       p.rows - position_of(eight * 8),
                                       tiles_to + eight * 8 * At::kMadePitch);
    }
  };
  // What a thread holds of eight positions, as it lies in memory as float32.
  const int held_filter = first_filter + warp * 16 + thread % 32 / 4;
  const auto at_held = [&](int eight, int pitch, const auto& body) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int64_t position = position_of(eight * 8 + thread % 4 * 2 + i % 2);
      const int of = held_filter + 8 * (i / 2);
      if (position < p.rows && of < p.filters) body(i, position * pitch + of);
    }
  };
  const auto load_held = [&](int eight, float (&to)[4]) {
    if (!p.residual) return;
    at_held(eight, p.residual_pitch,
            [&](int i, std::int64_t from) { to[i] = static_cast<const float*>(p.residual)[from]; });
  };
  const auto epilogue_held = [&](int eight, const float (&sum)[4], const float (&added)[4]) {
    at_held(eight, p.y_pitch, [&](int i, std::int64_t to) {
      static_cast<float*>(p.y)[to] = clamp(sum[i] + (bias[i / 2] + added[i]), p.low, p.high);
    });
  };
  const auto keep_accumulators = [&](int eight, const float (&sum)[4]) {
    store_accumulators<At::kPitch>(made_accumulators + eight * 8 * At::kPitch, sum);
  };
  float added[4] = {};  // of the next eight, asked for while others still send
  const auto add_up = [&](auto split) {
    add_up_in_cluster<split, Columns, kThreads>(
        reinterpret_cast<float4*>(memory), accumulators, rank, received, all_received, thread,
        [&] {
          ready();
          if (AtOnce) load_held(0, added);
        },
        [&](int eight, const float (&sum)[4]) {
          if (AtOnce) {
            float next[4] = {};
            if (eight + 1 < own_eights) load_held(eight + 1, next);
            epilogue_held(eight, sum, added);
            memcpy(added, next, sizeof(added));
          } else if (in_fragments) {
            std::uint32_t tiles[2];
            load_residual(eight, tiles);
            end(eight, sum, tiles);
          } else {
            keep_accumulators(eight, sum);
          }
        });
  };
  if (AtOnce && p.split == 1) {
    ready();
    constexpr int kEights = Columns / 8, kAtOnce = 4;
#pragma unroll
    for (int first = 0; first < kEights; first += kAtOnce) {
      float more[kAtOnce][4] = {};
#pragma unroll
      for (int j = first; j < kEights && j < first + kAtOnce; ++j) load_held(j, more[j - first]);
#pragma unroll
      for (int j = first; j < kEights && j < first + kAtOnce; ++j) {
        epilogue_held(j,
                      {accumulators[4 * j], accumulators[4 * j + 1], accumulators[4 * j + 2],
                       accumulators[4 * j + 3]},
                      more[j - first]);
      }
    }
  } else if (p.split == 1) {
    named_barrier<kThreads>(1);  // no one multiplies what lies in the ring
    ready();
    constexpr int kEights = Columns / 8, kAtOnce = 4;
#pragma unroll
    for (int first = 0; first < kEights; first += kAtOnce) {
      std::uint32_t tiles[kAtOnce][2];
#pragma unroll
      for (int j = first; j < kEights && j < first + kAtOnce; ++j) {
        if (in_fragments) load_residual(j, tiles[j - first]);
      }
#pragma unroll
      for (int j = first; j < kEights && j < first + kAtOnce; ++j) {
        const float sum[4] = {accumulators[4 * j], accumulators[4 * j + 1], accumulators[4 * j + 2],
                              accumulators[4 * j + 3]};
        if (in_fragments) {
          end(j, sum, tiles[j - first]);
        } else {
          keep_accumulators(j, sum);
        }
      }
    }
  } else if (p.split == 2) {
    add_up(std::integral_constant<int, 2>());
  } else if (p.split == 4) {
    add_up(std::integral_constant<int, 4>());
  } else {
    add_up(std::integral_constant<int, 8>());
  }
  if (AtOnce) return;
  if constexpr (kHelps) arrive_for_warp(accumulators_are_complete);
  if (past && warp / 4 < units) tell(p.overflow);  // filters beyond the last have no weights
  named_barrier<kThreads>(1);
  if (in_fragments) {
    rows.copy(p, made, At::kMadePitch, own_eights * 8, position_of);
  } else {
    rows.template write<At::kPitch>(p, memory, own_eights * 8, position_of);
  }
#endif
}

// Channels of sums that a large tile adds a residual to sooner by way of shared memory, in rows:
// those of ConvNeXt's blocks, by measurement; all shorter ones, and those of 3x3, take longer so.
constexpr int kManyChannels = 512;

template <typename T, int Groups, int Columns, bool Prologue, bool Both>
void launch_tile(const Sources& from, Gemm p, const Choice& choice, Stream stream) {
  constexpr bool kLiesAsFloat32 = sizeof(T) == 4;
  using At = TileOf<T, Groups, Columns>;
  using Copied = std::conditional_t<Prologue && kLiesAsFloat32, float, T>;  // not rounded yet
  auto kernel = conv2d_nhwc_wgmma_kernel<T, Groups, Columns, Prologue, Both, false>;
  if constexpr (kLiesAsFloat32) {
    const bool adds_to_long = p.residual && p.channels > kManyChannels && Columns >= 64;
    if (p.at_once && !adds_to_long) {
      kernel = conv2d_nhwc_wgmma_kernel<T, Groups, Columns, Prologue, Both, true>;
    }
  }
  constexpr int kTileFilters = Groups * kFilters;
  p.split = choice.split;
  p.log_split = log2_of(choice.split);
  p.steps_a_block = (p.most_steps() + p.split - 1) / p.split;
  p.stages = std::min(choice.stages, p.steps_a_block);
  CUtensorMap residuals = {};
  if (p.residual && p.residual_is_rounded && p.in_pieces) {
    p.residual_rows = own_rows(Columns, p.split);
    residuals = map_of_rows<T>(p.residual, p.rows, p.filters, p.residual_pitch,
                               p.split > 1 ? 8 : Columns, CU_TENSOR_MAP_SWIZZLE_128B);
  }
  const int rows = own_rows(Columns, p.split);
  p.at.made = p.split > 1 ? rows * kTileFilters * 4 : 0;
  int bytes = std::max(p.stages * At::kStageBytes, p.at.made + rows * At::kPitch * 4);
  const auto take = [&](int more) {
    const int at = (bytes + 1023) / 1024 * 1024;
    bytes = at + more;
    return at;
  };
  p.at.residual = take(Groups * p.residual_rows * kRowBytes);
  p.at.received = take(received_bytes(Groups, Columns, p.split));
  p.at.scales = take(std::is_same_v<T, float> ? p.stages * Columns * 4 : 0);
  p.at.barriers = take(At::kStageBarriers * 8 * p.stages + 16);
  const dim3 grid((p.rows + Columns - 1) / Columns, (p.filters + kTileFilters - 1) / kTileFilters,
                  p.split);
  // Of 32-bit parts, which take long; those of others gain more from the next launch beside them.
  if constexpr (std::is_same_v<T, float>) {
    bytes = spread_bytes(bytes, std::int64_t{1} * grid.x * grid.y * grid.z, target_here(), 2);
  }
  make_ready(kernel, bytes);
  launch("conv2d_nhwc_wgmma_kernel", kernel, grid, dim3(At::kThreads), bytes, stream, p.split,
         map_of_images<Copied>(from.first, Columns), map_of_images<Copied>(from.second, Columns),
         residuals, p);
}

}  // namespace wgmma
}  // namespace cnn_engine::cuda
