// The kernel of mlp of 16 bits: two products over channels with gelu between them, whose hidden
// channels are in registers alone.
//
// D [positions, filters], unlike conv2d_nhwc_wgmma's: what a warpgroup holds of the first product,
// rounded, is the second one's first operand as it lies (wgmma.cuh). A tile is 64 positions for
// each of two warpgroups. 64 hidden channels after the other are multiplied, ended and multiplied
// again: while gelu is applied to some, the next are multiplied. Blocks are persistent and take one
// tile after another. Beside the warpgroups one warp asks for the weights of both products, in the
// order in which they are multiplied, into a ring of stages, one for images, and one for what comes
// and goes by the position of the result: residuals are copied there, results are made there and
// copied to y.
#pragma once

#include <type_traits>

#include "cuda/sm80/mma.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_epilogue.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_persistent.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_split.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda::mlps {

using namespace wgmma;

constexpr int kGroups = 2, kMultiplying = 128 * kGroups;
constexpr int kThreads = kMultiplying + 128;  // and those that ask for copies, who give registers
constexpr int kPositions = 64;                // of a warpgroup's tile
constexpr int kHidden = 64;                   // channels of a step
constexpr int kMostHidden = 1024;

struct Mlp {
  const char *first, *second;  // packed weights
  const float *first_bias, *second_bias;
  bool adds;
  int rows, tiles, steps, outputs;
  Clamp outer;
  Overflow overflow;
};

// Where things lie in the shared memory of a block, for up to Width channels and outputs.
template <int Width>
struct Block {
  static constexpr int kUnits = (Width + kFilters - 1) / kFilters;
  static constexpr int kTileBytes = kUnits * kUnitBytes;  // a warpgroup's images, or results
  static constexpr int kFirstBytes = kUnits * kUnitBytes, kSecondBytes = Width * kRowBytes;
  static constexpr int kImageTiles = Width <= 96 ? 2 : 1;  // whose images there is room for
  static constexpr int kStages = Width <= 96 ? 7 : 5;
  // Times 16 hidden channels that are looked at together, as far as there are registers.
  static constexpr int kTogether = Width <= 96 ? 4 : 2;
  static constexpr int kResults = kImageTiles * kGroups * kTileBytes;
  static constexpr int kRing = kResults + kGroups * kTileBytes;
  static constexpr int kBias = kRing + kStages * kFirstBytes;
  static constexpr int kBarriers = kBias + kMostHidden * 4;
  static constexpr int kBytes = kBarriers + 8 * (2 * kStages + 2 * kImageTiles + 2 * kGroups);
  static_assert(kBytes <= 227 * 1024);
};

// Rounds 16 columns of 16 positions, as a warp holds them, to what is multiplied next, or stored.
template <typename T>
__device__ inline void round_columns(const float (&value)[8], std::uint32_t (&made)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) made[i] = rounded_pair<T>(value[2 * i], value[2 * i + 1]);
}

