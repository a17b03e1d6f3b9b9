// The kernel of mlp for float32: two products over channels with gelu between them, by a cluster.
//
// The blocks of a cluster have the same 64 positions and parts of the hidden channels, of which
// each makes 96 at a time (a round) and multiplies them again at once: they are in its shared
// memory alone. What blocks have of the outputs they send each other: each adds up and writes some
// of them, in a fixed order, so the bits depend on the shape alone. Few positions occupy many
// multiprocessors so, none of which reads more than its part of the weights.
//
// D [positions, channels], products as conv2d_nhwc_wgmma_split.cuh has them. Two warpgroups: of the
// first product each sums every other chunk of 32 channels, whose numbers it has in registers, as
// two parts of float16; they exchange sums, and each ends half of the round's hidden channels,
// stored as two parts with a scale for a position and warpgroup. Of the second product each has
// half of the outputs.
//
// A warp for each warpgroup asks for what it multiplies by, in the order in which it does, into a
// ring of its own; the first before the kernel waits for its inputs. Row i of D is position
// position_of(i) of the tile: so lanes that read images at once meet in no bank.
#pragma once

#include <algorithm>

#include "cuda/sm80/cluster.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_epilogue.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_persistent.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_split.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda::mlp_clusters {

using namespace wgmma;

constexpr int kGroups = 2, kMultiplying = 128 * kGroups;
constexpr int kThreads = kMultiplying + 128;  // and those that ask for copies, who give registers
constexpr int kPositions = kMatrixRows;       // of a tile
constexpr int kRound = 96;                    // hidden channels that are made at once
constexpr int kOwnHidden = kRound / kGroups;  // of a warpgroup
constexpr int kChunk = kRowBytes / 4;         // channels
constexpr int kSliceBytes = kPositions * kRowBytes;  // of a chunk's images, or 32 hidden channels
constexpr int kEightBytes = 128 * 16;                // of eight columns, as a warpgroup holds them

struct Mlp {
  const char* packed;
  const float *first_bias, *second_bias, *first_scales, *second_scales;
  const float* residual;
  float* y;
  int rows, tile_rows, rounds;  // positions in all and of a tile; of a block
  float first_cut_off, second_cut_off;
  Clamp outer;
};

// How products of `Width` channels, and as many outputs, are shared and where things lie in a
// block's shared memory.
template <int Width>
struct Block {
  static constexpr int kWidth = Width;
  static constexpr int kCluster = Width <= 96 ? 2 : Width <= 192 ? 8 : 16;
  static constexpr int kMostRounds = Width <= 96 ? 4 : 1;  // of a block: more find no registers
  static constexpr int kChunks = Width / kChunk;
  static constexpr int kHalf = Width / kGroups;                     // outputs of a warpgroup
  static constexpr int kColumns = kHalf < kRound ? kHalf : kRound;  // that are multiplied at once
  static constexpr int kParts = kHalf / kColumns;
  static constexpr int kOwnEights = Width / 8 / kCluster;  // columns that a block adds up
  // A round's weights of a warpgroup: units of the first product, and of the second.
  static constexpr int kFirstUnitBytes = kRound * kRowBytes,
                       kSecondUnitBytes = kColumns * kRowBytes;
  static constexpr int kSecondUnits = kParts * kRound / kChunk;
  __host__ __device__ static constexpr int first_units(int group) {
    return (kChunks + kGroups - 1 - group) / kGroups;
  }
  __host__ __device__ static constexpr int group_bytes(int group) {
    return first_units(group) * kFirstUnitBytes + kSecondUnits * kSecondUnitBytes;
  }
  // Whose a warpgroup's kOwnEights are, `turn` of those that follow each other.
  __host__ __device__ static constexpr int owner_of(int group, int turn, int rank) {
    constexpr int kOfGroup = kCluster / kGroups;
    return group * kOfGroup + (turn + rank) % kOfGroup;
  }
  static constexpr int kRoundBytes = group_bytes(0) + group_bytes(1);

