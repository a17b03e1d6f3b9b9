// linear_layers on CUDA: a cluster of blocks, or one block, makes a row.
//
// A block has some outputs of each layer, or, of layers of few weights, the first has all: what the
// blocks of a cluster send each other takes longer than those. Weights are packed [M, units of
// four], a row's features, then its bias, which is multiplied by one, then zeros. So a block's are
// one run, which is on its way to shared memory before the block waits for its row. Some lanes of a
// warp share an output: as many as keep the block busy.
//
// Shared memory: the weights of the block's outputs of all layers, then each layer's inputs, padded
// as the weights are, and the last one's outputs. Barriers: one for the weights, and one for what
// the cluster sends of each layer.
#include <algorithm>

#include "cuda/common/activation.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/sm80/cluster.cuh"
#include "cuda/sm80/mma.cuh"
#include "ops/linear_layers.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 256, kMostLaneBits = 5;
constexpr int kBlocks = 8;  // of a cluster, that every GPU with clusters has
constexpr int kUnit = 4;    // numbers of a load
// Weights that one block multiplies sooner than several would have sent each other the outputs.
constexpr int kAlone = 4 * 1024;
// What is worth it: rows, each of which has a cluster, and bytes of shared memory of a block.
constexpr int kMostRows = 32, kMostBytes = 112 * 1024;

int most_bytes(const Target& target) { return std::min(kMostBytes, target.shared_per_block); }

struct Layer {
  int outputs, own;      // own: of a block
  int units, lane_bits;  // of a row of weights; 2^lane_bits lanes have an output
  int blocks;            // that have outputs
  int packed, held;      // where its weights lie, in numbers: of all blocks, of a block's memory
  int values;            // where its inputs lie
  Activation activation;
};

struct Layers {
  Layer of[RowLayers::kMost];
  int count, blocks;
  int features;     // of a row
  int values, end;  // numbers of a block's memory: the last outputs' position, all
  bool softmax;

  __host__ __device__ int outputs() const { return of[count - 1].outputs; }
};

Layers plan(const RowLayers& from) {
  Layers p = {};
  p.count = from.count();
  p.features = from.first.in_features;
  p.softmax = from.softmax;
  p.blocks = 1;
  int packed = 0, held = 0;
  for (int i = 0; i < p.count; ++i) {
    const RowLayer& layer = from.layer(i);
    Layer& to = p.of[i];
    to.outputs = layer.out_features;
    to.activation = {layer.activation, layer.alpha, layer.beta};
    to.units = layer.in_features / kUnit + 1;
    to.blocks = std::int64_t{to.outputs} * to.units * kUnit <= kAlone ? 1 : kBlocks;
    to.own = (to.outputs + to.blocks - 1) / to.blocks;
    while (to.lane_bits < kMostLaneBits && to.own << (to.lane_bits + 1) <= kThreads &&
           2 << to.lane_bits <= to.units) {
      ++to.lane_bits;
    }
    // Of eight lanes, those of the next output read the next banks.
    const int lanes = 1 << to.lane_bits;
    while (lanes < 8 && to.units % (2 * lanes) != lanes) ++to.units;
    to.packed = packed;
    to.held = held;
    packed += to.outputs * to.units * kUnit;
    held += to.own * to.units * kUnit;
    p.blocks = std::max(p.blocks, to.blocks);
  }
  for (int i = 0; i < p.count; ++i) {
    p.of[i].values = held;
    held += p.of[i].units * kUnit;
  }
  p.values = held;
  p.end = held + p.outputs();
  return p;
}

