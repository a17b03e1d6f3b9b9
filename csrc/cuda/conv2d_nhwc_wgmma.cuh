// conv2d_nhwc as a product of matrices that the copy engine brings and wgmma multiplies.
//
// D [filters, places]: a tile has 64 filters a warpgroup and any multiple of eight places, so that
// few places waste nothing. K are a filter's taps, (r, s, c) with c fastest, in steps of 128 bytes
// of one tap's channels. One thread asks for what the steps need, weights before the kernel waits
// for its inputs, into a ring of stages; warpgroups multiply. Weights are packed as the stages have
// them: [ceil(K / 64)][steps][64 filters][128 bytes], their pieces exchanged (wgmma.cuh), zeros
// beyond the last filter and channel. Images come by im2col copies, or as rows.
//
// The blocks of a cluster have parts of a tile's steps. Sums go to shared memory as float32,
// [places][filters], and each block adds up its share of the places from all of the cluster's
// memories in the order of their ranks: the bits depend on the shape alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/conv2d_nhwc_wgmma_end.cuh"
#include "cuda/conv2d_nhwc_wgmma_map.h"
#include "cuda/conv2d_nhwc_wgmma_product.h"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/stored.cuh"
#include "cuda/wgmma.cuh"

namespace cnn_engine::cuda {
namespace wgmma {

// Shared memory: the ring, in whose place the sums come; the residual, as the copy engine brings
// it; and the barriers.
template <int Groups, int Columns>
struct Memory {
  static constexpr int kWeightBytes = Groups * kFilters * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + Columns * kRowBytes;
  // Lanes that store sums at once have four places and eight filters: all banks.
  static constexpr int kPitch = Groups * kFilters + 4;
  static constexpr int kSumBytes = (Columns * kPitch * 4 + 127) / 128 * 128;

