// The kernel of bottleneck: a convolution of 3x3, the one of 1x1 behind it and the next one as one
// kernel over clusters.
//
// A cluster makes a tile of the image: rows that are narrow, or a part of a wide one, whose
// positions and the two columns between a row and the next are the columns of a product. It has
// blocks for each 64 filters and, of each of these, one for each 64 channels. Such a block
// multiplies nine kernel offsets of 64 x 64 weights by the rows of the image that its tile reaches,
// which are copied once: a kernel offset's matrix is the same memory from another position on
// (conv2d_nhwc_wgmma_rows.cuh). The blocks of the same filters send each other parts of their sums,
// each adds up some eights of the positions in a fixed order and sends the result, rounded, to all
// blocks of the cluster. Then each makes a part of the outputs of the 1x1 convolution from all of
// it, and from these, rounded, a part of the sums of all filters of the next 1x1 convolution, which
// are sent and added up likewise. Weights are asked for before the wait for the kernel before, as
// far as there is room.
#pragma once

#include <type_traits>

#include "cuda/common/warp.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_epilogue.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda::bottlenecks {

using namespace wgmma;

constexpr int kMultiplying = 128;                     // threads of a block that multiply
constexpr int kThreads = kMultiplying + 32;           // and those that ask for copies
constexpr int kColumns = 32, kEights = kColumns / 8;  // of a product
constexpr int kKernelOffsets = 9;
constexpr int kPositionsBytes = kColumns * kRowBytes;  // of 64 channels
constexpr int kExpansion = 4;                          // outputs for a filter, at most

struct Bottleneck {
  const char *first, *second, *third;  // packed weights
  const float *first_bias, *second_bias, *third_bias;
  void *y, *e;
  bool adds;
  int filters, outputs, reduced, h, w;
  int lines, columns, parts;  // of a tile; tiles of a row
  int tiles;                  // of an image
  int added_columns;          // of the residual that are copied: rows begin as those of products
  Clamp inner, outer, next;
  Overflow overflow;
};

// Where things lie in the shared memory of one of Shares x Shares blocks: the first weights, in
// whose position the last ones come later, and what is received and made then; the second weights,
// the image, what is between the convolutions, the residual, what others send of sums, barriers.
template <int Shares, bool Reduces>
struct Block {
  static_assert(Shares <= (Reduces ? 2 : 4));
  static constexpr int kUnits = kExpansion / Shares;  // 64 outputs each
  static constexpr int kOwn = kEights / Shares;       // eights of positions that it adds up
  static constexpr int kOwnBytes = kOwn * kMultiplying * 16;
  static constexpr int kLast = kExpansion * kUnitBytes;  // in the place of the first weights
  static constexpr int kMade = kLast + (Reduces ? (Shares * Shares - 1) * kOwnBytes : 0);
  static constexpr int kImage = kKernelOffsets * kUnitBytes + kLast;
  // The three rows that one row of positions reaches are most, and what products read past them.
  static constexpr int kBetween = kImage + (3 * (kColumns + 2) * kRowBytes + 1023) / 1024 * 1024;
  static constexpr int kResidual = kBetween + Shares * kPositionsBytes;
  static constexpr int kReceived = kResidual + kUnits * kPositionsBytes;
  static constexpr int kBarriers = kReceived + (Shares - 1) * kOwnBytes;
  static constexpr int kBytes = kBarriers + 10 * 8;
  static_assert(kMade + kUnits * kPositionsBytes <= kKernelOffsets * kUnitBytes);
};