__global__ void __launch_bounds__(kThreads)
    linear_layers_kernel(const float* input,                // [N, F]
                         const float* __restrict__ packed,  // [layer][M, units of four]
                         float* output,                     // [N, M]
                         const __grid_constant__ Layers p) {
  extern __shared__ __align__(16) float shared[];
  __shared__ std::uint64_t barriers[1 + RowLayers::kMost];
  let_successors_start();
  const int thread = threadIdx.x, rank = p.blocks > 1 ? static_cast<int>(cluster_rank()) : 0;
  const std::int64_t row = blockIdx.x;
  const auto barrier = [&](int i) {
    return shared_address(barriers + i);
  };
  const auto own_of = [&](const Layer& l) {  // outputs of this block
    return max(0, min(l.own, l.outputs - rank * l.own));
  };
  // Blocks that read what layer i makes; softmax is the first one's.
  const auto readers = [&](int i) {
    return i + 1 < p.count ? p.of[i + 1].blocks : 1;
  };
  const auto sends = [&](int i) {
    return (p.of[i].blocks > 1 || readers(i) > 1) && (i + 1 < p.count || p.softmax);
  };
  if (thread == 0) {
    int bytes = 0;
    for (int i = 0; i < p.count; ++i) {
      const Layer& l = p.of[i];
      bytes += own_of(l) * l.units * kUnit * 4;
      if (sends(i) && rank < readers(i)) {
        init_barrier(barrier(1 + i));
        expect_tx(barrier(1 + i), l.outputs * 4);
      }
    }
    init_barrier(barrier(0));
    expect_tx(barrier(0), bytes);
    for (int i = 0; i < p.count; ++i) {
      const Layer& l = p.of[i];
      const int numbers = own_of(l) * l.units * kUnit;
      if (numbers == 0) continue;
      copy_bulk(shared_address(shared + l.held), packed + l.packed + rank * l.own * l.units * kUnit,
                numbers * 4, barrier(0));
    }
  }
  for (int i = 0; i < p.count; ++i) {
    const Layer& l = p.of[i];
    const int features = i == 0 ? p.features : p.of[i - 1].outputs;
    for (int f = features + thread; f < l.units * kUnit; f += kThreads) {
      shared[l.values + f] = f == features ? 1.0f : 0.0f;
    }
  }
  if (p.blocks > 1) cluster_barrier();  // all blocks can be sent to
  wait_for_inputs();
  for (int f = thread; f < p.features; f += kThreads) {
    shared[p.of[0].values + f] = input[row * p.features + f];
  }
  __syncthreads();
  wait_first_phase(barrier(0));

  for (int i = 0; i < p.count; ++i) {
    const Layer& l = p.of[i];
    const bool last = i + 1 == p.count;
    const int own = own_of(l), lanes = 1 << l.lane_bits, lane = thread & (lanes - 1);
    const int first = rank * l.own, at_once = kThreads >> l.lane_bits;
    const auto* const values = reinterpret_cast<const float4*>(shared + l.values);
    float* const next = shared + (last ? p.values : p.of[i + 1].values);
    for (int begin = 0; begin < own; begin += at_once) {
      const int m = begin + (thread >> l.lane_bits);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (m < own) {
        const auto* const weights = reinterpret_cast<const float4*>(shared + l.held) + m * l.units;
#pragma unroll 4
        for (int u = lane; u < l.units; u += lanes) {
          const float4 w = weights[u], x = values[u];
          sum.x = fmaf(w.x, x.x, sum.x);
          sum.y = fmaf(w.y, x.y, sum.y);
          sum.z = fmaf(w.z, x.z, sum.z);
          sum.w = fmaf(w.w, x.w, sum.w);
        }
      }
      float total = (sum.x + sum.y) + (sum.z + sum.w);
#pragma unroll
      for (int bit = kMostLaneBits - 1; bit >= 0; --bit) {
        const float other = __shfl_xor_sync(kFullMask, total, 1 << bit);
        total += bit < l.lane_bits ? other : 0.0f;
      }
      if (m >= own) continue;
      const bool tanh = l.activation.function == UnaryFunction::tanh;  // without a call
      const float y = tanh ? tanhf(total) : apply(l.activation, total);
      if (last && !p.softmax) {
        if (lane == 0) output[row * l.outputs + first + m] = y;
      } else if (sends(i)) {
        for (int b = lane; b < readers(i); b += lanes) {
          store_cluster_async(cluster_address(shared_address(next + first + m), b),
                              cluster_address(barrier(1 + i), b), y);
        }
      } else if (lane == 0) {
        next[first + m] = y;
      }
    }
    if (last && !p.softmax) return;
    if (sends(i)) {
      if (rank < readers(i)) wait_for_cluster_bytes(barrier(1 + i));
    } else {
      __syncthreads();
    }
  }

  // Softmax, as the kernel of that name makes it.
  if (rank > 0 || thread >= kWarpThreads) return;
  const int classes = p.outputs();
  float* const x = shared + p.values;
  float largest = -INFINITY;
  for (int m = thread; m < classes; m += kWarpThreads) largest = fmaxf(largest, x[m]);
  largest = warp_max(largest);
  float sum = 0.0f;
  for (int m = thread; m < classes; m += kWarpThreads) {
    x[m] = expf(x[m] - largest);
    sum += x[m];
  }
  sum = warp_sum(sum);
  for (int m = thread; m < classes; m += kWarpThreads) output[row * classes + m] = x[m] / sum;
}

