// conv2d_nhwc_wgmma where there are more tiles than multiprocessors have room for: persistent
// blocks and take one tile after another, so that copies for the next and stores of the last go on
// while one is multiplied. Of clamped results, and without a residual those of hard swish, swish
// and gelu, that are stored as what is multiplied (Gemm's may_persist), tf32 as float32.
//
// Beside the warpgroups that multiply, one warp asks for weights and one for images, into the ring
// of stages, and one for what comes and goes by slots: a tile's residual is copied into a slot, the
// warpgroups make the result in its place, and from there it is copied to y. A slot is units of 128
// bytes of filters of all positions, whose pieces of 16 bytes lie swizzled (wgmma.cuh). Tiles of
// the same positions follow each other.
#pragma once

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_epilogue.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_im2col.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda {

namespace wgmma {

// What a thread holds of a tile (wgmma.cuh), of float32: it is ended where the slot has it, as
// which it is stored.
template <bool Residual, typename Function, int n>
__device__ inline void epilogue_in_place(const Function& function, const float (&accumulators)[n],
                                         const float (&bias)[2], char* slot, int warp, int lane) {
  const int g = lane / 4, row = lane % 4 * 2;
  char* at[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int position = row + i % 2, piece = warp % 2 * 4 + g / 4 + i / 2 * 2;
    at[i] = slot + position * kRowBytes + swizzled(position, piece) * 16 + g % 4 * 4;
  }
#pragma unroll
  for (int j = 0; j < n / 4; ++j) {
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float more =
          Residual ? *reinterpret_cast<const float*>(at[i] + j * 8 * kRowBytes) : 0.0f;
      value[i] = accumulators[4 * j + i] + (bias[i / 2] + more);
    }
    function(value);
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<float*>(at[i] + j * 8 * kRowBytes) = value[i];
  }
}

template <typename T, int Groups, int Columns, int Blocks, bool Both>
__global__ void __launch_bounds__(128 * Groups + 96, Blocks)
    conv2d_nhwc_wgmma_persistent_kernel(const __grid_constant__ CUtensorMap images,
                                        const __grid_constant__ CUtensorMap others,
                                        const __grid_constant__ CUtensorMap residuals,
                                        const __grid_constant__ CUtensorMap results,
                                        const __grid_constant__ Gemm p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kTileFilters = Groups * kFilters, kWarps = 4 * Groups;  // that multiply
  constexpr int kWeightBytes = Groups * kUnitBytes;
  constexpr int kSlotFilters = kRowBytes / sizeof(T), kSlotUnits = kTileFilters / kSlotFilters;
  constexpr int kSlotUnitBytes = Columns * kRowBytes, kSlotBytes = kSlotUnits * kSlotUnitBytes;
  constexpr int kStageBytes = kWeightBytes + Columns * kRowBytes;
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t ring = shared_address(memory);
  const std::uint32_t slots = ring + p.stages * kStageBytes;
  const std::uint32_t full = slots + p.slots * kSlotBytes;
  const std::uint32_t empty = full + 8 * p.stages, ready = empty + 8 * p.stages;
  const std::uint32_t made = ready + 8 * p.slots;

  if (!p.holds) let_successors_start();
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32);
  if (thread == 0) {
    prefetch_tensor_map(&images);
    if constexpr (Both) prefetch_tensor_map(&others);
    prefetch_tensor_map(&results);
    for (int stage = 0; stage < p.stages; ++stage) {
      init_mbarrier(full + 8 * stage, 1);
      init_mbarrier(empty + 8 * stage, Groups);
    }
    for (int slot = 0; slot < p.slots; ++slot) {
      init_mbarrier(ready + 8 * slot, 1);
      init_mbarrier(made + 8 * slot, kWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const int first_tile = static_cast<int>(blockIdx.x), apart = static_cast<int>(gridDim.x);
  const auto units_of = [&](int first_filter) {
    return min(Groups, (p.filters - first_filter + kFilters - 1) / kFilters);
  };
  const auto slot_units_of = [&](int first_filter) {
    return min(kSlotUnits, (p.filters - first_filter + kSlotFilters - 1) / kSlotFilters);
  };
  if (warp == kWarps) {  // asks for weights
    const bool leads = leads_warp();
    RingStage stage = {0, 1};
#pragma unroll 1
    for (int tile = first_tile; tile < p.tiles; tile += apart) {
      const int first_filter = tile % p.filter_tiles * kTileFilters, units = units_of(first_filter);
      const Gemm::Steps own = p.steps_at<Both>(first_filter);
      const int steps = own.end - own.first;
      const char* weights = p.packed + std::int64_t{p.weights_at<Both>(first_filter)} * kUnitBytes;
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        const std::uint32_t to = ring + stage.at * kStageBytes, barrier = full + 8 * stage.at;
        wait_mbarrier(empty + 8 * stage.at, stage.parity);
        if (leads) {
          expect_tx(barrier, units * kUnitBytes + Columns * kRowBytes);
          copy_bulk(to, weights, kUnitBytes, barrier);
          if (Groups > 1 && units > 1) {
            copy_bulk(to + kUnitBytes, weights + std::int64_t{steps} * kUnitBytes, kUnitBytes,
                      barrier);
          }
        }
        weights += kUnitBytes;
        stage.next(p.stages);
      }
    }
    return;
  }
  if (warp == kWarps + 1) {  // asks for images
    const bool leads = leads_warp();
    RingStage stage = {0, 1};
    bool waited = false;
#pragma unroll 1
    for (int tile = first_tile; tile < p.tiles; tile += apart) {
      const Gemm::Steps own = p.steps_at<Both>(tile % p.filter_tiles * kTileFilters);
      KernelOffsets<T, Both> kernel_offsets(p, images, others, tile / p.filter_tiles * Columns,
                                            own.first > 0);
      if (kernel_offsets.is_nowhere()) return;
      if (!waited) {
        wait_for_inputs();
        if (p.holds) let_successors_start();
      }
      waited = true;
#pragma unroll 1
      for (int step = own.first; step < own.end; ++step) {
        const std::uint32_t to = ring + stage.at * kStageBytes + kWeightBytes,
                            barrier = full + 8 * stage.at;
        wait_mbarrier(empty + 8 * stage.at, stage.parity);
        if (leads) kernel_offsets.copy(to, barrier);
        kernel_offsets.next();
        stage.next(p.stages);
      }
    }
    return;
  }
  if (warp == kWarps + 2) {  // brings residuals, and stores
    const bool leads = leads_warp();
    const auto prepare = [&](int tile, int slot) {
      if (!leads || tile >= p.tiles) return;
      const std::uint32_t to = slots + slot * kSlotBytes, barrier = ready + 8 * slot;
      if (!p.residual) return arrive(barrier);
      const int first_filter = tile % p.filter_tiles * kTileFilters;
      const int units = slot_units_of(first_filter);
      expect_tx(barrier, units * kSlotUnitBytes);
      for (int unit = 0; unit < units; ++unit) {
        tma_load_tile(to + unit * kSlotUnitBytes, &residuals, first_filter + unit * kSlotFilters,
                      tile / p.filter_tiles * Columns, barrier);
      }
    };
    if (p.residual) wait_for_inputs();
    for (int slot = 0; slot < p.slots; ++slot) prepare(first_tile + slot * apart, slot);
    RingStage slot = {0, 0};
#pragma unroll 1
    for (int tile = first_tile; tile < p.tiles; tile += apart) {
      wait_mbarrier(made + 8 * slot.at, slot.parity);
      const int first_filter = tile % p.filter_tiles * kTileFilters;
      if (leads) {
        const std::uint32_t from = slots + slot.at * kSlotBytes;
        for (int unit = 0; unit < slot_units_of(first_filter); ++unit) {
          tma_store_tile(&results, from + unit * kSlotUnitBytes, first_filter + unit * kSlotFilters,
                         tile / p.filter_tiles * Columns);
        }
        tma_store_commit();
        tma_store_wait_read();
      }
      __syncwarp();
      prepare(tile + p.slots * apart, slot.at);
      slot.next(p.slots);
    }
    if (leads) tma_store_wait();
    return;
  }

  const int lane = thread % 32;
  const std::uint64_t weights = matrix_descriptor(ring + warp / 4 * kUnitBytes);
  const std::uint64_t positions = matrix_descriptor(ring + kWeightBytes);
  const std::uint32_t tiles =
      slots + warp / 4 * kSlotUnitBytes + row_of_tiles(lane) * kRowBytes +
      swizzled(row_of_tiles(lane), warp % 4 * 2 + piece_of_tiles(lane)) * 16;
  wait_for_inputs();  // of what this kernel overwrites, others may read
  RingStage stage = {0, 0}, slot = {0, 0};
#pragma unroll 1
  for (int tile = first_tile; tile < p.tiles; tile += apart) {
    const int first_filter = tile % p.filter_tiles * kTileFilters;
    float bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int filter = first_filter + warp * 16 + lane / 4 + 8 * i;
      bias[i] = p.bias && filter < p.filters ? p.bias[filter] : 0.0f;
    }
    float accumulators[Columns / 2] = {};
    const Gemm::Steps own = p.steps_at<Both>(first_filter);
    const int steps = own.end - own.first;
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_mbarrier(full + 8 * stage.at, stage.parity);
      const int at = stage.at * (kStageBytes >> 4);
      multiply_rows<T, Columns>(accumulators, weights + at, positions + at);
      wgmma_commit();
      wgmma_wait<1>();  // those of the step before
      if (step > 0 && thread % 128 == 0) arrive(empty + 8 * before);
      before = stage.at;
      stage.next(p.stages);
    }
    wgmma_wait<0>();
    if (thread % 128 == 0) arrive(empty + 8 * before);

    wait_mbarrier(ready + 8 * slot.at, slot.parity);
    const std::uint32_t from = tiles + slot.at * kSlotBytes;
    const int left = p.rows - tile / p.filter_tiles * Columns;
    bool past = false;
    const auto end = [&](const auto& function, auto residual) {
      if constexpr (sizeof(T) == 4) {
        char* const unit = memory + (slots - ring) + slot.at * kSlotBytes +
                           warp * 16 / kSlotFilters * kSlotUnitBytes;
        epilogue_in_place<residual>(function, accumulators, bias, unit, warp, lane);
      } else {
        constexpr int kEights = Columns / 8, kAtOnce = 4;
#pragma unroll
        for (int first = 0; first < kEights; first += kAtOnce) {
          past |=
              epilogue_eights<T, residual, kAtOnce>(function, accumulators + 4 * first, bias,
                                                    left - 8 * first, from + first * 8 * kRowBytes);
        }
      }
    };
    // Each is compiled by itself, which takes longest here; choose_epilogue() says what does not
    // stay.
    if (p.residual) {
      if constexpr (!Both) end(Clamp{p.low, p.high}, std::true_type());
    } else if (p.activation == UnaryFunction::hard_swish) {
      end(Rounded<UnaryFunction::hard_swish>{p.alpha}, std::false_type());
    } else if (p.activation == UnaryFunction::swish) {
      end(Rounded<UnaryFunction::swish>{p.alpha}, std::false_type());
    } else if (p.activation == UnaryFunction::gelu) {
      end(Rounded<UnaryFunction::gelu>{}, std::false_type());
    } else {
      end(Clamp{p.low, p.high}, std::false_type());
    }
    if (past && warp / 4 < units_of(first_filter)) tell(p.overflow);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) arrive(made + 8 * slot.at);
    slot.next(p.slots);
  }
