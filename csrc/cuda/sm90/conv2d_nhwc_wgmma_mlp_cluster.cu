// mlp of float32 by clusters: what it takes, how weights are packed for it, and its launch.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_mlp.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_mlp_cluster.cuh"

namespace cnn_engine::cuda::mlp_clusters {
namespace {

// Calls body(Block of the shape's channels); false where there is none.
template <typename Body>
bool with_block(int channels, const Body& body) {
  if (channels == 96) return body(Block<96>()), true;
  if (channels == 192) return body(Block<192>()), true;
  if (channels == 384) return body(Block<384>()), true;
  return false;
}

// One thread packs 16 bytes: units one after another, as a round's warpgroup multiplies by them.
template <int Width>
__global__ void mlp_cluster_pack_kernel(const float* __restrict__ first,   // [hidden, Width]
                                        const float* __restrict__ second,  // [Width, hidden]
                                        const float* __restrict__ first_scales,
                                        const float* __restrict__ second_scales,
                                        __half* __restrict__ packed, int hidden,
                                        std::int64_t pieces) {
  using At = Block<Width>;
  const std::int64_t index = grid_thread();
  if (index >= pieces) return;
  const int round = static_cast<int>(index * 16 / At::kRoundBytes);
  int at = static_cast<int>(index * 16 - std::int64_t{round} * At::kRoundBytes);
  const int group = at < At::group_bytes(0) ? 0 : 1;
  if (group == 1) at -= At::group_bytes(0);
  const int first_units = group == 0 ? At::first_units(0) : At::first_units(1);
  const bool is_first = at < first_units * At::kFirstUnitBytes;
  if (!is_first) at -= first_units * At::kFirstUnitBytes;
  const int unit_bytes = is_first ? At::kFirstUnitBytes : At::kSecondUnitBytes;
  const int unit = at / unit_bytes, row = at % unit_bytes / kRowBytes;
  const int piece = swizzled(row, at % kRowBytes / 16);
  const int sixteen = piece / 4 * 16, half = piece % 2 * 8;
  for (int i = 0; i < 8; ++i) {
    float value, scale;
    if (is_first) {  // a warpgroup's own hidden channels come first
      const int filter = round * kRound + (row + group * kOwnHidden) % kRound;
      const int channel = (unit * kGroups + group) * kChunk + sixteen + channel_of(half + i);
      value = first[std::int64_t{1} * filter * Width + channel];
      scale = first_scales[filter];
    } else {
      constexpr int kUnits = kRound / kChunk;  // of a part
      const int column = unit / kUnits * At::kColumns + row, eight = column / 8;
      const int rank = round / (hidden / kRound / At::kCluster);
      const int owner = At::owner_of(group, eight / At::kOwnEights, rank);
      const int filter = (owner * At::kOwnEights + eight % At::kOwnEights) * 8 + column % 8;
      const int channel = round * kRound + unit % kUnits * kChunk + sixteen + half + i;
      value = second[std::int64_t{1} * filter * hidden + channel];
      scale = second_scales[filter];
    }
    packed[index * 8 + i] = part_of_weight(value, scale, is_small_piece(piece));
  }
}

// What sums lose of which 32 channels are multiplied at once, as a convolution's, and of which 48:
// measured on an H200.
constexpr float kFirstCutOff = cut_off_for(0.9f), kSecondCutOff = cut_off_for(1.37f);

struct Packed {
  std::int64_t units, scales, bytes;  // of units; where scales lie; in all
};
Packed packed_of(const Conv2dShape& shape, int outputs) {
  Packed packed = {};
  with_block(shape.c, [&](auto block) {
    packed.units = std::int64_t{shape.k / kRound} * decltype(block)::kRoundBytes;
  });
  packed.scales = padded_filters(shape);
  packed.bytes = packed.units + 4 * (packed.scales + padded_filters(gemm_over(shape.k, outputs)));
  return packed;
}

// The kernel of such blocks, ready to be launched.
template <typename At>
auto kernel_of() {
  const auto kernel = mlp_cluster_kernel<At::kWidth>;
  make_ready(kernel, At::kBytes);
  allow_large_clusters(kernel);
  return kernel;
}

// Hidden channels of a block, in kRounds.
template <typename At>
int rounds_of(const Conv2dShape& shape) {
  return shape.k / kRound / At::kCluster;
}

}  // namespace

const char* why_not(const Conv2dShape& shape, int outputs) {
  if (shape.c != outputs) return "as many outputs as channels";
  int cluster = 0, most = 0;
  const bool some = with_block(shape.c, [&](auto block) {
    cluster = decltype(block)::kCluster;
    most = decltype(block)::kMostRounds;
  });
  if (!some) return "96, 192 or 384 channels";
  if (shape.k % (kRound * cluster) != 0 || shape.k > most * kRound * cluster) {
    return "hidden channels that a cluster's blocks share in 96s";
  }
  return nullptr;
}

double time_of(const Conv2dShape& shape, const Target& target) {
  double time = std::numeric_limits<double>::infinity();
  with_block(shape.c, [&](auto block) {
    using At = decltype(block);
    const int clusters = target.clusters_at_once(At::kCluster, 1, At::kBytes);
    if (clusters == 0) return;
    // Fitted to launches of 1 to 20 images on an H200, of four times as many hidden channels.
    const double turn = At::kWidth == 96    ? 1.2 + 3.8 * rounds_of<At>(shape)
                        : At::kWidth == 192 ? 7.4
                                            : 11.8;
    const int tiles = divided(std::int64_t{shape.n} * shape.h * shape.w, kPositions);
    const int most = std::min(clusters, std::max(1, target.multiprocessors / At::kCluster));
    time = 0.6 + divided(tiles, most) * turn;
  });
  return time;
}

std::int64_t packed_bytes(const Conv2dShape& shape, int outputs) {
  return packed_of(shape, outputs).bytes;
}

void pack(const float* first, const float* second, void* packed, const Conv2dShape& shape,
          int outputs, Stream stream) {
  const Packed at = packed_of(shape, outputs);
  float* const first_scales = reinterpret_cast<float*>(static_cast<char*>(packed) + at.units);
  float* const second_scales = first_scales + at.scales;
  launch_scales<float>(first, first_scales, gemm_over(shape.c, shape.k), false, stream);
  launch_scales<float>(second, second_scales, gemm_over(shape.k, outputs), false, stream);
  with_block(shape.c, [&](auto block) {
    const std::int64_t pieces = at.units / 16;
    mlp_cluster_pack_kernel<decltype(block)::kWidth>
        <<<blocks_for(pieces), kBlockThreads, 0, stream>>>(
            first, second, first_scales, second_scales, static_cast<__half*>(packed), shape.k,
            pieces);
    CUDA_CHECK_LAUNCH("mlp_cluster_pack_kernel");
  });
}

void run(const MlpCall& call) {
  const Conv2dShape& shape = call.shape;
  const std::int64_t positions = std::int64_t{shape.h} * shape.w;
  const Packed at = packed_of(shape, call.outputs);
  for_each_part_of_batch(shape.n, positions, [&](std::int64_t before, int images) {
    Mlp p = {};
    p.packed = static_cast<const char*>(call.packed);
    p.first_scales = reinterpret_cast<const float*>(p.packed + at.units);
    p.second_scales = p.first_scales + at.scales;
    p.first_bias = call.first_bias;
    p.second_bias = call.second_bias;
    const std::int64_t first = before * positions * shape.c;
    p.residual = call.residual ? static_cast<const float*>(call.residual) + first : nullptr;
    p.y = static_cast<float*>(call.y) + first;
    p.rows = static_cast<int>(images * positions);
    p.first_cut_off = kFirstCutOff;
    p.second_cut_off = kSecondCutOff;
    p.outer = call.outer;
    if (p.rows == 0) return;
    // As many positions a tile as fill it evenly.
    const int tiles = divided(p.rows, kPositions);
    p.tile_rows = divided(p.rows, tiles);
    const CUtensorMap map =
        map_of_rows<float>(static_cast<const float*>(call.x) + first, p.rows, shape.c, shape.c,
                           kPositions, CU_TENSOR_MAP_SWIZZLE_128B);
    with_block(shape.c, [&](auto block) {
      using At = decltype(block);
      p.rounds = rounds_of<At>(shape);
      launch("mlp_cluster_kernel", kernel_of<At>(), dim3(tiles, 1, At::kCluster), dim3(kThreads),
             At::kBytes, call.stream, At::kCluster, map, p);
    });
  });
}

}  // namespace cnn_engine::cuda::mlp_clusters
