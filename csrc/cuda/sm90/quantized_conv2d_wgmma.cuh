// quantized_conv2d as a product of matrices that the copy engine brings and wgmma multiplies.
//
// D [positions, filters]: a tile has 64 positions a warpgroup and Columns filters. K are a filter's
// kernel offsets, (r, s, c) with c fastest, in steps of RowBytes of one offset's channels. One warp
// asks for weights and one for images, into a ring of stages; blocks are persistent, so that copies
// for the next tile go on while one is made.
//
// A lane's sums of a position are of sixteen neighbouring filters: weights are packed in that order
// (sum_of), so that results leave from registers, 16 bytes at once.
//
// What is outside an image comes as 0, for x_zero. With another x_zero the bias of positions at the
// border is less x_zero times the weights that are inside: Packed's prefix sums.
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/requantize.cuh"
#include "cuda/sm90/quantized_conv2d_wgmma_gemm.h"
#include "cuda/sm90/wgmma_int8.cuh"
#include "ops/window.h"

namespace cnn_engine::cuda::quantized_wgmma {

// A position of the output whose window is not all inside: the kernel offsets that are.
struct Inside {
  int first_r, end_r, first_s, end_s;
};

__device__ inline Inside inside_of(const Gemm& p, int position) {
  const int line = position / p.out_w, row = line % p.out_h;
  const Conv2dShape& shape = p.shape;
  const int top = row * shape.stride_h - shape.pad_top;
  const int left = (position - line * p.out_w) * shape.stride_w - shape.pad_left;
  const auto range = [](int start, int count, int dilation, int size, int& first, int& end) {
    first = min((first_inside(start, dilation) - start) / dilation, count);
    const int past = size - start + dilation - 1;  // of offsets from the start, in dilations
    end = max(min(past / dilation, count), first);
  };
  Inside found;
  range(top, shape.r, shape.dilation_h, shape.h, found.first_r, found.end_r);
  range(left, shape.s, shape.dilation_w, shape.w, found.first_s, found.end_s);
  return found;
}

// x_zero times the weights of a filter that are inside.
__device__ inline int zero_inside(const Gemm& p, const Inside& inside, int filter) {
  const auto before = [&](int r, int s) {
    return p.border[(std::int64_t{r} * (p.shape.s + 1) + s) * p.padded_filters + filter];
  };
  return before(inside.end_r, inside.end_s) - before(inside.first_r, inside.end_s) -
         before(inside.end_r, inside.first_s) + before(inside.first_r, inside.first_s);
}

// The loops of these two are not unrolled: few positions come here.
__device__ inline void add_border(const Gemm& p, const Inside& inside, int filter,
                                  int (&totals)[16]) {
  const Inside all = {0, p.shape.r, 0, p.shape.s};
  int more[16];
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    more[i] = zero_inside(p, all, filter + i) - zero_inside(p, inside, filter + i);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) totals[i] += more[i];
}

__device__ inline void store_each(const Gemm& p, int row, int filter, const int (&totals)[16],
                                  const float* scales) {
  int each[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) each[i] = totals[i];
  const std::uint8_t* const residual =
      p.residual ? p.residual + std::int64_t{row} * p.residual_pitch + filter : nullptr;
#pragma unroll 1
  for (int i = 0; i < min(16, p.shape.k - filter); ++i) {
    store_requantized(p.y, std::int64_t{row} * p.y_pitch + filter + i, each[i], scales[i],
                      residual ? residual + i : nullptr, p.types, p.table);
  }
}