#endif
}

template <typename T, int Tile, bool Both>
void launch_persistent_tile(const Sources& from, Gemm p, int multiprocessors, Stream stream) {
  constexpr PersistentShape kShape = kPersistent[Tile];
  using Kept = std::conditional_t<std::is_same_v<T, Tf32>, float, T>;  // not rounded
  constexpr int kTileFilters = kShape.groups * kFilters, kColumns = kShape.columns;
  const auto kernel =
      conv2d_nhwc_wgmma_persistent_kernel<T, kShape.groups, kColumns, kShape.blocks, Both>;
  p.stages = kShape.stages;
  p.slots = kShape.slots * 2 / sizeof(T);
  p.residual_rows = p.residual ? kColumns : 0;
  p.filter_tiles = (p.filters + kTileFilters - 1) / kTileFilters;
  p.tiles = (p.rows + kColumns - 1) / kColumns * p.filter_tiles;
  const auto map = [&](const void* rows, int pitch) {
    return map_of_rows<Kept>(rows, p.rows, p.filters, pitch, kColumns, CU_TENSOR_MAP_SWIZZLE_128B);
  };
  const CUtensorMap residuals = p.residual ? map(p.residual, p.residual_pitch) : CUtensorMap{};
  constexpr int kBytes = kShape.stages * (kShape.groups * kFilters + kColumns) * kRowBytes +
                         kShape.slots * kShape.groups * kColumns * kRowBytes +
                         16 * (kShape.stages + kShape.slots);
  make_ready(kernel, kBytes);
  int blocks = std::min(kShape.blocks * multiprocessors, p.tiles);
  // So that each takes tiles of either source in turn, whose sums may be of other lengths.
  while (p.first_steps < p.steps && std::gcd(blocks, p.filter_tiles) > 1) --blocks;
  launch("conv2d_nhwc_wgmma_persistent_kernel", kernel, dim3(blocks),
         dim3(128 * kShape.groups + 96), kBytes, stream, 1, map_of_images<T>(from.first, kColumns),
         map_of_images<T>(from.second, kColumns), residuals, map(p.y, p.y_pitch), p);
}

template <typename T, int Tile = 0>
void launch_persistent(const Sources& from, const Gemm& p, const Choice& choice, Stream stream) {
  if constexpr (Tile < kPersistentTiles) {
    if (choice.tile != Tile) return launch_persistent<T, Tile + 1>(from, p, choice, stream);
    if (p.both)
      return launch_persistent_tile<T, Tile, true>(from, p, choice.multiprocessors, stream);
    launch_persistent_tile<T, Tile, false>(from, p, choice.multiprocessors, stream);
  }
}

}  // namespace wgmma
}  // namespace cnn_engine::cuda