template <typename T, int Shares, bool Reduces>
__global__ void __launch_bounds__(kThreads)
    bottleneck_kernel(const __grid_constant__ CUtensorMap images,
                      const __grid_constant__ CUtensorMap residuals,
                      const __grid_constant__ Bottleneck p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using At = Block<Shares, Reduces>;
  constexpr int kSecond = kKernelOffsets * kUnitBytes;
  constexpr int kCluster = Shares * Shares, kPieces = 8;  // of 16 bytes, of 64 channels
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t shared = shared_address(memory);
  const std::uint32_t image_at = shared + At::kImage, between = shared + At::kBetween;
  const std::uint32_t first_is_here = shared + At::kBarriers,  // three rows of kernel offsets
      second_is_here = first_is_here + 24, image_is_here = second_is_here + 8,
                      residual_is_here = image_is_here + 8,
                      accumulators_are_here = residual_is_here + 8,
                      between_is_here = accumulators_are_here + 8,
                      third_is_here = between_is_here + 8, last_are_here = third_is_here + 8;

  let_successors_start();
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32);
  const int rank = Shares > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int share = rank % Shares, group = rank / Shares;  // of channels, of filters
  const int first_output = rank * At::kUnits * kFilters;
  const int image = static_cast<int>(blockIdx.x) / p.tiles;
  const int tile = static_cast<int>(blockIdx.x) - image * p.tiles, down = tile / p.parts;
  const int h = down * p.lines, w = (tile - down * p.parts) * p.columns, pitch = p.columns + 2;

  if (thread == kMultiplying) {
    prefetch_tensor_map(&images);
    if (p.adds) prefetch_tensor_map(&residuals);
    for (int i = 0; i < 10; ++i) init_mbarrier(first_is_here + 8 * i, 1);
    if (Shares > 1) {
      expect_tx(accumulators_are_here, (Shares - 1) * At::kOwnBytes);
      if (Reduces) expect_tx(last_are_here, (kCluster - 1) * At::kOwnBytes);
      expect_tx(between_is_here, (kCluster - 1) * At::kOwn * 8 * kRowBytes);
    }
    fence_mbarrier_init();
  }
  __syncwarp();
  if (Shares > 1) arrive_at_cluster_barrier_relaxed();
  __syncthreads();

  const auto ask_second = [&] {
    expect_tx(second_is_here, At::kLast);
    copy_bulk(shared + kSecond, p.second + rank * At::kLast, At::kLast, second_is_here);
  };
  const auto ask_third = [&] {
    if (!Reduces) return;
    expect_tx(third_is_here, At::kLast);
#pragma unroll
    for (int i = 0; i < Shares; ++i) {  // of 64 filters each, those of this block's outputs
      constexpr int kOf = At::kUnits * kUnitBytes;
      copy_bulk(shared + i * kOf, p.third + (i * kCluster + rank) * kOf, kOf, third_is_here);
    }
  };
  if (warp == kMultiplying / 32) {  // asks for copies
    const bool leads = leads_warp();
    if (leads) {
      const char* from = p.first + (group * kKernelOffsets * Shares + share) * kUnitBytes;
#pragma unroll 1
      for (int kernel_offset = 0; kernel_offset < kKernelOffsets;
           ++kernel_offset, from += Shares * kUnitBytes) {
        const std::uint32_t barrier = first_is_here + kernel_offset / 3 * 8;
        if (kernel_offset % 3 == 0) expect_tx(barrier, 3 * kUnitBytes);
        copy_bulk(shared + kernel_offset * kUnitBytes, from, kUnitBytes, barrier);
      }
      ask_second();
    }
    if ((image | h | w) < 0) return;  // never: but so all of it is divided before the wait
    wait_for_inputs();
    if (leads) {
      expect_tx(image_is_here, (p.lines + 2) * pitch * kRowBytes);
      tma_load_box(image_at, &images, share * kFilters, w - 1, h - 1, image, image_is_here);
      if (p.adds) {
        expect_tx(residual_is_here, At::kUnits * p.lines * p.added_columns * kRowBytes);
        for (int unit = 0; unit < At::kUnits; ++unit) {
          tma_load_box(shared + At::kResidual + unit * kPositionsBytes, &residuals,
                       first_output + unit * kFilters, w, h, image, residual_is_here);
        }
      }
    }
    return;
  }

  // Where a column of the product is in y, or -1.
  const auto position_of = [&](int column) {
    const int line = column / pitch, across = column - line * pitch;
    const bool kept = line < p.lines && h + line < p.h && across < p.columns && w + across < p.w;
    return kept ? (image * p.h + h + line) * p.w + w + across : -1;
  };
  // Of each eight columns, those before this one are kept, as far as a thread's two of them go.
  int left[kEights], own_left[At::kOwn];
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const int two = thread % 4 * 2;
    left[j] = position_of(8 * j + two) < 0 ? 0 : position_of(8 * j + two + 1) < 0 ? two + 1 : 8;
  }
#pragma unroll
  for (int eight = 0; eight < At::kOwn; ++eight) {
#pragma unroll
    for (int i = 0; i < Shares; ++i) {
      if (i == share) own_left[eight] = left[eight * Shares + i];
    }
  }
  constexpr int kApart = kMultiplying / kPieces;
  int positions[kColumns / kApart];  // of y, that a thread stores pieces of
#pragma unroll
  for (int i = 0; i < kColumns / kApart; ++i)
    positions[i] = position_of(thread / kPieces + i * kApart);
  float first_bias[2], second_bias[At::kUnits][2];  // of the rows of D that a thread has
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp * 16 + thread % 32 / 4 + 8 * i, filter = group * kFilters + row;
    first_bias[i] = p.first_bias && filter < p.filters ? p.first_bias[filter] : 0.0f;