  static constexpr int kReceived = 0;  // in the place of images
  static constexpr int kHidden = kChunks * kSliceBytes;
  static constexpr int kHiddenBytes = kPositions * kRound * 4;
  static constexpr int kRing = kHidden + kHiddenBytes;
  static constexpr int kSmall = 4 * (2 * kMostRounds * kRound + kGroups * kPositions) + 512;
  static constexpr int kStages =
      std::min((227 * 1024 - kRing - kSmall) / (kGroups * kFirstUnitBytes), 8);
  static constexpr int kBias = kRing + kGroups * kStages * kFirstUnitBytes;
  static constexpr int kFirstScales = kBias + kMostRounds * kRound * 4;
  static constexpr int kHiddenScales = kFirstScales + kMostRounds * kRound * 4;
  static constexpr int kBarriers = kHiddenScales + kGroups * kPositions * 4;
  static constexpr int kBytes = kBarriers + 8 * (2 * kGroups * kStages + kChunks + 3);
  // Units of two batches of the second product are held at once (ask_batch).
  static_assert(kBytes <= 227 * 1024 && kStages >= 4);
  static_assert(kCluster * kOwnEights * kEightBytes == kHidden);
};

// The position of a tile that row `row` of D is.
__device__ inline int position_of(int row) { return row / 8 * 8 + row % 2 * 4 + row % 8 / 2; }
// The channel of 16 that is the first operand's column `k`, of which a lane has four side by side.
__host__ __device__ constexpr int channel_of(int k) { return k % 8 / 2 * 4 + k / 8 * 2 + k % 2; }

// Two rows' numbers of a chunk as a lane multiplies them, the instruction's columns of 16 each.
struct Held {
  std::uint32_t large[2][4], small[2][4];
  float unscale[2];  // of rows g and g + 8
};

