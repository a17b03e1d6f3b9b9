// squeeze_excite on CUDA: a cluster of blocks makes an image, each block a share of the means, of
// the first layer's outputs and of the second's; what the others made it reads from their shared
// memory. Without clusters one block makes an image.
#include <cooperative_groups.h>

#include "cuda/activation.cuh"
#include "cuda/channels.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/row_weights.cuh"
#include "ops/squeeze_excite.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kParts = 8;  // blocks of a cluster
constexpr int kMostChannels = SqueezeExciteShape::kMostChannels;
constexpr int kMostHidden = SqueezeExciteShape::kMostHidden;

__device__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  if (gridDim.z > 1) return cooperative_groups::this_cluster().sync();
#endif
  __syncthreads();
}

// Copies values [share] of every block, side by side, to all [size].
__device__ void gather(float* own, float* all, int share, int size) {
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const float* from = own;
#if __CUDA_ARCH__ >= 900
    if (gridDim.z > 1) {
      from = cooperative_groups::this_cluster().map_shared_rank(own, i / share);
    }
#endif
    all[i] = from[i % share];
  }
  __syncthreads();
}

// A warp makes dot products of x [columns] in shared memory with rows of weights, and hands each to
// its first lane's `store(row, sum)`. Rows first, first + 1, ... below `end`, a warp each.
template <typename T, int width, typename Store>
__device__ void multiply_rows(const T* __restrict__ weights, const float* x, int columns, int first,
                              int end, const Store& store) {
  const int lane = threadIdx.x % kWarpThreads;
  for (int row = first + threadIdx.x / kWarpThreads; row < end; row += kWarps) {
    const T* from = weights + static_cast<std::int64_t>(row) * columns;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = lane * width; i < columns; i += kWarpThreads * width) {
      Weights<T, width> loaded;
      float w[width];
      loaded.load(from + i);
      loaded.unpack(w);
#pragma unroll
      for (int v = 0; v < width; ++v) sum = fmaf(x[i + v], w[v], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) store(row, sum);
  }
}

// Asks for rows first to end of weights, which then are in the second-level cache.
template <typename T>
__device__ void prefetch_rows(const T* weights, int columns, int first, int end) {
  const char* from = reinterpret_cast<const char*>(weights + std::int64_t{first} * columns);
  const std::int64_t bytes = static_cast<std::int64_t>(end - first) * columns * sizeof(T);
  for (std::int64_t at = threadIdx.x * 128; at < bytes; at += kThreads * 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
  }
}

template <typename T, int width>
__global__ void __launch_bounds__(kThreads)
    squeeze_excite_kernel(const float* input, const T* __restrict__ first,
                          const float* __restrict__ first_bias, const T* __restrict__ second,
                          const float* __restrict__ second_bias, float* output,
                          const __grid_constant__ SqueezeExciteShape p, const Activation first_end,
                          const Activation second_end, bool fours) {
  __shared__ double partial[kThreads][4];
  __shared__ float means[kMostChannels], all_means[kMostChannels];
  __shared__ float hidden[kMostHidden], all_hidden[kMostHidden];
  const int parts = gridDim.z, part = blockIdx.z, n = blockIdx.x;
  const int channel_share = (p.c + 4 * parts - 1) / (4 * parts) * 4;
  const int hidden_share = (p.s + parts - 1) / parts, output_share = (p.k + parts - 1) / parts;
  const int hidden_first = part * hidden_share, hidden_end = min(hidden_first + hidden_share, p.s);
  const int output_first = part * output_share, output_end = min(output_first + output_share, p.k);
  prefetch_rows(first, p.c, hidden_first, hidden_end);
  prefetch_rows(second, p.s, output_first, output_end);
  wait_for_inputs();
  let_successors_start();

  // Means: a thread adds up places of four channels; neighbours have neighbouring channels.
  const int channel_first = part * channel_share;
  const int places = p.h * p.w;
  const float* image = input + static_cast<std::int64_t>(n) * places * p.x_pitch;
  const int groups_left = (min(channel_first + channel_share, p.c) - channel_first + 3) / 4;
  for (int begin = 0; begin < groups_left; begin += kThreads) {
    const int groups = min(groups_left - begin, kThreads);
    const int lanes = kThreads / groups;
    const int group = static_cast<int>(threadIdx.x) % groups;
    const int lane = static_cast<int>(threadIdx.x) / groups;
    const int c = channel_first + (begin + group) * 4;
    double sum[4] = {};
    if (lane < lanes) {
      const float* from = image + c;
      if (fours) {
#pragma unroll 8
        for (int at = lane; at < places; at += lanes) {
          const auto x = Channels<4>::load(from + static_cast<std::int64_t>(at) * p.x_pitch);
#pragma unroll
          for (int v = 0; v < 4; ++v) sum[v] += x.value[v];
        }
      } else {
        for (int at = lane; at < places; at += lanes) {
          for (int v = 0; v < 4 && c + v < p.c; ++v) {
            sum[v] += from[static_cast<std::int64_t>(at) * p.x_pitch + v];
          }
        }
      }
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) partial[threadIdx.x][v] = sum[v];
    __syncthreads();
    for (int i = threadIdx.x; i < groups * 4; i += kThreads) {
      double total = 0.0;
      for (int l = 0; l < lanes; ++l) total += partial[l * groups + i / 4][i % 4];
      means[begin * 4 + i] = static_cast<float>(total / places);
    }
    __syncthreads();
  }
  wait_for_cluster();
  gather(means, all_means, channel_share, p.c);

  multiply_rows<T, width>(first, all_means, p.c, hidden_first, hidden_end, [&](int s, float sum) {
    hidden[s - hidden_first] = first_end(sum + (first_bias != nullptr ? first_bias[s] : 0.0f));
  });
  wait_for_cluster();
  gather(hidden, all_hidden, hidden_share, p.s);

  multiply_rows<T, width>(second, all_hidden, p.s, output_first, output_end, [&](int k, float sum) {
    output[static_cast<std::int64_t>(n) * p.k + k] =
        second_end(sum + (second_bias != nullptr ? second_bias[k] : 0.0f));
  });
  wait_for_cluster();  // no block ends before the others have read its shared memory
}

}  // namespace

void squeeze_excite(const float* input, const void* first, const float* first_bias,
                    const void* second, const float* second_bias, float* output,
                    const SqueezeExciteShape& shape, Conv2dOperands operands,
                    UnaryFunction first_function, float first_alpha, float first_beta,
                    UnaryFunction second_function, float second_alpha, float second_beta,
                    Stream stream) {
  if (shape.n == 0) return;
  const Activation first_end{first_function, first_alpha, first_beta};
  const Activation second_end{second_function, second_alpha, second_beta};
  const int parts = waits_in_kernels() ? kParts : 1;  // where there are clusters
  const bool fours = in_fours(input, shape.c, shape.x_pitch);
  with_row_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const bool wide = shape.c % kWidth == 0 && shape.s % kWidth == 0 && in_fours(first, 0, 0) &&
                      in_fours(second, 0, 0);
    launch("launch of squeeze_excite_kernel",
           wide ? squeeze_excite_kernel<T, kWidth> : squeeze_excite_kernel<T, 1>,
           dim3(shape.n, 1, parts), kThreads, 0, stream, parts, input, static_cast<const T*>(first),
           first_bias, static_cast<const T*>(second), second_bias, output, shape, first_end,
           second_end, fours);
  });
}

}  // namespace cnn_engine::cuda