template <typename T, int Width>
__global__ void __launch_bounds__(kThreads, 1)
    mlp_kernel(const __grid_constant__ CUtensorMap images,
               const __grid_constant__ CUtensorMap residuals,
               const __grid_constant__ CUtensorMap results, const __grid_constant__ Mlp p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using At = Block<Width>;
  constexpr int kDeep = Width * 2 / kInstructionBytes;  // instructions of the first product's K
  constexpr bool kLooks = std::is_same_v<T, __half>;    // for what is past its range
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t shared = shared_address(memory), ring = shared + At::kRing;
  const std::uint32_t full = shared + At::kBarriers, empty = full + 8 * At::kStages;
  // Of images, and of results.
  const std::uint32_t there = empty + 8 * At::kStages, read = there + 8 * At::kImageTiles;
  const std::uint32_t ready = read + 8 * At::kImageTiles, made = ready + 8 * kGroups;

  let_successors_start();
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32);
  if (thread == 0) {
    prefetch_tensor_map(&images);
    prefetch_tensor_map(&results);
    for (int stage = 0; stage < At::kStages; ++stage) {
      init_mbarrier(full + 8 * stage, 1);
      init_mbarrier(empty + 8 * stage, kGroups);
    }
    for (int i = 0; i < At::kImageTiles; ++i) {
      init_mbarrier(there + 8 * i, 1);
      init_mbarrier(read + 8 * i, kGroups);
    }
    for (int group = 0; group < kGroups; ++group) {
      init_mbarrier(ready + 8 * group, 1);
      init_mbarrier(made + 8 * group, 4);
    }
    fence_mbarrier_init();
  }
  float* const first_bias = reinterpret_cast<float*>(memory + At::kBias);
  for (int i = thread; i < p.steps * kHidden; i += kThreads) {
    first_bias[i] = p.first_bias ? p.first_bias[i] : 0.0f;
  }
  __syncthreads();

  const int first_tile = static_cast<int>(blockIdx.x), apart = static_cast<int>(gridDim.x);
  if (warp >= kMultiplying / 32) {
    setmaxnreg_dec<40>();
    const bool leads = leads_warp();
    const int helper = warp - kMultiplying / 32;
    if (helper == 0) {  // asks for weights
      RingStage stage = {0, 1};
      const auto wait = [&] {
        wait_mbarrier(empty + 8 * stage.at, stage.parity);
      };
      const auto ask_first = [&](int step) {
        wait();
        if (leads) {
          const std::uint32_t barrier = full + 8 * stage.at;
          expect_tx(barrier, At::kFirstBytes);
          copy_bulk(ring + stage.at * At::kFirstBytes, p.first + step * At::kFirstBytes,
                    At::kFirstBytes, barrier);
        }
        stage.next(At::kStages);
      };
#pragma unroll 1
      for (int tile = first_tile; tile < p.tiles; tile += apart) {
        ask_first(0);
#pragma unroll 1
        for (int step = 0; step < p.steps; ++step) {
          if (step + 1 < p.steps) ask_first(step + 1);
          wait();
          if (leads) {
            const std::uint32_t barrier = full + 8 * stage.at,
                                to = ring + stage.at * At::kFirstBytes;
            expect_tx(barrier, At::kSecondBytes);
#pragma unroll
            for (int unit = 0; unit < At::kUnits; ++unit) {
              constexpr int kLast = At::kSecondBytes - (At::kUnits - 1) * kUnitBytes;
              copy_bulk(to + unit * kUnitBytes, p.second + (unit * p.steps + step) * kUnitBytes,
                        unit + 1 < At::kUnits ? kUnitBytes : kLast, barrier);
            }
          }
          stage.next(At::kStages);
        }
      }
    } else if (helper == 1) {  // asks for images
      wait_for_inputs();
      RingStage turn = {0, 1};
#pragma unroll 1
      for (int tile = first_tile; tile < p.tiles; tile += apart) {
        wait_mbarrier(read + 8 * turn.at, turn.parity);
        if (leads) {
          const std::uint32_t barrier = there + 8 * turn.at,
                              to = shared + turn.at * (kGroups * At::kTileBytes);
          expect_tx(barrier, kGroups * At::kTileBytes);
#pragma unroll
          for (int i = 0; i < kGroups * At::kUnits; ++i) {
            tma_load_tile(to + i * kUnitBytes, &images, i % At::kUnits * kFilters,
                          (tile * kGroups + i / At::kUnits) * kPositions, barrier);
          }
        }
        turn.next(At::kImageTiles);
      }
    } else if (helper == 2) {  // brings residuals, and stores
      const auto prepare = [&](int tile, int group) {
        if (!leads || tile >= p.tiles) return;
        const std::uint32_t barrier = ready + 8 * group,
                            to = shared + At::kResults + group * At::kTileBytes;
        if (!p.adds) return arrive(barrier);
        expect_tx(barrier, At::kTileBytes);
        for (int unit = 0; unit < At::kUnits; ++unit) {
          tma_load_tile(to + unit * kUnitBytes, &residuals, unit * kFilters,
                        (tile * kGroups + group) * kPositions, barrier);
        }
      };
      wait_for_inputs();
      for (int group = 0; group < kGroups; ++group) prepare(first_tile, group);
      int parity = 0;
#pragma unroll 1
      for (int tile = first_tile; tile < p.tiles; tile += apart, parity ^= 1) {
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) {
          wait_mbarrier(made + 8 * group, parity);
          if (leads) {
            const std::uint32_t from = shared + At::kResults + group * At::kTileBytes;
            for (int unit = 0; unit < At::kUnits; ++unit) {
              tma_store_tile(&results, from + unit * kUnitBytes, unit * kFilters,
                             (tile * kGroups + group) * kPositions);
            }
            tma_store_commit();
            tma_store_wait_read();
          }
          __syncwarp();
          prepare(tile + apart, group);
        }
      }
      if (leads) tma_store_wait();
    }
    return;
  }

  setmaxnreg_inc<232>();
  const int group = warp / 4, lane = thread % 32;
  const std::uint32_t own = shared + group * At::kTileBytes, own_result = own + At::kResults;
  // Where a lane's row of four tiles is, of the 16 columns `at`.
  const int row = warp % 4 * 16 + lane % 16;
  const auto tiles_at = [&](std::uint32_t tile, int at) {
    return tile + at / 4 * kUnitBytes + row * kRowBytes +
           swizzled(row, at % 4 * 2 + lane / 16) * 16;
  };
  const std::uint64_t weights = matrix_descriptor(ring);
  constexpr int kApart = kInstructionBytes >> 4;
  RingStage stage = {0, 0}, images_at = {0, 0};
  int parity = 0;
  bool past = false;
