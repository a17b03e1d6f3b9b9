// The kernel of stem_pair: patches of a second convolution, as conv2d_nhwc_wgmma_patches.cuh has
// them, of which a block makes what they read itself: the first layer's products of
// conv2d_nhwc_wgmma_planar.cu.
//
// A tile is 28 rows of eight places of the second convolution, pooled. Its windows reach 30 rows of
// 10 places of the first one's results, which are made as 30 rows of 12: places that follow each
// other, so that a matrix of any eights of them is one of pieces of 16 bytes, two neighbours of
// four channels of the image each. A filter's row is one instruction, of four columns of which the
// last has weights of 0. Results are rounded, zeros outside the image, and laid down as the second
// convolution's patch, whose rows are 12 places too: what is made of the last two is not read.
//
// One warp copies what tiles read of the image, float32, one tile ahead, and stores what is made;
// one asks for the second convolution's weights, a tap at a time; four multiply. Two blocks of a
// multiprocessor take turns at its tensor cores.
#pragma once

#include <type_traits>

#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/rounded.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_planar.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_spatial_tiles.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda {

#define CNN_ENGINE_N36 CNN_ENGINE_N32 ", %32, %33, %34, %35"
CNN_ENGINE_WGMMA(__half, 72, "k16.f32.f16.f16", ", 0, 0", CNN_ENGINE_N36, 36, 37, CNN_ENGINE_D16(0),
                 CNN_ENGINE_D16(16), CNN_ENGINE_D4(32))
CNN_ENGINE_WGMMA(__nv_bfloat16, 72, "k16.f32.bf16.bf16", ", 0, 0", CNN_ENGINE_N36, 36, 37,
                 CNN_ENGINE_D16(0), CNN_ENGINE_D16(16), CNN_ENGINE_D4(32))