#pragma unroll
    for (int unit = 0; unit < At::kUnits; ++unit) {
      const int output = first_output + unit * kFilters + row;
      second_bias[unit][i] = p.second_bias && output < p.outputs ? p.second_bias[output] : 0.0f;
    }
  }
  if (Shares > 1) wait_at_cluster_barrier();  // others have made their barriers
  wait_for_inputs();                          // of what this kernel overwrites, others may read

  float accumulators[kColumns / 2] = {};
  wait_mbarrier(image_is_here, 0);
#pragma unroll 1
  for (int r = 0; r < 3; ++r) {
    wait_mbarrier(first_is_here + 8 * r, 0);
#pragma unroll
    for (int s = 0; s < 3; ++s) {
      multiply_rows<T, kColumns>(accumulators, matrix_descriptor(shared + (3 * r + s) * kUnitBytes),
                                 matrix_descriptor(image_at + (r * pitch + s) * kRowBytes));
    }
    wgmma_commit();
  }
  wgmma_wait<0>();

  bool past = false;
  // A lane's row of a pair of tiles, in eight positions of 64 channels.
  const int tiles_row = row_of_tiles(thread), tiles_piece = warp * 2 + piece_of_tiles(thread);
  const std::uint32_t in_eight = tiles_row * kRowBytes + swizzled(tiles_row, tiles_piece) * 16;
  const std::uint32_t own_between = between + group * kPositionsBytes;
  constexpr int kEightBytes = 8 * kRowBytes;
  const auto end = [&](int eight, int kept, const float (&sum)[4]) {
    past |= epilogue_in_fragments<T>(p.inner, sum, first_bias, {}, kept,
                                     own_between + eight * kEightBytes + in_eight);
  };
  const auto seen_by_all = [&] {
    fence_async_proxy();
    named_barrier<kMultiplying>(1);
  };
  if constexpr (Shares == 1) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      end(j, left[j],
          {accumulators[4 * j], accumulators[4 * j + 1], accumulators[4 * j + 2],
           accumulators[4 * j + 3]});
    }
    seen_by_all();
    if (warp == 0 && leads_warp()) ask_third();
  } else {
    add_up_at_once<Shares, kColumns, kMultiplying>(
        accumulators, share, shared + At::kReceived, accumulators_are_here, thread,
        [&] {
          if (warp == 0 && leads_warp()) ask_third();
        },
        [&](int eight, const float (&sum)[4]) {
          end(eight * Shares + share, own_left[eight], sum);
        },
        group * Shares);
    seen_by_all();
    if (thread < kCluster && thread != rank) {  // sends what the block made
#pragma unroll
      for (int eight = 0; eight < At::kOwn; ++eight) {
        const std::uint32_t at = own_between + (eight * Shares + share) * kEightBytes;
        bulk_copy_to_cluster(cluster_address(at, thread), at, kEightBytes,
                             cluster_address(between_is_here, thread));
      }
    }
    wait_mbarrier_cluster(between_is_here, 0);
    __syncwarp();
    arrive_at_cluster_barrier_relaxed();  // those that sent it may end
  }

  float results[At::kUnits][kColumns / 2] = {};
  wait_mbarrier(second_is_here, 0);
#pragma unroll
  for (int unit = 0; unit < At::kUnits; ++unit) {
#pragma unroll
    for (int chunk = 0; chunk < Shares; ++chunk) {
      multiply_rows<T, kColumns>(
          results[unit], matrix_descriptor(shared + kSecond + (unit * Shares + chunk) * kUnitBytes),
          matrix_descriptor(between + chunk * kPositionsBytes));
    }
    wgmma_commit();
  }
  if (p.adds) wait_mbarrier(residual_is_here, 0);
  const auto epilogue_unit = [&](auto index) {
    constexpr int unit = decltype(index)::value;
    std::uint32_t tiles[kEights][2] = {};
    const std::uint32_t from = shared + At::kResidual + unit * kPositionsBytes + in_eight;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      if (p.adds) load_two_tiles(tiles[j], from + j * kEightBytes);
    }
    wgmma_wait<At::kUnits - 1 - unit>();
    const float (&of)[kColumns / 2] = results[unit];
    const std::uint32_t to = shared + At::kMade + unit * kPositionsBytes + in_eight;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      past |= epilogue_in_fragments<T>(p.outer,
                                       {of[4 * j], of[4 * j + 1], of[4 * j + 2], of[4 * j + 3]},
                                       second_bias[unit], tiles[j], left[j], to + j * kEightBytes);
    }
  };
  epilogue_unit(std::integral_constant<int, 0>());
  if constexpr (At::kUnits > 1) epilogue_unit(std::integral_constant<int, 1>());
  if constexpr (At::kUnits > 2) {
    epilogue_unit(std::integral_constant<int, 2>());
    epilogue_unit(std::integral_constant<int, 3>());
  }
  seen_by_all();
  float last[Shares][kColumns / 2] = {};
  if constexpr (Reduces) {
    wait_mbarrier(third_is_here, 0);
#pragma unroll
    for (int i = 0; i < Shares; ++i) {
#pragma unroll
      for (int unit = 0; unit < At::kUnits; ++unit) {
        multiply_rows<T, kColumns>(last[i],
                                   matrix_descriptor(shared + (i * At::kUnits + unit) * kUnitBytes),
                                   matrix_descriptor(shared + At::kMade + unit * kPositionsBytes));
      }
      wgmma_commit();
    }
  }
  const int piece = thread % kPieces;