__global__ void linear_layers_pack_kernel(const float* __restrict__ weight,  // [M, F]
                                          const float* __restrict__ bias,    // [M] or null
                                          float* __restrict__ packed, int features, int padded,
                                          std::int64_t size) {
  const std::int64_t index = grid_thread();
  if (index >= size) return;
  const std::int64_t m = index / padded;
  const int f = static_cast<int>(index - m * padded);
  float value = 0.0f;
  if (f < features) value = weight[m * features + f];
  if (f == features && bias != nullptr) value = bias[m];
  packed[index] = value;
}

}  // namespace

std::int64_t linear_layers_takes(const RowLayers& layers, const Target& target) {
  std::int64_t numbers = 0;  // before plan() counts them in 32 bits
  for (int i = 0; i < layers.count(); ++i) {
    numbers += std::int64_t{layers.layer(i).out_features} + layers.layer(i).in_features;
  }
  return layers.n <= kMostRows && numbers <= kMostBytes / 4 &&
         plan(layers).end * 4 <= most_bytes(target);
}

std::int64_t linear_layers_packed(const RowLayers& layers, int) {
  const Layers p = plan(layers);
  std::int64_t size = 0;
  for (int i = 0; i < p.count; ++i) size += std::int64_t{p.of[i].outputs} * p.of[i].units * kUnit;
  return size * 4;
}

void linear_layers_pack(const float* weight, const float* bias, void* packed,
                        const RowLayers& layers, int layer, Stream stream) {
  const Layers p = plan(layers);
  if (layer < 0 || layer >= p.count) {
    throw std::invalid_argument("linear_layers_pack: expected a layer below " +
                                std::to_string(p.count) + ", found " + std::to_string(layer));
  }
  const Layer& l = p.of[layer];
  const std::int64_t size = std::int64_t{l.outputs} * l.units * kUnit;
  linear_layers_pack_kernel<<<blocks_for(size), kBlockThreads, 0, stream>>>(
      weight, bias, static_cast<float*>(packed) + l.packed, layers.layer(layer).in_features,
      l.units * kUnit, size);
  CUDA_CHECK_LAUNCH("linear_layers_pack_kernel");
}

void linear_layers(const float* input, const void* packed, float* output, const RowLayers& layers,
                   Stream stream) {
  if (layers.n == 0) return;
  const Layers p = plan(layers);
  const int bytes = p.end * 4, most = most_bytes(target_here());
  if (!waits_in_kernels() || bytes > most) {
    throw std::invalid_argument("linear_layers: expected what linear_layers_takes takes");
  }
  CUDA_CHECK(cudaFuncSetAttribute(linear_layers_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  most));
  launch("launch of linear_layers_kernel", linear_layers_kernel,
         dim3(static_cast<unsigned>(layers.n), 1, p.blocks), kThreads, bytes, stream, p.blocks,
         input, static_cast<const float*>(packed), output, p);
}

}  // namespace cnn_engine::cuda