namespace wgmma::stem_pair {

constexpr int kRows = 28;                       // of a tile
constexpr int kLines = kRows + 2, kPitch = 12;  // of what its windows reach
constexpr int kReads = kLines + 2;              // rows of the image
constexpr int kReadColumns = kPitch + 1, kReadPitch = 16;
constexpr int kMostChannels = 3;                                    // of the image
constexpr int kTogether = 6, kPlacesTogether = kTogether * kPitch;  // rows that are made at once
constexpr int kThreads = 128 + 64;
static_assert(kLines == 5 * kTogether && kPlacesTogether % 24 == 0);

// Where things lie in shared memory.
constexpr int kPatchBytes = kLines * kPitch * kRowBytes;
constexpr int kStages = 4, kStageBytes = kFilters * kRowBytes;
constexpr int kRing = kPatchBytes, kFirst = kRing + kStages * kStageBytes;
constexpr int kMade = kFirst + kStageBytes;  // pooled, as it is stored
constexpr int kMadeBytes = kRows / 2 * kPatchWidth / 2 * kRowBytes;
constexpr int kPieces = kMade + kMadeBytes, kPieceBytes = kReads * kPitch * 16 + beyond(32);
constexpr int kRead = kPieces + kPieceBytes;  // of the image, twice
constexpr int kPlaneFloats = kReads * kReadPitch, kReadBytes = kMostChannels * kPlaneFloats * 4;
constexpr int kBarriers = kRead + 2 * kReadBytes;
constexpr int kBytes = kBarriers + 8 * (2 * kStages + 7);
static_assert(kRing % 1024 == 0 && kFirst % 1024 == 0 && kMade % 1024 == 0 && kPieces % 16 == 0 &&
              kRead % 16 == 0 && kBarriers % 8 == 0);
static_assert(2 * (kBytes + 1024) <= 228 * 1024);

struct StemPair {
  const float* x;
  const float* bias;
  int channels, h, w;
  float low, high;  // of the first convolution's results
  Product second;
};

// A value of the image to shared memory, or 0.
__device__ inline void copy_value(std::uint32_t to, const float* from, bool some) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(some ? 4 : 0)
               : "memory");
}
__device__ inline void wait_for_values() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// How wgmma is told of pieces of 16 bytes, eight places after eight; a place's next two columns are
// two pieces further.
__device__ inline std::uint64_t pieces_at(std::uint32_t address) {
  constexpr std::uint64_t kNextColumns = 32, kEightPlaces = 128;
  return (kEightPlaces >> 4) << 32 | (kNextColumns >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    stem_pair_kernel(const __grid_constant__ CUtensorMap results,
                     const __grid_constant__ StemPair p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kWarps = 4, kMultiplying = 32 * kWarps;
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t patch = shared_address(memory), ring = patch + kRing;
  const std::uint32_t full = patch + kBarriers, empty = full + 8 * kStages;
  const std::uint32_t there = empty + 8 * kStages, read = there + 16;  // of the image
  const std::uint32_t first_there = read + 16, made = first_there + 8, stored = made + 8;
  const Product& second = p.second;

  let_successors_start();
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32), lane = thread % 32;
  if (thread == kMultiplying) {
    prefetch_map(&results);
    for (int stage = 0; stage < kStages; ++stage) {
      init_phases(full + 8 * stage, 1);
      init_phases(empty + 8 * stage, 1);
    }
    for (int i = 0; i < 2; ++i) {
      init_phases(there + 8 * i, 32);
      init_phases(read + 8 * i, kMultiplying);
    }
    init_phases(first_there, 1);
    init_phases(made, 1);
    init_phases(stored, 1);
    publish_barriers();
  }
  __syncwarp();
  __syncthreads();

  const int apart = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int first_tile = apart < second.tiles ? block / 2 + block % 2 * (apart / 2) : block;
  struct Where {
    int image, h, w;
  };
  const auto where = [&](int tile) {
    const int line = tile / second.patches_a_row, image = line / second.patches_a_column;
    return Where{image, (line - image * second.patches_a_column) * kRows,
                 (tile - line * second.patches_a_row) * kPatchWidth};
  };

  // A warp's part of what a tile reads of the image: two rows, whose columns its halves have, and
  // every `step`-th from there on.
  const auto copy = [&](int tile, int half, int first, int step) {
    const Where at = where(tile);
    const int row_of_two = lane / 16, column = lane % 16, w = at.w - 2 + column;
    const bool inside = w >= 0 && w < p.w;
    const std::int64_t plane = std::int64_t{p.h} * p.w;
    const float* const from = p.x + plane * p.channels * at.image;
    const std::uint32_t to = patch + kRead + half * kReadBytes + column * 4;
    if (column >= kReadColumns) return;
#pragma unroll 4
    for (int two = first; two < kReads; two += step) {
      const int row = two + row_of_two, h = at.h - 2 + row;
      const bool some = inside && h >= 0 && h < p.h;
      const float* const value = from + (some ? std::int64_t{h} * p.w + w : 0);
#pragma unroll
      for (int c = 0; c < kMostChannels; ++c) {
        if (c < p.channels) {
          copy_value(to + (c * kPlaneFloats + row * kReadPitch) * 4, value + c * plane, some);
        }
      }
    }
  };

  if (warp == kWarps) {  // asks for weights
    const bool leads = leads_warp();
    if (leads) {
      expect_bytes(first_there, kStageBytes);
      copy_bulk(patch + kFirst, second.packed, kStageBytes, first_there);
    }
    Turn stage = {0, 1};
#pragma unroll 1
    for (int tile = first_tile; tile < second.tiles; tile += apart) {
#pragma unroll 1
      for (int tap = 1; tap <= 9; ++tap) {
        const std::uint32_t barrier = full + 8 * stage.at;
        wait_for_phase(empty + 8 * stage.at, stage.parity);
        if (leads) {
          expect_bytes(barrier, kStageBytes);
          copy_bulk(ring + stage.at * kStageBytes, second.packed + tap * kStageBytes, kStageBytes,
                    barrier);
        }
        stage.next(kStages);
      }
    }
    return;
  }

  if (warp == kWarps + 1) {  // copies of the image, and stores
    const bool leads = leads_warp();
    wait_for_inputs();
    Turn half = {0, 1};
    const auto copy_next = [&](int tile) {
      wait_for_phase(read + 8 * half.at, half.parity ^ half.at);  // the second had the first tile's
      copy(tile, half.at, 0, 2);
      wait_for_values();  // before the tile that is multiplied has been made
      arrive(there + 8 * half.at);
      half.next(2);
    };
    int parity = 0;
#pragma unroll 1
    for (int tile = first_tile; tile < second.tiles; tile += apart) {
      if (tile + apart < second.tiles) copy_next(tile + apart);
      wait_for_phase(made, parity);
      parity ^= 1;
      const Where at = where(tile);
      if (leads) {
        if (at.w / 2 < p.w / 2 && at.h / 2 < p.h / 2) {
          store_box(&results, patch + kMade, 0, at.w / 2, at.h / 2, at.image);
          commit_stores();
          wait_for_reads();
        }
        arrive(stored);
      }
      __syncwarp();
    }
    if (leads) wait_for_stores();
    return;
  }

  using Two = TwoOf<T>;
  const typename Two::Type low = Two::rounded(p.low, p.low), high = Two::rounded(p.high, p.high);
  float bias[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int filter = warp * 16 + lane / 4 + 8 * i;
    bias[i] = p.bias && filter < second.channels ? p.bias[filter] : 0.0f;
  }
  PatchEnd<T> end(second, warp * 16, warp, lane);
  const int quarter = lane % 4;
  const std::uint64_t weights = matrix_at(ring), first_weights = matrix_at(patch + kFirst);
  const std::uint64_t places = matrix_at<kPitch * kRowBytes>(patch);
  const std::uint32_t lays = patch + row_of_tiles(lane) * kRowBytes +
                             exchanged(lane, warp * 2 + piece_of_tiles(lane)) * 16;
  Turn stage = {0, 0}, half = {0, 0};
  int stored_parity = 1;
  wait_for_inputs();
  if (first_tile < second.tiles) copy(first_tile, 1, 2 * warp, 2 * kWarps);
  wait_for_values();
  named_barrier<kMultiplying>(1);
#pragma unroll 1
  for (int tile = first_tile; tile < second.tiles; tile += apart) {
    const Where at = where(tile);
    // The image, as pieces: each place and the one right of it.
    const bool is_first = tile == first_tile;
    const int read_half = is_first ? 1 : half.at;
    if (!is_first) {
      wait_for_phase(there + 8 * half.at, half.parity);
      half.next(2);
    }
    const float* const values =
        reinterpret_cast<const float*>(memory + kRead + read_half * kReadBytes);
#pragma unroll
    for (int i = 0; i < kReads * kPitch / kMultiplying; ++i) {
      const int piece = thread + i * kMultiplying, row = piece / kPitch;
      const float* const from = values + row * kReadPitch + piece - row * kPitch;
      float pair[2 * kPlanes] = {};
#pragma unroll
      for (int c = 0; c < kMostChannels; ++c) {
        if (c < p.channels) {
          pair[c] = from[c * kPlaneFloats];
          pair[kPlanes + c] = from[c * kPlaneFloats + 1];
        }
      }
      store_rounded(reinterpret_cast<T*>(memory + kPieces + piece * 16), pair, largest(pair),
                    second.overflow);
    }
    arrive(read + 8 * read_half);
    publish_to_engines();
    named_barrier<kMultiplying>(1);

    // The first convolution. Which of a thread's pairs of columns are inside the image: of three
    // eights, two rows.
    bool past = false;
    std::uint32_t inside[3];
    {
      const int columns[3] = {2 * quarter, quarter < 2 ? 8 + 2 * quarter : 2 * quarter - 4,
                              4 + 2 * quarter};
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int column = at.w - 1 + columns[i];
        // The last two are made of the next row's pieces, or of what no one wrote.
        const bool some = columns[i] < kPitch - 2;
        inside[i] = (some && column >= 0 && column < p.w ? 0xffffu : 0u) |
                    (some && column + 1 >= 0 && column + 1 < p.w ? 0xffff0000u : 0u);
      }
    }
    wait_for_phase(first_there, 0);
    using Sums = float[kPlacesTogether / 2];
    const auto multiply = [&](Sums& sums, int line) {
#pragma unroll
      for (int i = 0; i < kPlacesTogether / 2; ++i) sums[i] = 0.0f;
      take(sums);  // zeros before, not behind, the fence
      const std::uint64_t b = pieces_at(patch + kPieces + line * kPitch * 16);
      begin_products();
#pragma unroll
      for (int r = 0; r < 3; ++r) {
        Wgmma<T, kPlacesTogether>::multiply(sums, first_weights + r * (kInstructionBytes >> 4),
                                            b + r * kPitch);
      }
      commit_products();
    };
    const auto lay_down = [&](const Sums& sums, int line) {
      const std::uint32_t to = lays + line * kPitch * kRowBytes;
      const int top = at.h - 1 + line;
      typename Two::Type most = Two::rounded(0.0f, 0.0f);
      const auto masked = [&](int j, std::uint32_t bits) {
        const int row = j / 3 * 2 + (j % 3 == 2 || (j % 3 == 1 && quarter >= 2) ? 1 : 0);
        const unsigned h = static_cast<unsigned>(top + row);
        return h < static_cast<unsigned>(p.h) ? bits & inside[j % 3] : 0u;
      };
#pragma unroll
      for (int j = 0; j < kPlacesTogether / 8; ++j) {
        std::uint32_t bits[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          typename Two::Type two =
              Two::rounded(sums[4 * j + 2 * i] + bias[i], sums[4 * j + 2 * i + 1] + bias[i]);
          two = __hmin2_nan(__hmax2_nan(two, low), high);
          bits[i] = masked(j, *reinterpret_cast<const std::uint32_t*>(&two));
          if constexpr (std::is_same_v<T, __half>) {
            most = __hmax2(most, __habs2(*reinterpret_cast<const __half2*>(&bits[i])));
          }
        }
        store_two_tiles(to + 8 * j * kRowBytes, bits[0], bits[1]);
      }
      if constexpr (std::is_same_v<T, __half>) {
        if (__hisinf(__low2half(most)) || __hisinf(__high2half(most))) {
#pragma unroll
          for (int j = 0; j < kPlacesTogether / 8; ++j) {
            const std::uint32_t some = masked(j, ~0u);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float value = clamp(sums[4 * j + i] + bias[i / 2], p.low, p.high);
              past |= (some >> (i % 2 * 16) & 1u) && is_past_float16(value);
            }
          }
        }
      }
    };
    // Products of some lines while those before are laid down.
    Sums even, odd;
    multiply(even, 0);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      multiply(odd, (i + 1) * kTogether);
      wait_for_products<1>();
      take(even);
      lay_down(even, i * kTogether);
      multiply(even, (i + 2) * kTogether);
      wait_for_products<1>();
      take(odd);
      lay_down(odd, (i + 1) * kTogether);
    }
    wait_for_products<0>();
    take(even);
    lay_down(even, 4 * kTogether);
    publish_to_engines();
    named_barrier<kMultiplying>(1);

    float sums[kRows * 4] = {};
    int before = 0;
