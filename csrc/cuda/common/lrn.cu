// lrn on CUDA: one thread makes one output element; neighbouring threads read neighbouring
// positions.
#include "cuda/common/launch.cuh"
#include "ops/lrn.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

__global__ void lrn_kernel(const float* __restrict__ input,  // [N, C, inner]
                           float* __restrict__ output,       // [N, C, inner]
                           const LrnShape p) {
  const std::int64_t thread = grid_thread();
  if (thread >= p.elements()) return;
  const unsigned index = static_cast<unsigned>(thread);
  const unsigned map = index / p.inner, n = map / p.c;
  const int channel = static_cast<int>(map - n * p.c);
  const float* at =
      input + (static_cast<std::int64_t>(index) - static_cast<std::int64_t>(channel) * p.inner);
  const int last = p.last(channel);
  float sum = 0.0f;
  for (int d = p.first(channel); d <= last; ++d) {
    const float x = at[static_cast<std::int64_t>(d) * p.inner];
    sum += x * x;
  }
  output[index] = input[index] / powf(p.k + p.alpha / static_cast<float>(p.size) * sum, p.beta);
}

}  // namespace

void lrn(const float* input, float* output, const LrnShape& shape, Stream stream) {
  const std::int64_t image = std::int64_t{shape.c} * shape.inner;
  if (image == 0) return;
  for_each_part_of_batch(shape.n, image, [&](std::int64_t first, int images) {
    LrnShape part = shape;
    part.n = images;
    lrn_kernel<<<blocks_for(part.elements()), kBlockThreads, 0, stream>>>(
        input + first * image, output + first * image, part);
    CUDA_CHECK_LAUNCH("lrn_kernel");
  });
}

}  // namespace cnn_engine::cuda
