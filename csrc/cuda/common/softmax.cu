// softmax on CUDA: one thread, or with `reduction` one warp, makes one row.
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "ops/softmax.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

// In both kernels a NaN is never the maximum; exp() carries it into the sum, and so into the whole
// row.

__global__ void softmax_kernel(const float* input,  // [N, M]
                               float* output,       // [N, M]; may be the input
                               const SoftmaxShape p) {
  const std::int64_t row = grid_thread();
  if (row >= p.n) return;
  const float* x = input + row * p.classes;
  float* y = output + row * p.classes;
  float largest = -INFINITY;
  for (int m = 0; m < p.classes; ++m) largest = fmaxf(largest, x[m]);
  float sum = 0.0f;
  for (int m = 0; m < p.classes; ++m) {
    const float value = expf(x[m] - largest);
    y[m] = value;
    sum += value;
  }
  for (int m = 0; m < p.classes; ++m) y[m] /= sum;
}

__global__ void softmax_warp_kernel(const float* input,  // [N, M]
                                    float* output,       // [N, M]; may be the input
                                    const SoftmaxShape p) {
  const std::int64_t row = grid_thread() / kWarpThreads;
  if (row >= p.n) return;  // the whole warp leaves: the shuffles below stay complete
  const int lane = threadIdx.x % kWarpThreads;
  const float* x = input + row * p.classes;
  float* y = output + row * p.classes;
  float largest = -INFINITY;
  for (int m = lane; m < p.classes; m += kWarpThreads) largest = fmaxf(largest, x[m]);
  largest = warp_max(largest);
  float sum = 0.0f;
  for (int m = lane; m < p.classes; m += kWarpThreads) {
    const float value = expf(x[m] - largest);
    y[m] = value;
    sum += value;
  }
  sum = warp_sum(sum);
  for (int m = lane; m < p.classes; m += kWarpThreads) y[m] /= sum;
}

}  // namespace

void softmax(const float* input, float* output, const SoftmaxShape& shape, bool reduction,
             Stream stream) {
  if (shape.n == 0) return;
  if (reduction) {
    const unsigned blocks = blocks_for(std::int64_t{shape.n} * kWarpThreads);
    softmax_warp_kernel<<<blocks, kBlockThreads, 0, stream>>>(input, output, shape);
    CUDA_CHECK_LAUNCH("softmax_warp_kernel");
  } else {
    softmax_kernel<<<blocks_for(shape.n), kBlockThreads, 0, stream>>>(input, output, shape);
    CUDA_CHECK_LAUNCH("softmax_kernel");
  }
}

}  // namespace cnn_engine::cuda