__device__ inline std::uint32_t bits_of(__half2 pair) {
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// The largest magnitude of four lanes' numbers.
__device__ inline float largest_of_four_lanes(float largest) {
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
}

template <int Width>
__global__ void __launch_bounds__(kThreads, 1)
    mlp_cluster_kernel(const __grid_constant__ CUtensorMap images, const __grid_constant__ Mlp p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using At = Block<Width>;
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t shared = shared_address(memory);
  const std::uint32_t full = shared + At::kBarriers, empty = full + 8 * kGroups * At::kStages,
                      there = empty + 8 * kGroups * At::kStages,
                      all_received = there + 8 * At::kChunks, all_read = all_received + 8,
                      own_read = all_read + 8;
  float* const first_bias = reinterpret_cast<float*>(memory + At::kBias);
  float* const first_scales = reinterpret_cast<float*>(memory + At::kFirstScales);
  float* const hidden_scales = reinterpret_cast<float*>(memory + At::kHiddenScales);

  let_successors_start();
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32);
  const int rank = static_cast<int>(cluster_rank());
  const int first_position = static_cast<int>(blockIdx.x) * p.tile_rows;
  const int positions = min(p.tile_rows, p.rows - first_position);
  if (thread == kMultiplying) {
    prefetch_tensor_map(&images);
    for (int i = 0; i < kGroups * At::kStages; ++i) {
      init_mbarrier(full + 8 * i, 1);
      init_mbarrier(empty + 8 * i, 4 * kWarpArrivals);
    }
    for (int i = 0; i < At::kChunks; ++i) init_mbarrier(there + 8 * i, 1);
    init_mbarrier(all_received, 1 + kMultiplying / 32 * kWarpArrivals);
    int lanes = 0;  // of a warpgroup, who have a position
    for (int row = 0; row < kPositions; row += 16) lanes += 4 * max(0, min(8, positions - row));
    expect_tx(all_received, (At::kCluster - 1) * At::kOwnEights * lanes * 16);
    init_mbarrier(all_read, At::kCluster);
    init_mbarrier(own_read, kMultiplying / 32 * kWarpArrivals);
    fence_mbarrier_init();
  }
  __syncwarp();
  arrive_at_cluster_barrier_relaxed();
  const int hidden = p.rounds * kRound;
  for (int i = thread; i < hidden; i += kThreads) {
    first_bias[i] = p.first_bias ? p.first_bias[rank * hidden + i] : 0.0f;
    first_scales[i] = p.first_scales[rank * hidden + i];
  }
  __syncthreads();

  if (warp >= kMultiplying / 32) {
    setmaxnreg_dec<40>();
    const bool leads = leads_warp();
    const int helper = warp - kMultiplying / 32;
    if (helper < kGroups) {  // asks for weights
      const int first_units = helper == 0 ? At::first_units(0) : At::first_units(1);
      const int stages = helper * At::kStages;
      RingStage stage = {0, 1};
#pragma unroll 1
      for (int round = 0; round < p.rounds; ++round) {
        const char* from = p.packed + (rank * p.rounds + round) * At::kRoundBytes +
                           (helper == 0 ? 0 : At::group_bytes(0));
#pragma unroll 1
        for (int unit = 0; unit < first_units + At::kSecondUnits; ++unit) {
          const int bytes = unit < first_units ? At::kFirstUnitBytes : At::kSecondUnitBytes;
          const std::uint32_t barrier = full + 8 * (stages + stage.at);
          wait_mbarrier(empty + 8 * (stages + stage.at), stage.parity);
          if (leads) {
            expect_tx(barrier, bytes);
            copy_bulk(shared + At::kRing + (stages + stage.at) * At::kFirstUnitBytes, from, bytes,
                      barrier);
          }
          from += bytes;
          stage.next(At::kStages);
        }
      }
    } else if (helper == kGroups) {  // asks for images
      wait_for_inputs();
      if (leads) {
#pragma unroll 1
        for (int chunk = 0; chunk < At::kChunks; ++chunk) {
          expect_tx(there + 8 * chunk, kSliceBytes);
          tma_load_tile(shared + chunk * kSliceBytes, &images, chunk * kChunk, first_position,
                        there + 8 * chunk);
        }
      }
    } else {  // tells that what others send may come in the place of images
      wait_mbarrier(own_read, 0);
      wait_at_cluster_barrier();  // others have made their barriers
      const int lane = thread % 32;
      if (lane < At::kCluster) arrive_cluster(cluster_address(all_read, lane));
    }
    // All that arrived wait, some with nothing to wait for: racecheck comes back so.
    __syncwarp();
    if (helper <= kGroups) wait_at_cluster_barrier();
    return;
  }

  setmaxnreg_inc<232>();
  const int group = warp / 4, lane = thread % 32, own_thread = thread % 128;
  const int row = own_thread / 32 * 16 + lane / 4;  // of D, and the one eight further
  const int own_position = position_of(row);
  const std::uint64_t ring =
      matrix_descriptor(shared + At::kRing) + group * (At::kStages * At::kFirstUnitBytes >> 4);
  const std::uint32_t own_full = full + 8 * group * At::kStages,
                      own_empty = empty + 8 * group * At::kStages;
  constexpr int kSmallPart = kInstructionBytes >> 4, kNext = 2 * kSmallPart;
  RingStage stage = {0, 0};

  // A chunk's numbers of two positions.
  const auto prepare = [&](int chunk, Held& to) {
    wait_mbarrier(there + 8 * chunk, 0);
    const std::uint32_t from = shared + chunk * kSliceBytes + own_position * kRowBytes;
    float4 z[2][2];
    float largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        z[i][s] =
            load_float4(from + i * 8 * kRowBytes + swizzled(own_position, 4 * s + lane % 4) * 16);
      }
      const auto four = [](const float4& of) {
        return fmaxf(fmaxf(fabsf(of.x), fabsf(of.y)), fmaxf(fabsf(of.z), fabsf(of.w)));
      };
      largest[i] = fmaxf(four(z[i][0]), four(z[i][1]));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned exponent = exponent_of(__float_as_uint(largest_of_four_lanes(largest[i])));
      const float scale = scale_of(exponent);
      to.unscale[i] = unscale_of(exponent) * kPositionUnit;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const Parts first(z[i][s].x * scale, z[i][s].y * scale),
            second(z[i][s].z * scale, z[i][s].w * scale);
        to.large[s][i] = bits_of(first.large);
        to.small[s][i] = bits_of(first.small);
        to.large[s][2 + i] = bits_of(second.large);
        to.small[s][2 + i] = bits_of(second.small);
      }
    }
  };

  // A block adds up kOwnEights eights of columns. All begin to send to blocks behind their own, so
  // that few send to the same one at once. A part is sent once all have read their images.
  float outputs[At::kHalf / 2] = {};
  const auto send = [&](int part) {
    constexpr int kEights = At::kColumns / 8;
    const int slot = rank * At::kOwnEights * kEightBytes + own_thread * 16;
    if (part == 0) {
      wait_at_cluster_barrier();
      wait_mbarrier_cluster(all_read, 0);
    }
    if (own_position >= positions) return;
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const int j = part * kEights + i, at = slot + j % At::kOwnEights * kEightBytes;
      const int owner = At::owner_of(group, j / At::kOwnEights, rank);
      float sum[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] = compensated(outputs[4 * j + k], p.second_cut_off);
      if (owner == rank) {
        *reinterpret_cast<float4*>(memory + At::kReceived + at) = {sum[0], sum[1], sum[2], sum[3]};
      } else {
        store_cluster_async(cluster_address(shared + At::kReceived + at, owner),
                            cluster_address(all_received, owner), sum[0], sum[1], sum[2], sum[3]);
      }
    }
  };
  // In the end a thread has two outputs of each eight, of one position.
  const int finish_position = position_of(thread / 64 * 16 + thread / 2 % 32 / 4 + thread % 2 * 8);
  const int epilogue_output = rank * At::kOwnEights * 8 + thread / 2 % 4 * 2;
  const std::int64_t end_at =
      std::int64_t{first_position + finish_position} * Width + epilogue_output;
  // Has what the end adds come to the first-level cache.
  const auto ask_for_residual = [&] {
    wait_for_inputs();
    if (!p.residual || finish_position >= positions) return;
#pragma unroll
    for (int turn = 0; turn < At::kOwnEights; ++turn) touch(p.residual + end_at + 8 * turn);
  };
  const int rounds = At::kMostRounds == 1 ? 1 : p.rounds;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    float accumulators[kRound / 2] = {};
    // Products of a chunk are asked for before those of the chunk before are added, where both
    // warpgroups have as many.
    constexpr bool kPrefetches = At::kChunks % kGroups == 0;
    Held held[2];
    float of_chunk[kPrefetches ? 2 : 1][kRound / 2];
    int stages[2];
    const auto ask = [&](const Held& of, float (&d)[kRound / 2], int& from) {
      wait_mbarrier(own_full + 8 * stage.at, stage.parity);
      const std::uint64_t b = ring + stage.at * (At::kFirstUnitBytes >> 4);
      using Instruction = WgmmaHeld<__half, kRound>;
      wgmma_fence();
      WgmmaHeldAnew<__half, kRound>::multiply(d, of.small[0], b);
      Instruction::multiply(d, of.small[1], b + kNext);
      Instruction::multiply(d, of.large[0], b + kSmallPart);
      Instruction::multiply(d, of.large[1], b + kSmallPart + kNext);
      Instruction::multiply(d, of.large[0], b);
      Instruction::multiply(d, of.large[1], b + kNext);
      wgmma_commit();
      from = stage.at;
      stage.next(At::kStages);
    };
    const auto add = [&](const Held& of, float (&d)[kRound / 2], int from) {
      take(d);
      arrive_for_warp(own_empty + 8 * from);
#pragma unroll
      for (int i = 0; i < kRound / 2; ++i)
        accumulators[i] = fmaf(d[i], of.unscale[i % 4 / 2], accumulators[i]);
    };
    prepare(group, held[0]);
    ask(held[0], of_chunk[0], stages[0]);