template <bool Signed, int Tile, int RowBytes>
__global__ void __launch_bounds__(threads_of(kTiles[Tile]), kTiles[Tile].blocks)
    quantized_conv2d_wgmma_kernel(const __grid_constant__ CUtensorMap images,
                                  const __grid_constant__ Gemm p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kGroups = kTiles[Tile].groups, kColumns = kTiles[Tile].columns;
  constexpr int kRows = kMatrixRows * kGroups, kWarps = 4 * kGroups;  // that multiply
  constexpr int kXBytes = kRows * RowBytes, kUnitBytes = kUnitFilters * RowBytes;
  constexpr int kUnits = kColumns / kUnitFilters, kStageBytes = (kRows + kColumns) * RowBytes;
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t ring = shared_address(memory);
  const std::uint32_t full = ring + p.stages * kStageBytes, empty = full + 8 * p.stages;
  int* const biases = reinterpret_cast<int*>(memory + p.stages * (kStageBytes + 16));
  float* const scales = reinterpret_cast<float*>(biases + kColumns);

  let_successors_start();
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32);
  if (thread == 0) {
    prefetch_tensor_map(&images);
    for (int stage = 0; stage < p.stages; ++stage) {
      init_mbarrier(full + 8 * stage, 1);
      init_mbarrier(empty + 8 * stage, kGroups);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const int first_tile = static_cast<int>(blockIdx.x), apart = static_cast<int>(gridDim.x);
  if (warp == kWarps) {  // asks for weights
    if (!leads_warp()) return;
    RingStage stage = {0, 1};
#pragma unroll 1
    for (int tile = first_tile; tile < p.tiles; tile += apart) {
      const int first_unit = tile % p.filter_tiles * kUnits;
      const int units = min(kUnits, p.padded_filters / kUnitFilters - first_unit);
      const char* weights = p.weights + std::int64_t{first_unit} * p.steps * kUnitBytes;
#pragma unroll 1
      for (int step = 0; step < p.steps; ++step) {
        const std::uint32_t to = ring + stage.at * kStageBytes + kXBytes;
        const std::uint32_t barrier = full + 8 * stage.at;
        wait_mbarrier(empty + 8 * stage.at, stage.parity);
        expect_tx(barrier, units * kUnitBytes + kXBytes);
#pragma unroll 1
        for (int unit = 0; unit < units; ++unit) {
          copy_bulk(to + unit * kUnitBytes, weights + std::int64_t{unit} * p.steps * kUnitBytes,
                    kUnitBytes, barrier);
        }
        weights += kUnitBytes;
        stage.next(p.stages);
      }
    }
    return;
  }
  if (warp == kWarps + 1) {  // asks for images
    if (!leads_warp()) return;
    RingStage stage = {0, 1};
    wait_for_inputs();
#pragma unroll 1
    for (int tile = first_tile; tile < p.tiles; tile += apart) {
      const int first_row = tile / p.filter_tiles * kRows;
      const int line = first_row / p.out_w, image = line / p.out_h;
      const int h = (line - image * p.out_h) * p.shape.stride_h - p.shape.pad_top;
      const int w = (first_row - line * p.out_w) * p.shape.stride_w - p.shape.pad_left;
      int chunk = 0, r = 0, s = 0;
#pragma unroll 1
      for (int step = 0; step < p.steps; ++step) {
        const std::uint32_t to = ring + stage.at * kStageBytes, barrier = full + 8 * stage.at;
        wait_mbarrier(empty + 8 * stage.at, stage.parity);
        if (p.tiled) {
          tma_load_tile(to, &images, chunk * RowBytes, first_row, barrier);
        } else {
          tma_load_im2col(to, &images, chunk * RowBytes, w, h, image, s * p.shape.dilation_w,
                          r * p.shape.dilation_h, barrier);
        }
        if (++chunk == p.chunks) {
          chunk = 0;
          if (++s == p.shape.s) {
            s = 0;
            ++r;
          }
        }
        stage.next(p.stages);
      }
    }
    return;
  }

  const int lane = thread % 32, g = lane / 4, t = lane % 4;
  const std::uint64_t positions =
      byte_matrix_descriptor<RowBytes>(ring + warp / 4 * kMatrixRows * RowBytes);
  const std::uint64_t weights = byte_matrix_descriptor<RowBytes>(ring + kXBytes);
  const Requantizer requantizer(p.types);
  RingStage stage = {0, 0};
  bool waited = false;
  int known_filter = -1;
#pragma unroll 1
  for (int tile = first_tile; tile < p.tiles; tile += apart) {
    const int first_filter = tile % p.filter_tiles * kColumns;
    const int own_row = tile / p.filter_tiles * kRows + warp * 16 + g;  // and the eighth after it
    // A block's tiles often have the same filters.
    const bool other_filters = first_filter != known_filter;
    known_filter = first_filter;
    if (other_filters) {
      named_barrier<32 * kWarps>(1);  // none reads those of the tile before
      for (int i = thread; i < kColumns; i += 32 * kWarps) {
        const int filter = min(first_filter + i, p.padded_filters - 1);
        biases[i] = p.bias[filter];
        scales[i] = p.scale[filter];
      }
    }
    if (!waited) wait_for_inputs();  // the residual is one, and others may read what is overwritten
    waited = true;
    const auto residual_of = [&](int unit, int half) {
      const int row = own_row + 8 * half, filter = first_filter + unit * kUnitFilters + 16 * t;
      if (!p.residual || !p.sixteens || row >= p.rows || filter + 16 > p.shape.k) return uint4{};
      return *reinterpret_cast<const uint4*>(p.residual + std::int64_t{row} * p.residual_pitch +
                                             filter);
    };
    uint4 early[2];  // larger tiles have no registers for them
    if constexpr (kUnits == 1) early[0] = residual_of(0, 0), early[1] = residual_of(0, 1);
    int accumulators[kColumns / 2] = {};
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      wait_mbarrier(full + 8 * stage.at, stage.parity);
      const int at = stage.at * (kStageBytes >> 4);
      multiply_byte_rows<Signed, RowBytes, kColumns>(accumulators, positions + at, weights + at);
      wgmma_commit();
      wgmma_wait<1>();  // those of the step before
      if (step > 0 && thread % 128 == 0) arrive(empty + 8 * before);
      before = stage.at;
      stage.next(p.stages);
    }
    wgmma_wait<0>();
    if (thread % 128 == 0) arrive(empty + 8 * before);
    if (other_filters) named_barrier<32 * kWarps>(1);  // biases and scales are there

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own_row + 8 * half;
      if (row >= p.rows) break;
      uint4 added[kUnits];
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        added[unit] = kUnits == 1 ? early[half] : residual_of(unit, half);
      }
      Inside inside = {0, p.shape.r, 0, p.shape.s};
      if (p.border) inside = inside_of(p, row);
      const bool at_border = inside.first_r > 0 || inside.end_r < p.shape.r || inside.first_s > 0 ||
                             inside.end_s < p.shape.s;
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const int column = unit * kUnitFilters + 16 * t, filter = first_filter + column;
        if (filter >= p.shape.k) break;
        int totals[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // sums 4 i to 4 i + 3
          const int4 bias = *reinterpret_cast<const int4*>(biases + column + 4 * i);
          const int* const sums = accumulators + 32 * unit + 8 * i + 2 * half;
          totals[4 * i] = sums[0] + bias.x, totals[4 * i + 1] = sums[1] + bias.y;
          totals[4 * i + 2] = sums[4] + bias.z, totals[4 * i + 3] = sums[5] + bias.w;
        }
        if (at_border) add_border(p, inside, filter, totals);
        const std::int64_t to = std::int64_t{row} * p.y_pitch + filter;
        if (p.sixteens && filter + 16 <= p.shape.k) {
          const float* const factors = scales + column;
          auto* const y = reinterpret_cast<uint4*>(static_cast<std::uint8_t*>(p.y) + to);
          *y = p.residual ? requantizer.sixteen<true>(totals, factors, added[unit], p.table)
                          : requantizer.sixteen<false>(totals, factors, uint4{}, p.table);
        } else {
          store_each(p, row, filter, totals, scales + column);
        }
      }
    }
  }
#endif
}

}  // namespace cnn_engine::cuda::quantized_wgmma
