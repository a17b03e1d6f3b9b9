// where on CUDA: one thread makes one element.
#include "cuda/common/strided.cuh"
#include "ops/where.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

template <typename Index>
__global__ void where_kernel(const std::uint8_t* condition, const float* x, const float* y,
                             float* out,  // may be x or y
                             const Walk<4> walk) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = grid_thread(); i < walk.size; i += threads) {
    std::int64_t at[4];
    walk.position(static_cast<Index>(i), at);
    out[at[0]] = condition[at[1]] ? x[at[2]] : y[at[3]];
  }
}

}  // namespace

void where(const std::uint8_t* condition, const float* x, const float* y, float* out,
           const WhereShape& shape, Stream stream) {
  std::int64_t strides[4][kMaxDims];
  row_major(shape.dims, strides[0]);
  for (int d = 0; d < kMaxDims; ++d) {
    strides[1][d] = shape.condition_strides[d];
    strides[2][d] = shape.x_strides[d];
    strides[3][d] = shape.y_strides[d];
  }
  const Strided<4> elements = collapse<4>(shape.dims, strides);
  if (elements.size == 0) return;
  const Walk<4> walk(elements);
  with_index(walk.size, [&](auto index) {
    where_kernel<decltype(index)>
        <<<blocks_for(walk.size), kBlockThreads, 0, stream>>>(condition, x, y, out, walk);
  });
  CUDA_CHECK_LAUNCH("where_kernel");
}

}  // namespace cnn_engine::cuda