#pragma unroll
    for (int i = 0; i < At::first_units(0); ++i) {
      const int now = i % 2, next = 1 - now;
      const int left = kPrefetches ? At::kChunks - i * kGroups : At::kChunks - i * kGroups - group;
      if (left <= 0) break;
      if (left > kGroups) prepare(group + (i + 1) * kGroups, held[next]);
      if constexpr (kPrefetches) {
        if (left > kGroups) {
          ask(held[next], of_chunk[next], stages[next]);
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        add(held[now], of_chunk[now], stages[now]);
      } else {
        wgmma_wait<0>();
        add(held[now], of_chunk[0], stages[now]);
        if (left > kGroups) ask(held[next], of_chunk[0], stages[next]);
      }
    }
    if (round + 1 == rounds) arrive_for_warp(own_read);

    // Columns that the other ends are the second half of each one's. They lie where hidden channels
    // come, which no one multiplies any more.
    if (round > 0) named_barrier<kMultiplying>(1);
    constexpr int kOwn = kOwnHidden / 8;
    char* const exchange = memory + At::kHidden + own_thread * 16;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const float* const of = accumulators + 4 * (kOwn + j);
      *reinterpret_cast<float4*>(exchange + ((1 - group) * kOwn + j) * kEightBytes) = {
          of[0], of[1], of[2], of[3]};
    }
    named_barrier<kMultiplying>(1);
    float value[4 * kOwn], largest[2] = {};
    const int first_hidden = round * kRound + group * kOwnHidden + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const float4 more =
          *reinterpret_cast<const float4*>(exchange + (group * kOwn + j) * kEightBytes);
      const float added[4] = {more.x, more.y, more.z, more.w};
      const float2 scale = *reinterpret_cast<const float2*>(first_scales + first_hidden + 8 * j);
      const float2 bias = *reinterpret_cast<const float2*>(first_bias + first_hidden + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float sum = compensated(accumulators[4 * j + i] + added[i], p.first_cut_off);
        value[4 * j + i] = fmaf(sum, i % 2 ? scale.y : scale.x, i % 2 ? bias.y : bias.x);
      }
    }
    apply<float>(Activation{UnaryFunction::gelu, 0.0f, 0.0f}, value);
