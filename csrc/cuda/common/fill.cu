// fill on CUDA: one thread writes four neighbouring elements where the array starts at 16 bytes,
// else one.
#include "cuda/common/strided.cuh"
#include "ops/fill.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

__global__ void fill_kernel(float* output,  // [size]
                            std::int64_t size, float value, bool vectors) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t groups = vectors ? size / 4 : 0;
  for (std::int64_t i = grid_thread(); i < groups; i += threads) {
    reinterpret_cast<float4*>(output)[i] = make_float4(value, value, value, value);
  }
  for (std::int64_t i = groups * 4 + grid_thread(); i < size; i += threads) output[i] = value;
}

}  // namespace

void fill(float* output, std::int64_t size, float value, Stream stream) {
  if (size <= 0) return;
  const bool vectors = is_aligned(output, 16);
  const unsigned blocks = blocks_for(vectors ? size / 4 + size % 4 : size);
  fill_kernel<<<blocks, kBlockThreads, 0, stream>>>(output, size, value, vectors);
  CUDA_CHECK_LAUNCH("fill_kernel");
}

}  // namespace cnn_engine::cuda