  static __host__ __device__ constexpr int residual(int stages) {
    return stages * kStageBytes > kSumBytes ? stages * kStageBytes : kSumBytes;
  }
  static __host__ __device__ constexpr int barriers(int stages, int residual_rows) {
    return residual(stages) + Groups * residual_rows * kRowBytes;
  }
  static constexpr int bytes(int stages, int residual_rows) {
    return barriers(stages, residual_rows) + 16 * stages + 8;
  }
};

__device__ inline float4 load_cluster(std::uint32_t address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Few columns have several sums, added up in the end: products that add to the same sums wait for
// each other.
__host__ __device__ constexpr int chains_of(int groups, int columns) {
  return columns <= 32 ? 4 / groups : columns <= 64 ? 2 / groups : 1;
}

constexpr int blocks_a_multiprocessor(int groups, int columns) {
  return columns > 128 ? 3 - groups : 2;
}

// What comes before the products, on a step's places in shared memory: z = max(x scale + shift,
// floor).
template <typename T, int Threads, int Columns>
__device__ inline void apply_prologue(const Product& p, char* places, int first_row, int step,
                                      int thread) {
  constexpr int kWidth = 16 / sizeof(T), kRowsAtOnce = Threads / 8;
  static_assert(kRowsAtOnce % 8 == 0);
  const int c = (step * 8 + exchanged(thread / 8, thread % 8)) * kWidth;
  float factor[kWidth], added[kWidth];
  const auto load = [&](const float* from, float other, float (&to)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = other;
    if (from && c < p.channels) load_neighbours(from + c, to);
  };
  load(p.scale_per_image ? nullptr : p.scale, 1.0f, factor);
  load(p.shift, 0.0f, added);
#pragma unroll
  for (int row = thread / 8; row < Columns; row += kRowsAtOnce) {
    if (p.scale_per_image) {
      const int place = min(first_row + row, p.rows - 1);
      load(p.scale + static_cast<std::int64_t>(place / (p.out_h * p.out_w)) * p.channels, 1.0f,
           factor);
    }
    T* const at = reinterpret_cast<T*>(places + row * kRowBytes + thread % 8 * 16);
    float z[kWidth];
    load_neighbours(at, z);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      z[i] = fmaf(z[i], factor[i], added[i]);
      z[i] = z[i] < p.floor ? p.floor : z[i];  // false for NaN, which stays
    }
    store_neighbours(at, z, Overflow{});
  }
  publish_to_engines();
  named_barrier<Threads>(1);
}

template <typename T, int Groups, int Columns, bool Prologue>
__global__ void __launch_bounds__(128 * Groups + 32, blocks_a_multiprocessor(Groups, Columns))
    conv2d_nhwc_wgmma_kernel(const __grid_constant__ CUtensorMap images,
                             const __grid_constant__ CUtensorMap residuals,
                             const __grid_constant__ Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using At = Memory<Groups, Columns>;
  constexpr int kTileFilters = Groups * kFilters, kThreads = 128 * Groups;  // that multiply
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t ring = shared_address(memory);
  const std::uint32_t full = ring + At::barriers(p.stages, p.residual_rows);
  const std::uint32_t empty = full + 8 * p.stages, residual_is_here = empty + 8 * p.stages;

  let_successors_start();
  const int thread = threadIdx.x;
  const int rank = p.split > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int first_row = static_cast<int>(blockIdx.x) * Columns;
  const int first_filter = static_cast<int>(blockIdx.y) * kTileFilters;
  const int first_step = rank * p.steps_a_block;
  const int steps = max(0, min(p.steps_a_block, p.steps - first_step));

  if (thread == kThreads) {
    prefetch_map(&images);
    init_phases(residual_is_here, 1);
    if (p.residual_rows > 0) prefetch_map(&residuals);
    for (int stage = 0; stage < p.stages; ++stage) {
      init_phases(full + 8 * stage, 1);
      init_phases(empty + 8 * stage, Groups);
    }
    publish_to_engines();
  }
  __syncthreads();

  // The block adds up and writes these of the tile's places; a thread has filters side by side.
  constexpr int kWidth = 16 / sizeof(T), kPieces = kTileFilters / kWidth;
  const int own_rows = (Columns + p.split - 1) / p.split, own = rank * own_rows;
  const int rows = min(own_rows, min(Columns, p.rows - first_row) - own);
  const int first_own = thread / kPieces, filter = first_filter + thread % kPieces * kWidth;
  const int left = p.filters - filter;  // filters from this thread's first one on
  const bool whole = p.in_pieces && left >= kWidth;
  float bias[kWidth];

  constexpr int kChains = chains_of(Groups, Columns);
  // Blocks of which a thread reads sums at once.
  constexpr int kAtOnce = Groups == 1 && Columns <= 64 ? 8 : 4;
  float sums[kChains][Columns / 2] = {};
  if (thread >= kThreads) {
    if (thread == kThreads) {
      constexpr int kUnitBytes = kFilters * kRowBytes;
      const int first_unit = first_filter / kFilters;
      const int units = min(Groups, (p.filters + kFilters - 1) / kFilters - first_unit);
      const char* weights =
          p.packed + (static_cast<std::int64_t>(first_unit) * p.steps + first_step) * kUnitBytes;
      const auto copy_weights = [&](int stage) {  // in the order of the steps
        const std::uint32_t to = ring + stage * At::kStageBytes, barrier = full + 8 * stage;
        expect_bytes(barrier, units * kUnitBytes + Columns * kRowBytes);
        for (int unit = 0; unit < units; ++unit) {
          copy_bulk(to + unit * kUnitBytes,
                    weights + static_cast<std::int64_t>(unit) * p.steps * kUnitBytes, kUnitBytes,
                    barrier);
        }
        weights += kUnitBytes;
      };
      constexpr int kChannels = kRowBytes / static_cast<int>(sizeof(T));
      const int line = first_row / p.out_w, image = line / p.out_h;
      const int h = (line - image * p.out_h) * p.stride_h - p.pad_top;
      const int w = (first_row - line * p.out_w) * p.stride_w - p.pad_left;
      const int tap = first_step / p.chunks;
      int chunk = first_step - tap * p.chunks;
      int r = tap / p.taps_a_row, s = tap - r * p.taps_a_row;
      const auto copy_images = [&](int stage) {  // in the order of the steps
        const std::uint32_t to = ring + stage * At::kStageBytes + At::kWeightBytes;
        if (p.tiled) {
          copy_tile(to, &images, chunk * kChannels, first_row, full + 8 * stage);
        } else {
          copy_taps(to, &images, chunk * kChannels, w, h, image, s * p.dilation_w, r * p.dilation_h,
                    full + 8 * stage);
        }
        if (++chunk == p.chunks) {
          chunk = 0;
          if (++s == p.taps_a_row) {
            s = 0;
            ++r;
          }
        }
      };
      const int ahead = min(p.stages, steps);
#pragma unroll 1
      for (int step = 0; step < ahead; ++step) copy_weights(step);
      wait_for_inputs();
#pragma unroll 1
      for (int step = 0; step < ahead; ++step) copy_images(step);
      if (p.residual_rows > 0) {
        expect_bytes(residual_is_here, units * p.residual_rows * kRowBytes);
        for (int unit = 0; unit < units; ++unit) {
          copy_tile(ring + At::residual(p.stages) + unit * p.residual_rows * kRowBytes, &residuals,
                    first_filter + unit * kFilters, first_row + own, residual_is_here);
        }
      }
      int stage = 0, parity = 0;
#pragma unroll 1
      for (int step = ahead; step < steps; ++step) {
        wait_for_phase(empty + 8 * stage, parity);
        copy_weights(stage);
        copy_images(stage);
        if (++stage == p.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    __syncwarp();
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) bias[i] = p.bias && i < left ? p.bias[filter + i] : 0.0f;
    wait_for_inputs();
    const int group = thread / 128;
    int stage = 0, parity = 0, before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for_phase(full + 8 * stage, parity);
      const std::uint32_t at = ring + stage * At::kStageBytes;
      const std::uint64_t weights = matrix_at(at + group * (kFilters * kRowBytes));
      const std::uint64_t places = matrix_at(at + At::kWeightBytes);
      if constexpr (Prologue) {
        apply_prologue<T, kThreads, Columns>(p, memory + stage * At::kStageBytes + At::kWeightBytes,
                                             first_row, first_step + step, thread);
      }
      begin_products();
#pragma unroll
      for (int k = 0; k < kRowBytes / kInstructionBytes; ++k) {
        constexpr int kApart = kInstructionBytes >> 4;
        Wgmma<T, Columns>::multiply(sums[k % kChains], weights + k * kApart, places + k * kApart);
      }
      commit_products();
      wait_for_products<1>();  // those of the step before
      if (step > 0 && thread % 128 == 0) arrive(empty + 8 * before);
      before = stage;
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    wait_for_products<0>();
#pragma unroll
    for (int apart = kChains / 2; apart > 0; apart /= 2) {
#pragma unroll
      for (int chain = 0; chain < apart; ++chain) {
#pragma unroll
        for (int i = 0; i < Columns / 2; ++i) sums[chain][i] += sums[chain + apart][i];
      }
    }

    named_barrier<kThreads>(1);  // no one multiplies what lies in the ring
    store_sums<Columns, At::kPitch>(reinterpret_cast<float*>(memory), sums[0], thread);
  }

  if (p.split > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }

  if (thread < kThreads) {
    if (p.residual_rows > 0) wait_for_phase(residual_is_here, 0);
#pragma unroll 2
    for (int row = first_own; row < rows; row += kThreads / kPieces) {
      if (left <= 0) break;
      const std::int64_t place = first_row + own + row;
      float added[kWidth] = {};
      if (p.residual_rows > 0) {
        const char* const from = memory + At::residual(p.stages) +
                                 (thread % kPieces / 8 * p.residual_rows + row) * kRowBytes;
        load_neighbours(reinterpret_cast<const T*>(from) + thread % 8 * kWidth, added);
      } else if (p.residual) {
        const std::int64_t from = place * p.residual_pitch + filter;
        if (p.residual_is_rounded) {
          load_piece(static_cast<const T*>(p.residual) + from, added, whole, left);
        } else {
          load_piece(static_cast<const float*>(p.residual) + from, added, whole, left);
        }
      }
      const int offset = ((own + row) * At::kPitch + thread % kPieces * kWidth) * 4;
      float value[kWidth] = {};
      const auto take = [&](int i, const float4& four) {
        value[i] += four.x;
        value[i + 1] += four.y;
        value[i + 2] += four.z;
        value[i + 3] += four.w;
      };
      if (p.split == 1) {
#pragma unroll
        for (int i = 0; i < kWidth; i += 4) {
          take(i, *reinterpret_cast<const float4*>(memory + offset + 4 * i));
        }
      } else {
#pragma unroll 1
        for (int first = 0; first < p.split; first += kAtOnce) {
          float4 four[kAtOnce][kWidth / 4];
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const std::uint32_t from = cluster_address(ring + offset, min(first + j, p.split - 1));
#pragma unroll
            for (int i = 0; i < kWidth / 4; ++i) four[j][i] = load_cluster(from + 16 * i);
          }
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            if (first + j >= p.split) break;
#pragma unroll
            for (int i = 0; i < kWidth / 4; ++i) take(4 * i, four[j][i]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) value[i] += bias[i] + added[i];
      activate(p, value);
      const std::int64_t to = place * p.y_pitch + filter;
      if (p.y_is_rounded) {
        store_piece(static_cast<T*>(p.y) + to, value, whole, left, p.overflow);
      } else {
        store_piece(static_cast<float*>(p.y) + to, value, whole, left, p.overflow);
      }
    }
  }
  if (p.split > 1) cluster_barrier();  // others may still read this block's sums
#endif
}

// ---- launches ----

template <typename T, int Groups, int Columns, bool Prologue>
void launch_tile(const Images& images, Product p, const Choice& choice, Stream stream) {
  using At = Memory<Groups, Columns>;
  const auto kernel = conv2d_nhwc_wgmma_kernel<T, Groups, Columns, Prologue>;
  p.split = choice.split;
  p.steps_a_block = (p.steps + p.split - 1) / p.split;
  p.stages = std::min(choice.stages, p.steps_a_block);
  p.tiled = is_tiled(images.shape);
  CUtensorMap residuals = {};
  if (p.residual && p.residual_is_rounded && p.in_pieces) {
    p.residual_rows = (Columns + p.split - 1) / p.split;
    residuals = map_of_rows<T>(p.residual, p.rows, p.filters, p.residual_pitch, p.residual_rows,
                               CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  const int bytes = At::bytes(p.stages, p.residual_rows);
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  constexpr int kTileFilters = Groups * kFilters;
  const dim3 grid((p.rows + Columns - 1) / Columns, (p.filters + kTileFilters - 1) / kTileFilters,
                  p.split);
  launch("conv2d_nhwc_wgmma_kernel", kernel, grid, dim3(128 * Groups + 32), bytes, stream, p.split,
         map_of_images<T>(images.x, images.shape, images.pitch, Columns), residuals, p);
}

template <typename T, bool Prologue, int Tile = 0>
void launch_tiles(const Images& images, const Product& p, const Choice& choice, Stream stream) {
  if constexpr (Tile < kTiles) {
    constexpr TileShape kShape = kShapes[Tile];
    if constexpr (!Prologue || kShape.prologue) {
      if (choice.tile == Tile) {
        return launch_tile<T, kShape.groups, kShape.columns, Prologue>(images, p, choice, stream);
      }
    }
    launch_tiles<T, Prologue, Tile + 1>(images, p, choice, stream);
  }
}

template <typename T>
void launch_product(const Images& images, const Product& p, const Choice& choice, Stream stream) {
  if (p.has_prologue()) return launch_tiles<T, true>(images, p, choice, stream);
  launch_tiles<T, false>(images, p, choice, stream);
}

// One thread packs 16 bytes.
template <typename T>
__global__ void conv2d_nhwc_wgmma_pack_kernel(const float* __restrict__ weight,  // [K, C, R, S]
                                              T* __restrict__ packed, int filters, int channels,
                                              int taps, int chunks, std::int64_t pieces) {
  const std::int64_t index = grid_thread();
  if (index >= pieces) return;
  const int piece = static_cast<int>(index % 8), row = static_cast<int>(index / 8 % kFilters);
  const std::int64_t block = index / 8 / kFilters;
  const int steps = taps * chunks, step = static_cast<int>(block % steps);
  const int filter = static_cast<int>(block / steps) * kFilters + row;
  const int tap = step / chunks;
  constexpr int kWidth = 16 / sizeof(T);
  const int c = (step - tap * chunks) * (8 * kWidth) + exchanged(row, piece) * kWidth;
  for (int i = 0; i < kWidth; ++i) {
    const bool some = filter < filters && c + i < channels;
    const std::int64_t at = (std::int64_t{1} * filter * channels + c + i) * taps + tap;
    packed[index * kWidth + i] = narrowed<T>(some ? weight[at] : 0.0f);
  }
}

template <typename T>
void launch_pack(const float* weight, void* packed, const Conv2dShape& shape, int chunks,
                 Stream stream) {
  const std::int64_t pieces = std::int64_t{8} * ((shape.k + kFilters - 1) / kFilters) * kFilters *
                              shape.r * shape.s * chunks;
  conv2d_nhwc_wgmma_pack_kernel<<<blocks_for(pieces), kBlockThreads, 0, stream>>>(
      weight, static_cast<T*>(packed), shape.k, shape.c, shape.r * shape.s, chunks, pieces);
  CUDA_CHECK_LAUNCH("conv2d_nhwc_wgmma_pack_kernel");
}

// Each is compiled in a file of its own.
#define CNN_ENGINE_MULTIPLIED(T)                                                         \
  template void launch_product<T>(const Images&, const Product&, const Choice&, Stream); \
  template void launch_pack<T>(const float*, void*, const Conv2dShape&, int, Stream);

}  // namespace wgmma
}  // namespace cnn_engine::cuda