#pragma unroll 1
    for (int r = 0; r < 3; ++r) {
#pragma unroll
      for (int s = 0; s < 3; ++s) {
        wait_for_phase(full + 8 * stage.at, stage.parity);
        multiply_rows<T, kRows * 8>(sums, weights + stage.at * (kStageBytes >> 4),
                                    places + (r * kPitch + s) * (kRowBytes >> 4));
        commit_products();
        wait_for_products<1>();  // those of the tap before
        if (thread == 0 && r + s > 0) arrive(empty + 8 * before);
        before = stage.at;
        stage.next(kStages);
      }
    }
    wait_for_products<0>();
    if (thread == 0) arrive(empty + 8 * before);
    wait_for_phase(stored, stored_parity);
    stored_parity ^= 1;
    float upper[4], lower[4];
    const auto two_rows = [&](int row) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        upper[i] = sums[4 * row + i];
        lower[i] = sums[4 * row + 4 + i];
      }
    };
#pragma unroll
    for (int row = 0; row < kRows; row += 2) {
      two_rows(row);
      end(patch + kMade + row / 4 * 8 * kRowBytes, upper, lower, row % 4 == 2);
    }
    if (end.may_be_past()) {
#pragma unroll
      for (int row = 0; row < kRows; row += 2) {
        two_rows(row);
        past |= end.is_past(upper, lower, at.h + row, at.w);
      }
    }
    if (past) tell(second.overflow);
    publish_to_engines();
    named_barrier<kMultiplying>(1);
    if (thread == 0) arrive(made);
  }
#endif
}

}  // namespace wgmma::stem_pair
}  // namespace cnn_engine::cuda
