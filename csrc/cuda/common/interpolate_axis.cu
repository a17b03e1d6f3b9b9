// interpolate_axis on CUDA: one thread makes one element.
#include "cuda/common/strided.cuh"
#include "ops/interpolate_axis.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

template <typename Index>
__global__ void interpolate_axis_kernel(const float* __restrict__ x,  // [outer, axis, inner]
                                        const std::int64_t* __restrict__ index,  // [length, taps]
                                        const float* __restrict__ weight,        // [length, taps]
                                        float* __restrict__ y,  // [outer, length, inner]
                                        const InterpolateShape p, const Walk<1> walk) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t thread = grid_thread(); thread < walk.size; thread += threads) {
    Index line;
    Index o;
    if constexpr (sizeof(Index) == 4) {
      line = walk.divisors[2].quotient(static_cast<Index>(thread));
      o = walk.divisors[1].quotient(line);
    } else {
      line = static_cast<Index>(thread) / static_cast<Index>(p.inner);
      o = line / static_cast<Index>(p.length);
    }
    const std::int64_t i = thread - static_cast<std::int64_t>(line) * p.inner;
    const std::int64_t j =
        static_cast<std::int64_t>(line) - static_cast<std::int64_t>(o) * p.length;
    const float* from = x + static_cast<std::int64_t>(o) * p.axis * p.inner + i;
    float sum = 0.0f;
    for (int t = 0; t < p.taps; ++t) {
      const float w = weight[j * p.taps + t];
      if (w != 0.0f) sum += w * from[index[j * p.taps + t] * p.inner];
    }
    y[thread] = sum;
  }
}

}  // namespace

void interpolate_axis(const float* x, const std::int64_t* index, const float* weight, float* y,
                      const InterpolateShape& shape, Stream stream) {
  Strided<1> output{};
  output.rank = 3;
  output.size = shape.outer * shape.length * shape.inner;
  if (output.size == 0) return;
  output.dims[0] = shape.outer;
  output.dims[1] = shape.length;
  output.dims[2] = shape.inner;
  with_index(output.size, [&](auto index_type) {
    interpolate_axis_kernel<decltype(index_type)>
        <<<blocks_for(output.size), kBlockThreads, 0, stream>>>(x, index, weight, y, shape,
                                                                Walk<1>(output));
  });
  CUDA_CHECK_LAUNCH("interpolate_axis_kernel");
}

}  // namespace cnn_engine::cuda