#pragma unroll
    for (int i = 0; i < 4 * kOwn; ++i) {
      largest[i % 4 / 2] = fmaxf(largest[i % 4 / 2], fabsf(value[i]));
    }
    float to_parts[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned exponent = exponent_of(__float_as_uint(largest_of_four_lanes(largest[i])));
      to_parts[i] = scale_of(exponent);
      if (lane % 4 == 0) {
        hidden_scales[group * kPositions + row + 8 * i] = unscale_of(exponent) * kPositionUnit;
      }
    }
    named_barrier<kMultiplying>(1);  // what was swizzled is read
    const int tiles_row = own_thread / 32 * 16 + lane % 16;
    const std::uint32_t to = shared + At::kHidden + tiles_row * kRowBytes;
#pragma unroll
    for (int j = 0; j < kOwn; j += 2) {
      std::uint32_t large[4], small[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const two = value + 4 * (j + i / 2) + i % 2 * 2;
        const Parts parts(two[0] * to_parts[i % 2], two[1] * to_parts[i % 2]);
        large[i] = bits_of(parts.large);
        small[i] = bits_of(parts.small);
      }
      const int sixteen = group * (kOwn / 2) + j / 2, piece = sixteen % 2 * 4 + lane / 16;
      const std::uint32_t slice = to + sixteen / 2 * kSliceBytes;
      store_four_tiles(slice + swizzled(tiles_row, piece) * 16, large);
      store_four_tiles(slice + swizzled(tiles_row, piece + 2) * 16, small);
    }
    fence_async_proxy();
    named_barrier<kMultiplying>(1);

    // Sums of a part of the outputs over each warpgroup's hidden channels, which have one scale.
    constexpr int kUnits = kRound / kChunk, kSixteens = kOwnHidden / 16;
    constexpr int kBatches = At::kParts * kGroups;
    const std::uint64_t a = matrix_descriptor(shared + At::kHidden);
    float of_batch[2][At::kColumns / 2];
    int units[2][kUnits];  // of a part, where they are
    const auto ask_batch = [&](int batch) {
      float (&d)[At::kColumns / 2] = of_batch[batch % 2];
      int (&at)[kUnits] = units[batch / kGroups % 2];
      std::uint64_t from_a[kSixteens], from_b[kSixteens];
#pragma unroll
      for (int i = 0; i < kSixteens; ++i) {
        const int sixteen = batch % kGroups * kSixteens + i, unit = sixteen / 2;
        if (sixteen % 2 == 0) {
          wait_mbarrier(own_full + 8 * stage.at, stage.parity);
          at[unit] = stage.at;
          stage.next(At::kStages);
        }
        from_a[i] = a + unit * (kSliceBytes >> 4) + sixteen % 2 * kNext;
        from_b[i] = ring + at[unit] * (At::kFirstUnitBytes >> 4) + sixteen % 2 * kNext;
      }
      using Instruction = Wgmma<__half, At::kColumns>;
      wgmma_fence();
      WgmmaAnew<__half, At::kColumns>::multiply(d, from_a[0] + kSmallPart, from_b[0]);
#pragma unroll
      for (int i = 1; i < kSixteens; ++i) {
        Instruction::multiply(d, from_a[i] + kSmallPart, from_b[i]);
      }
#pragma unroll
      for (int i = 0; i < kSixteens; ++i) {
        Instruction::multiply(d, from_a[i], from_b[i] + kSmallPart);
      }
#pragma unroll
      for (int i = 0; i < kSixteens; ++i) Instruction::multiply(d, from_a[i], from_b[i]);
      wgmma_commit();
    };
    const auto add_batch = [&](int batch) {
      float (&d)[At::kColumns / 2] = of_batch[batch % 2];
      const int of = batch % kGroups;
      take(d);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {  // those that end with this group
        if ((2 * unit + 1) / kSixteens == of) {
          arrive_for_warp(own_empty + 8 * units[batch / kGroups % 2][unit]);
        }
      }
      float unscale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) unscale[i] = hidden_scales[of * kPositions + row + 8 * i];