#pragma unroll
  for (int unit = 0; unit < At::kUnits; ++unit) {
    const int output = first_output + unit * kFilters + piece * 8;
    float4 made[kColumns / kApart];
#pragma unroll
    for (int i = 0; i < kColumns / kApart; ++i) {
      const int row = thread / kPieces + i * kApart;
      made[i] = load_float4(shared + At::kMade + unit * kPositionsBytes + row * kRowBytes +
                            swizzled(row, piece) * 16);
    }
#pragma unroll
    for (int i = 0; i < kColumns / kApart; ++i) {
      if (positions[i] < 0 || output >= p.outputs) continue;
      *reinterpret_cast<float4*>(static_cast<T*>(p.y) +
                                 static_cast<std::int64_t>(positions[i]) * p.outputs + output) =
          made[i];
    }
  }
  if constexpr (Reduces) {
    wgmma_wait<0>();
    // Eight positions of 64 filters are added up by one block of the cluster, the next by the next.
    const std::uint32_t received = shared + At::kLast + thread * 16;
    float own[At::kOwn][4];
#pragma unroll
    for (int at = 0; at < Shares * kEights; ++at) {
      const int owner = at % kCluster, j = at % kEights;
      const float (&of)[kColumns / 2] = last[at / kEights];
      if (owner == rank) {
#pragma unroll
        for (int i = 0; i < 4; ++i) own[at / kCluster][i] = of[4 * j + i];
        continue;
      }
      const std::uint32_t slot =
          received + ((rank ^ owner) - 1) * At::kOwnBytes + at / kCluster * (kMultiplying * 16);
      store_cluster_async(cluster_address(slot, owner), cluster_address(last_are_here, owner),
                          of[4 * j], of[4 * j + 1], of[4 * j + 2], of[4 * j + 3]);
    }
    float third_bias[At::kOwn][2];
#pragma unroll
    for (int i = 0; i < 2 * At::kOwn; ++i) {
      const int filter = (i / 2 * kCluster + rank) / kEights * kFilters + warp * 16 +
                         thread % 32 / 4 + 8 * (i % 2);
      third_bias[i / 2][i % 2] = p.third_bias && filter < p.reduced ? p.third_bias[filter] : 0.0f;
    }
    if (Shares > 1) wait_mbarrier_cluster(last_are_here, 0);
    named_barrier<kMultiplying>(1);  // all have multiplied what lies where results are made
#pragma unroll
    for (int i = 0; i < At::kOwn; ++i) {
#pragma unroll
      for (int block = 0; block < kCluster - 1; ++block) {
        const float4 more = load_float4(received + block * At::kOwnBytes + i * (kMultiplying * 16));
        own[i][0] += more.x;
        own[i][1] += more.y;
        own[i][2] += more.z;
        own[i][3] += more.w;
      }
      const int eight = (i * kCluster + rank) % kEights;
      int kept = left[0];
#pragma unroll
      for (int j = 1; j < kEights; ++j) kept = j == eight ? left[j] : kept;
      past |= epilogue_in_fragments<T>(p.next, own[i], third_bias[i], {}, kept,
                                       shared + i * kEightBytes + in_eight);
    }
    named_barrier<kMultiplying>(1);
#pragma unroll
    for (int at = thread; at < At::kOwn * 8 * kPieces; at += kMultiplying) {
      const int i = at / (8 * kPieces), row = at / kPieces % 8;
      const int which = i * kCluster + rank;
      const int position = position_of(which % kEights * 8 + row);
      const int filter = which / kEights * kFilters + piece * 8;
      if (position < 0 || filter >= p.reduced) continue;
      *reinterpret_cast<float4*>(static_cast<T*>(p.e) +
                                 static_cast<std::int64_t>(position) * p.reduced + filter) =
          load_float4(shared + i * kEightBytes + row * kRowBytes + swizzled(row, piece) * 16);
    }
  }
  if (past) tell(p.overflow);
  if (Shares > 1) {
    __syncwarp();
    wait_at_cluster_barrier();  // all that this block sent has been read
  }
#endif
}

}  // namespace cnn_engine::cuda::bottlenecks
