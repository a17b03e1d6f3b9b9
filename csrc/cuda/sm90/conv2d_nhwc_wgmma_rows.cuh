// conv2d_nhwc_wgmma of 3x3 windows one position apart, where tiles are parts of the image's rows:
// of clamped results that are stored as what is multiplied (Gemm's in_rows).
//
// All nine kernel offsets of 128 bytes of channels read what is copied once: the three rows of the
// image that a tile's windows reach, [3][positions + 2], which a kernel offset's matrix is from
// another position on. Pieces of 16 bytes are swizzled by where they lie in shared memory, wherever
// a matrix begins (wgmma.cuh). So a step copies weights alone. Sums are made channels by channels,
// kernel offset by kernel offset.
//
// Of narrow images a tile is several rows, whose windows are one matrix with the two columns
// between a row and the next, of which nothing is kept. Blocks of a cluster may have parts of the
// channels.
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_epilogue.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda {

namespace wgmma {

// Where things lie in the shared memory of a block: rows of the image, weights, barriers; what is
// made in the place of the first two.
template <int Groups, int Columns, int Blocks, bool Several>
struct RowsTile {
  // Positions that a tile reaches, with those behind the last row: pitches are Columns / 2 + 1 at
  // most.
  static constexpr int kPositions = Several ? 2 * Columns + 4 : 3 * (Columns + 2);
  static constexpr int kImageBytes = (kPositions * kRowBytes + 1023) / 1024 * 1024;
  static constexpr int kWeightBytes = Groups * kFilters * kRowBytes;
  // Of what others of a cluster send.
  static constexpr int kReceived = Several ? received_bytes(Groups, Columns, kRowsSplit) : 0;
  static constexpr int kRoom = 224 / Blocks * 1024 - 2 * kImageBytes - kReceived - 1024;
  static constexpr int kStages = std::min(9, kRoom / kWeightBytes);
  static constexpr int kMadePitch = Groups * kFilters * 2 + 16;
  static constexpr int kRing = 2 * kImageBytes, kBarriers = kRing + kStages * kWeightBytes;
  static constexpr int kFrom = kBarriers + 16 * (kStages + 3);  // received
  static constexpr int kBytes = kFrom + kReceived;
  static_assert(Columns * (kMadePitch + Groups * kFilters * 4) <= kBarriers);
};

template <typename T, int Groups, int Columns, int Blocks, bool Several>
__global__ void __launch_bounds__(128 * Groups + 64, Blocks)
    conv2d_nhwc_wgmma_rows_kernel(const __grid_constant__ CUtensorMap images,
                                  const __grid_constant__ Gemm p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using At = RowsTile<Groups, Columns, Blocks, Several>;
  constexpr int kTileFilters = Groups * kFilters, kThreads = 128 * Groups;  // that multiply
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t rows = shared_address(memory), ring = rows + At::kRing;
  const std::uint32_t full = rows + At::kBarriers, empty = full + 8 * At::kStages;
  const std::uint32_t there = empty + 8 * At::kStages, read = there + 16;  // of rows of the image
  const std::uint32_t received = rows + At::kFrom, all_received = read + 16;

  if (!p.holds) let_successors_start();
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32);
  const int lines = Several ? p.lines : 1, parts = Several ? 1 : p.out_w / Columns;
  const int pitch = Several ? p.out_w + 2 : Columns + 2;
  const int line = static_cast<int>(blockIdx.x) / parts * lines;
  const int w = Several ? 0 : (static_cast<int>(blockIdx.x) - line * parts) * Columns;
  const int image = line / p.out_h, h = line - image * p.out_h;
  const int rank = Several && p.split > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int first_chunk = rank * p.steps_a_block;
  const int end_chunk = min(first_chunk + p.steps_a_block, p.chunks);
  const int own_eights = (Columns / 8 - rank + p.split - 1) >> p.log_split;
  const int first_filter = static_cast<int>(blockIdx.y) * kTileFilters;
  const int units = min(Groups, (p.filters - first_filter + kFilters - 1) / kFilters);

  if (thread == kThreads) {
    prefetch_tensor_map(&images);
    for (int stage = 0; stage < At::kStages; ++stage) {
      init_mbarrier(full + 8 * stage, 1);
      init_mbarrier(empty + 8 * stage, Groups);
    }
    for (int i = 0; i < 2; ++i) {
      init_mbarrier(there + 8 * i, 1);
      init_mbarrier(read + 8 * i, Groups);
    }
    if (Several && p.split > 1) {
      init_mbarrier(all_received, 1);
      expect_tx(all_received, (p.split - 1) * own_eights * kThreads * 16);
    }
    fence_mbarrier_init();
  }
  __syncwarp();
  if (Several && p.split > 1) arrive_at_cluster_barrier_relaxed();
  __syncthreads();
  if (kForRacecheck && Several && p.split > 1) wait_at_cluster_barrier();  // else it does not end

  if (warp == kThreads / 32) {  // asks for weights
    const bool leads = leads_warp();
    const std::int64_t unit_bytes = static_cast<std::int64_t>(p.steps) * kUnitBytes;
    const char* const weights = p.packed + first_filter / kFilters * unit_bytes;
    int stage = 0, parity = 1;
#pragma unroll 1
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
#pragma unroll 1
      for (int step = chunk; step < p.steps; step += p.chunks) {  // a kernel offset's
        const std::uint32_t to = ring + stage * At::kWeightBytes, barrier = full + 8 * stage;
        const char* const from = weights + static_cast<std::int64_t>(step) * kUnitBytes;
        wait_mbarrier(empty + 8 * stage, parity);
        if (leads) {
          expect_tx(barrier, units * kUnitBytes);
          copy_bulk(to, from, kUnitBytes, barrier);
          if (Groups > 1 && units > 1) {
            copy_bulk(to + kUnitBytes, from + unit_bytes, kUnitBytes, barrier);
          }
        }
        if (++stage == At::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    return;
  }
  if (warp == kThreads / 32 + 1) {  // asks for rows of the image
    const bool leads = leads_warp();
    constexpr int kChannels = kRowBytes / static_cast<int>(sizeof(T));
    if ((image | h) < 0) return;  // never: but so all of it is divided before the wait
    wait_for_inputs();
    if (p.holds) let_successors_start();
#pragma unroll 1
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
      const int turn = chunk - first_chunk, at = turn % 2;
      wait_mbarrier(read + 8 * at, turn / 2 % 2 ^ 1);
      if (leads) {
        expect_tx(there + 8 * at, (lines + 2) * pitch * kRowBytes);
        tma_load_box(rows + at * At::kImageBytes, &images, chunk * kChannels, w - p.pad_left,
                     h - p.pad_top, image, there + 8 * at);
      }
    }
    return;
  }

  float bias[2];  // of the rows of D that a thread has
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int filter = first_filter + warp * 16 + thread % 32 / 4 + 8 * i;
    bias[i] = p.bias && filter < p.filters ? p.bias[filter] : 0.0f;
  }
  // Others have made their barriers.
  if (!kForRacecheck && Several && p.split > 1) wait_at_cluster_barrier();
  wait_for_inputs();  // of what this kernel overwrites, others may read
  float accumulators[Columns / 2] = {};
  const std::uint64_t weights = matrix_descriptor(ring + warp / 4 * kUnitBytes);
  int stage = 0, parity = 0, before = 0;
#pragma unroll 1
  for (int turn = 0; turn < end_chunk - first_chunk; ++turn) {
    const int at = turn % 2;
    const std::uint32_t of_chunk = rows + at * At::kImageBytes;
    wait_mbarrier(there + 8 * at, turn / 2 % 2);
#pragma unroll 1
    for (int r = 0; r < 3; ++r) {
#pragma unroll
      for (int s = 0; s < 3; ++s) {
        wait_mbarrier(full + 8 * stage, parity);
        multiply_rows<T, Columns>(accumulators, weights + stage * (At::kWeightBytes >> 4),
                                  matrix_descriptor(of_chunk + (r * pitch + s) * kRowBytes));
        wgmma_commit();
        wgmma_wait<1>();  // those of the step before
        if (turn + r + s > 0 && thread % 128 == 0) {
          arrive(empty + 8 * before);
          if (r + s == 0) arrive(read + 8 * (at ^ 1));
        }
        before = stage;
        if (++stage == At::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  }
  wgmma_wait<0>();

  // Behind the sums that a block of a cluster has.
  const std::uint32_t made = rows + (p.split > 1 ? own_eights * kThreads * 16 : 0);
  const std::uint32_t to =
      made + row_of_tiles(thread) * At::kMadePitch + warp * 32 + piece_of_tiles(thread) * 16;
  bool past = false;
  // Of a column of the tile, which row of the image it is in; past the row's end nothing is kept.
  const auto line_of = [&](int column) {
    return Several ? column / pitch : 0;
  };
  const auto is_kept = [&](int column) {
    return !Several || (column % pitch < p.out_w && column < lines * pitch);
  };
  const auto end = [&](int eight, int j, const float (&sum)[4]) {
    const int left = is_kept(8 * j + thread % 4 * 2) ? 8 : 0;  // pitches are even, as pairs are
    past |= epilogue_in_fragments<T>(Clamp{p.low, p.high}, sum, bias, {}, left,
                                     to + eight * 8 * At::kMadePitch);
  };
  if (!Several || p.split == 1) {
    named_barrier<kThreads>(1);  // no one multiplies what lies where it is made
#pragma unroll
    for (int j = 0; j < Columns / 8; ++j) {
      end(j, j,
          {accumulators[4 * j], accumulators[4 * j + 1], accumulators[4 * j + 2],
           accumulators[4 * j + 3]});
    }
  } else if constexpr (Several) {
    add_up_in_cluster<kRowsSplit, Columns, kThreads>(
        reinterpret_cast<float4*>(memory), accumulators, rank, received, all_received, thread,
        [] {},
        [&](int eight, const float (&sum)[4]) { end(eight, eight * kRowsSplit + rank, sum); });
  }
  if (past && warp / 4 < units) tell(p.overflow);  // filters beyond the last have no weights
  named_barrier<kThreads>(1);

  constexpr int kWidth = 16 / sizeof(T), kPieces = kTileFilters / kWidth;
  const int filter = first_filter + thread % kPieces * kWidth;
  if (filter >= p.filters) return;
  const std::int64_t first = static_cast<std::int64_t>(line) * p.out_w + w;
#pragma unroll 4
  for (int row = thread / kPieces; row < own_eights * 8; row += kThreads / kPieces) {
    const int column = (((row >> 3) << p.log_split) + rank) * 8 + row % 8;
    if (!is_kept(column)) continue;
    const std::int64_t position = first + column - 2 * line_of(column);
    *reinterpret_cast<float4*>(static_cast<T*>(p.y) + position * p.y_pitch + filter) =
        load_float4(made + row * At::kMadePitch + thread % kPieces * 16);
  }
#endif
}

template <typename T, int Tile = 0>
void launch_rows(const SourceImages& images, Gemm p, const Choice& choice, Stream stream) {
  if constexpr (Tile < kRowsTiles) {
    if (choice.tile != Tile) return launch_rows<T, Tile + 1>(images, p, choice, stream);
    constexpr RowsShape kShape = kRows[Tile];
    using At = RowsTile<kShape.groups, kShape.columns, kShape.blocks, kShape.several>;
    constexpr int kTileFilters = kShape.groups * kFilters;
    const auto kernel = conv2d_nhwc_wgmma_rows_kernel<T, kShape.groups, kShape.columns,
                                                      kShape.blocks, kShape.several>;
    p.lines = lines_of(kShape, p.out_h, p.out_w);
    p.split = choice.split;
    p.log_split = log2_of(choice.split);
    p.steps_a_block = (p.chunks + p.split - 1) / p.split;
    make_ready(kernel, At::kBytes);
    const int width = kShape.several ? p.out_w : kShape.columns;
    const dim3 grid(p.rows / (p.lines * width), (p.filters + kTileFilters - 1) / kTileFilters,
                    p.split);
    launch("conv2d_nhwc_wgmma_rows_kernel", kernel, grid, dim3(128 * kShape.groups + 64),
           At::kBytes, stream, p.split,
           map_of_boxes<T>(images.x, images.shape, images.pitch, p.lines + 2, width + 2), p);
  }
}

}  // namespace wgmma
}  // namespace cnn_engine::cuda