#pragma unroll
      for (int i = 0; i < At::kColumns / 2; ++i) {
        float& sum = outputs[batch / kGroups * (At::kColumns / 2) + i];
        sum = fmaf(d[i], unscale[i % 4 / 2], sum);
      }
    };
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      ask_batch(batch);
      if (round + 1 == rounds && batch > kGroups && batch % kGroups == 1) {
        send(batch / kGroups - 1);  // the part before, while this one is multiplied
      }
      if (round + 1 == rounds && batch + 1 == kBatches) ask_for_residual();
      if (batch == 0) continue;
      wgmma_wait<1>();
      add_batch(batch - 1);
    }
    wgmma_wait<0>();
    add_batch(kBatches - 1);
  }
  float2 scale[At::kOwnEights], bias[At::kOwnEights], added[At::kOwnEights];
#pragma unroll
  for (int turn = 0; turn < At::kOwnEights; ++turn) {
    const int output = epilogue_output + 8 * turn;
    const auto two = [](const float* from) {
      return *reinterpret_cast<const float2*>(from);
    };
    scale[turn] = two(p.second_scales + output);
    bias[turn] = p.second_bias ? two(p.second_bias + output) : float2{0.0f, 0.0f};
    added[turn] = p.residual && finish_position < positions ? two(p.residual + end_at + 8 * turn)
                                                            : float2{0.0f, 0.0f};
  }
  send(At::kParts - 1);
  arrive_for_warp(all_received);

  wait_mbarrier_cluster(all_received, 0);
#pragma unroll
  for (int turn = 0; turn < At::kOwnEights; ++turn) {
    if (finish_position >= positions) break;
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int block = 0; block < At::kCluster; ++block) {
      const float2 more = *reinterpret_cast<const float2*>(
          memory + At::kReceived + (block * At::kOwnEights + turn) * kEightBytes + thread * 8);
      sum.x += more.x;
      sum.y += more.y;
    }
    const float x = fmaf(sum.x, scale[turn].x, bias[turn].x + added[turn].x);
    const float y = fmaf(sum.y, scale[turn].y, bias[turn].y + added[turn].y);
    *reinterpret_cast<float2*>(p.y + end_at + 8 * turn) = {clamp(x, p.outer.low, p.outer.high),
                                                           clamp(y, p.outer.low, p.outer.high)};
  }
#endif
}

}  // namespace cnn_engine::cuda::mlp_clusters
