// softmax_axis on CUDA: where the axis is the last dimension a warp makes a line, or a block a long
// one; else a thread makes a column. A NaN is never the largest; exp() carries it into the sum, and
// so into the whole line.
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "ops/softmax_axis.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

constexpr std::int64_t kLongLine = 2048;  // elements that are worth a block
constexpr std::int64_t kMostBlocks = 1 << 30;

__device__ double warp_sum(double value) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  return value;
}

// What an element becomes: `largest` and `sum` are its line's; the logarithm of the sum with
// `logarithm`, else its reciprocal.
__device__ float softmax_element(float x, float largest, float sum, bool logarithm) {
  const float below = x - largest;
  return logarithm ? below - sum : expf(below) * sum;
}

__device__ float line_factor(double sum, bool logarithm) {
  return static_cast<float>(logarithm ? log(sum) : 1.0 / sum);
}

// Threads `first`, `first` + `step`, ... of a line make its elements, with sums over all of them by
// the functions given.
template <typename Max, typename Total>
__device__ void softmax_line(const float* x, float* y, std::int64_t axis, std::int64_t stride,
                             int first, int step, bool logarithm, const Max& max_of_all,
                             const Total& sum_of_all) {
  float largest = -INFINITY;
  for (std::int64_t a = first; a < axis; a += step) largest = fmaxf(largest, x[a * stride]);
  largest = max_of_all(largest);
  double sum = 0.0;
  for (std::int64_t a = first; a < axis; a += step) sum += expf(x[a * stride] - largest);
  const float factor = line_factor(sum_of_all(sum), logarithm);
  for (std::int64_t a = first; a < axis; a += step) {
    y[a * stride] = softmax_element(x[a * stride], largest, factor, logarithm);
  }
}

__global__ void softmax_axis_warp_kernel(const float* x,  // [outer, axis]
                                         float* y,        // [outer, axis]; may be x
                                         const AxisShape p, bool logarithm) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * blockDim.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  for (std::int64_t o = grid_thread() / kWarpThreads; o < p.outer; o += warps) {
    softmax_line(
        x + o * p.axis, y + o * p.axis, p.axis, 1, lane, kWarpThreads, logarithm,
        [](float value) { return warp_max(value); }, [](double value) { return warp_sum(value); });
  }
}

// Joins the results of a block's warps, in their order; every thread gets the result.
template <typename Value, typename Join>
__device__ Value join_block(Value value, Value* shared, const Join& join) {
  const int warp = threadIdx.x / kWarpThreads;
  if (threadIdx.x % kWarpThreads == 0) shared[warp] = value;
  __syncthreads();
  value = shared[0];
  for (int w = 1; w < kBlockThreads / kWarpThreads; ++w) value = join(value, shared[w]);
  __syncthreads();  // before the next use of `shared`
  return value;
}

__global__ void softmax_axis_block_kernel(const float* x,  // [outer, axis]
                                          float* y,        // [outer, axis]; may be x
                                          const AxisShape p, bool logarithm) {
  wait_for_inputs();
  let_successors_start();
  __shared__ float maxima[kBlockThreads / kWarpThreads];
  __shared__ double sums[kBlockThreads / kWarpThreads];
  for (std::int64_t o = blockIdx.x; o < p.outer; o += gridDim.x) {
    softmax_line(
        x + o * p.axis, y + o * p.axis, p.axis, 1, threadIdx.x, kBlockThreads, logarithm,
        [&](float value) {
          return join_block(warp_max(value), maxima, [](float a, float b) { return fmaxf(a, b); });
        },
        [&](double value) {
          return join_block(warp_sum(value), sums, [](double a, double b) { return a + b; });
        });
  }
}

__global__ void softmax_axis_column_kernel(const float* x,  // [outer, axis, inner]
                                           float* y,        // [outer, axis, inner]; may be x
                                           const AxisShape p, bool logarithm) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = grid_thread(); i < p.outer * p.inner; i += threads) {
    const std::int64_t o = i / p.inner;
    const std::int64_t at = o * p.axis * p.inner + (i - o * p.inner);
    softmax_line(
        x + at, y + at, p.axis, p.inner, 0, 1, logarithm, [](float value) { return value; },
        [](double value) { return value; });
  }
}

}  // namespace

void softmax_axis(const float* x, float* y, const AxisShape& shape, bool logarithm, Stream stream) {
  const AxisShape& p = shape;
  if (p.outer * p.axis * p.inner == 0) return;
  if (p.inner > 1) {
    launch("launch of softmax_axis_column_kernel", softmax_axis_column_kernel,
           blocks_for(p.outer * p.inner), kBlockThreads, 0, stream, 1, x, y, p, logarithm);
  } else if (p.axis >= kLongLine) {
    const unsigned blocks = static_cast<unsigned>(p.outer < kMostBlocks ? p.outer : kMostBlocks);
    launch("launch of softmax_axis_block_kernel", softmax_axis_block_kernel, blocks, kBlockThreads,
           0, stream, 1, x, y, p, logarithm);
  } else {
    launch("launch of softmax_axis_warp_kernel", softmax_axis_warp_kernel,
           blocks_for(p.outer * kWarpThreads), kBlockThreads, 0, stream, 1, x, y, p, logarithm);
  }
}

}  // namespace cnn_engine::cuda
