// linear on CUDA: one thread, or with `reduction` one warp, makes one output element.
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "ops/linear.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

__global__ void linear_kernel(const float* __restrict__ input,   // [N, F]
                              const float* __restrict__ weight,  // [M, F]
                              const float* __restrict__ bias,    // [M] or null
                              float* __restrict__ output,        // [N, M]
                              const LinearShape p) {
  const std::int64_t thread = grid_thread();
  if (thread >= p.output_size()) return;
  const unsigned index = static_cast<unsigned>(thread);
  const unsigned n = index / p.out_features;
  const unsigned m = index - n * p.out_features;
  const float* x = input + static_cast<std::int64_t>(n) * p.in_features;
  const float* w = weight + static_cast<std::int64_t>(m) * p.in_features;
  float sum = 0.0f;
  for (int f = 0; f < p.in_features;) {
    const int end = min(f + kPartOfSum, p.in_features);
    float part = 0.0f;
    for (; f < end; ++f) part += x[f] * w[f];
    sum += part;
  }
  output[index] = bias ? sum + bias[m] : sum;
}

__global__ void linear_warp_kernel(const float* __restrict__ input,   // [N, F]
                                   const float* __restrict__ weight,  // [M, F]
                                   const float* __restrict__ bias,    // [M] or null
                                   float* __restrict__ output,        // [N, M]
                                   const LinearShape p) {
  const std::int64_t warp = grid_thread() / kWarpThreads;
  if (warp >= p.output_size()) return;  // the whole warp leaves: the shuffles below stay complete
  const int lane = threadIdx.x % kWarpThreads;
  const unsigned index = static_cast<unsigned>(warp);
  const unsigned n = index / p.out_features;
  const unsigned m = index - n * p.out_features;
  const float* x = input + static_cast<std::int64_t>(n) * p.in_features;
  const float* w = weight + static_cast<std::int64_t>(m) * p.in_features;
  float sum = 0.0f;
  for (int f = lane; f < p.in_features; f += kWarpThreads) sum += x[f] * w[f];
  sum = warp_sum(sum);
  if (lane == 0) output[index] = bias ? sum + bias[m] : sum;
}

}  // namespace

void linear(const float* input, const float* weight, const float* bias, float* output,
            const LinearShape& shape, bool reduction, Stream stream) {
  for_each_part_of_batch(shape.n, shape.out_features, [&](std::int64_t first, int rows) {
    LinearShape part = shape;
    part.n = rows;
    const float* x = input + first * shape.in_features;
    float* y = output + first * shape.out_features;
    if (reduction) {
      const unsigned blocks = blocks_for(part.output_size() * kWarpThreads);
      linear_warp_kernel<<<blocks, kBlockThreads, 0, stream>>>(x, weight, bias, y, part);
      CUDA_CHECK_LAUNCH("linear_warp_kernel");
    } else {
      const unsigned blocks = blocks_for(part.output_size());
      linear_kernel<<<blocks, kBlockThreads, 0, stream>>>(x, weight, bias, y, part);
      CUDA_CHECK_LAUNCH("linear_kernel");
    }
  });
}

}  // namespace cnn_engine::cuda