#pragma unroll 1
  for (int tile = first_tile; tile < p.tiles; tile += apart, parity ^= 1) {
    const std::uint64_t positions =
        matrix_descriptor(own) + images_at.at * (kGroups * At::kTileBytes >> 4);
    wait_mbarrier(there + 8 * images_at.at, images_at.parity);
    float hidden[2][kHidden / 2] = {}, accumulators[Width / 2];
    std::uint32_t between[2][4][4];
#pragma unroll
    for (int j = 0; j < Width / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int output = 8 * j + lane % 4 * 2 + i;
        accumulators[4 * j + i] =
            p.second_bias && output < p.outputs ? p.second_bias[output] : 0.0f;
        accumulators[4 * j + 2 + i] = accumulators[4 * j + i];
      }
    }
    // Asks for the first product of a step.
    const auto begin = [&](int step, float (&d)[kHidden / 2]) {
      wait_mbarrier(full + 8 * stage.at, stage.parity);
      const std::uint64_t b = weights + stage.at * (At::kFirstBytes >> 4);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDeep; ++k) {
        const int at = k / 4 * (kUnitBytes >> 4) + k % 4 * kApart;
        if (k == 0) {
          WgmmaAnew<T, kHidden>::multiply(d, positions + at, b + at);
        } else {
          Wgmma<T, kHidden>::multiply(d, positions + at, b + at);
        }
      }
      wgmma_commit();
      stage.next(At::kStages);
    };
    int first_stage = stage.at;
    begin(0, hidden[0]);
    wgmma_wait<0>();
    take(hidden[0]);
    if (thread % 128 == 0) arrive(empty + 8 * first_stage);
    int second_stage = 0;
    const auto go = [&](int step, auto which) {
      constexpr int kNow = decltype(which)::value;
      const float (&now)[kHidden / 2] = hidden[kNow];
      const bool more = step + 1 < p.steps;
      first_stage = stage.at;
      if (more) begin(step + 1, hidden[1 - kNow]);
#pragma unroll
      for (int first = 0; first < kHidden / 16; first += At::kTogether) {
        float value[At::kTogether][8];
        Infinities infinities;
#pragma unroll
        for (int k = 0; k < At::kTogether; ++k) {
#pragma unroll
          for (int i = 0; i < 8; i += 4) {
            const float2 bias = *reinterpret_cast<const float2*>(
                first_bias + step * kHidden + 16 * (first + k) + 2 * i + lane % 4 * 2);
            const int from = 8 * (first + k) + i;
            value[k][i] = now[from] + bias.x;
            value[k][i + 1] = now[from + 1] + bias.y;
            value[k][i + 2] = now[from + 2] + bias.x;
            value[k][i + 3] = now[from + 3] + bias.y;
          }
          apply<__half>(Activation{UnaryFunction::gelu, 0.0f, 0.0f}, value[k]);
          round_columns<T>(value[k], between[kNow][first + k]);
          if (kLooks) {
#pragma unroll
            for (const std::uint32_t pair : between[kNow][first + k]) infinities.look(pair);
          }
        }
        if (kLooks && infinities.found()) {
          unsigned found = 0;
#pragma unroll
          for (int k = 0; k < At::kTogether; ++k) {
#pragma unroll
            for (int i = 0; i < 8; ++i) found |= is_past_float16(value[k][i]);
          }
          asm volatile("" : "+r"(found)::"memory");  // here, not while sums are multiplied
          past |= found != 0;
        }
      }
      wait_mbarrier(full + 8 * stage.at, stage.parity);
      const std::uint64_t b = weights + stage.at * (At::kFirstBytes >> 4);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        WgmmaHeld<T, Width>::multiply(accumulators, between[kNow][k], b + k * kApart);
      }
      wgmma_commit();
      const int before = second_stage;
      second_stage = stage.at;
      stage.next(At::kStages);
      wgmma_wait<1>();  // all but these
      take(hidden[1 - kNow]);
      if (thread % 128 == 0) {
        if (step > 0) arrive(empty + 8 * before);
        if (more) arrive(empty + 8 * first_stage);
      }
    };
#pragma unroll 1
    for (int step = 0; step < p.steps; step += 2) {
      go(step, std::integral_constant<int, 0>());
      go(step + 1, std::integral_constant<int, 1>());
    }
    wgmma_wait<0>();
    take(accumulators);
    if (thread % 128 == 0) {
      arrive(empty + 8 * second_stage);
      arrive(read + 8 * images_at.at);
    }

    images_at.next(At::kImageTiles);

    wait_mbarrier(ready + 8 * group, parity);
    const int left = p.rows - (tile * kGroups + group) * kPositions - warp % 4 * 16 - lane / 4;
#pragma unroll
    for (int at = 0; at < Width / 16; ++at) {
      const std::uint32_t to = tiles_at(own_result, at);
      float value[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] = accumulators[8 * at + i];
      if (p.adds) {
        std::uint32_t residual[4];
        load_tiles(residual, to);
        float more[8];
        load_neighbours(reinterpret_cast<const T*>(residual), more);
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] += more[i];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        value[i] = clamp(value[i], p.outer.low, p.outer.high);
        if (kLooks) {
          past |= left > i / 2 % 2 * 8 && is_past_float16(value[i]);
        }
      }
      std::uint32_t rounded[4];
      round_columns<T>(value, rounded);
      store_four_tiles(to, rounded);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) arrive(made + 8 * group);
  }
  if (past) tell(p.overflow);
#endif
}

}  // namespace cnn_engine::cuda::mlps
