// normalize_rows on CUDA: rows that lanes can hold are read once (normalize_rows.cuh); of others,
// and of those whose statistics are asked for, a warp makes one, or a block a long one, in two
// walks over it: sums of doubles, then the elements.
#include "cuda/common/normalize_rows.cuh"
#include "cuda/common/strided.cuh"
#include "ops/normalize_rows.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

constexpr std::int64_t kLongRow = 1024;  // elements that are worth a block
constexpr std::int64_t kMostRowBlocks = 1 << 30;

// Sums of differences from the row's first element, and of their squares.
struct Sums {
  double first, second;
};

__device__ Sums sum_warp(Sums sums) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    sums.first += __shfl_xor_sync(kFullMask, sums.first, distance);
    sums.second += __shfl_xor_sync(kFullMask, sums.second, distance);
  }
  return sums;
}

// Threads `lane`, `lane` + `lanes`, ... make row `r`; sum_all adds up over all of them.
template <typename SumAll>
__device__ void normalize_row(const float* x, const float* scale, const float* shift, float* y,
                              float* mean, float* inverse, const NormalizeRowsShape& p,
                              std::int64_t r, int lane, int lanes, const Divisor& by_span,
                              const SumAll& sum_all) {
  const std::int64_t count = p.row();
  x += r * count;
  y += r * count;
  const float origin = p.centered ? x[0] : 0.0f;
  Sums sums{0.0, 0.0};
  for (std::int64_t i = lane; i < count; i += lanes) {
    const double difference = static_cast<double>(x[i]) - origin;
    sums.first += difference;
    sums.second += difference * difference;
  }
  sums = sum_all(sums);  // all threads have read x[0] before any writes y[0], should it be the same
  const double n = static_cast<double>(count);
  const double offset = p.centered ? sums.first / n : 0.0;
  // Rounding can leave a variance of 0 below it; NaN stays NaN.
  double variance = (sums.second - sums.first * offset) / n;
  if (variance < 0.0) variance = 0.0;
  const double factor = 1.0 / sqrt(variance + p.epsilon);
  if (lane == 0 && mean != nullptr) mean[r] = static_cast<float>(origin + offset);
  if (lane == 0 && inverse != nullptr) inverse[r] = static_cast<float>(factor);
  // x - mean without the rounding of a large mean: (x - origin) - (mean - origin).
  const float narrow_offset = static_cast<float>(offset);
  const float narrow_factor = static_cast<float>(factor);
  const std::int64_t channel = r % p.groups * p.channels;
  for (std::int64_t i = lane; i < count; i += lanes) {
    const std::int64_t c = channel + by_span.quotient(static_cast<unsigned>(i));
    const float value = ((x[i] - origin) - narrow_offset) * narrow_factor;
    y[i] = value * (scale != nullptr ? scale[c] : 1.0f) + (shift != nullptr ? shift[c] : 0.0f);
  }
}

__global__ void normalize_rows_warp_kernel(const float* x,  // [rows, channels, span]
                                           const float* scale, const float* shift,
                                           float* y,  // [rows, channels, span]; may be x
                                           float* mean, float* inverse, const NormalizeRowsShape p,
                                           const Divisor by_span) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * blockDim.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  for (std::int64_t r = grid_thread() / kWarpThreads; r < p.rows; r += warps) {
    normalize_row(x, scale, shift, y, mean, inverse, p, r, lane, kWarpThreads, by_span,
                  [](Sums sums) { return sum_warp(sums); });
  }
}

__global__ void normalize_rows_block_kernel(const float* x,  // [rows, channels, span]
                                            const float* scale, const float* shift,
                                            float* y,  // [rows, channels, span]; may be x
                                            float* mean, float* inverse, const NormalizeRowsShape p,
                                            const Divisor by_span) {
  wait_for_inputs();
  let_successors_start();
  constexpr int kWarps = kBlockThreads / kWarpThreads;
  __shared__ Sums parts[kWarps];
  for (std::int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    normalize_row(x, scale, shift, y, mean, inverse, p, r, threadIdx.x, kBlockThreads, by_span,
                  [&](Sums sums) {
                    sums = sum_warp(sums);
                    if (threadIdx.x % kWarpThreads == 0) parts[threadIdx.x / kWarpThreads] = sums;
                    __syncthreads();
                    Sums all{0.0, 0.0};
                    for (const Sums& part : parts) {
                      all.first += part.first;
                      all.second += part.second;
                    }
                    __syncthreads();  // before the next row's parts
                    return all;
                  });
  }
}

}  // namespace

void normalize_rows(const float* x, const float* scale, const float* shift, float* y, float* mean,
                    float* inverse, const NormalizeRowsShape& shape, Stream stream) {
  const NormalizeRowsShape& p = shape;
  if (p.rows * p.row() == 0) return;
  if (!is_narrow(p.row())) {
    throw std::invalid_argument("row: expected at most 2^31 - 1 elements, found " +
                                std::to_string(p.row()));
  }
  if (mean == nullptr && inverse == nullptr &&
      normalize_held_rows(x, scale, shift, y, p, Overflow{}, stream)) {
    return;
  }
  const Divisor by_span(p.span);
  if (p.row() >= kLongRow) {
    const unsigned blocks =
        static_cast<unsigned>(p.rows < kMostRowBlocks ? p.rows : kMostRowBlocks);
    launch("launch of normalize_rows_block_kernel", normalize_rows_block_kernel, blocks,
           kBlockThreads, 0, stream, 1, x, scale, shift, y, mean, inverse, p, by_span);
  } else {
    launch("launch of normalize_rows_warp_kernel", normalize_rows_warp_kernel,
           blocks_for(p.rows * kWarpThreads), kBlockThreads, 0, stream, 1, x, scale, shift, y, mean,
           inverse, p, by_span);
  }
}

}  // namespace cnn_engine::cuda
