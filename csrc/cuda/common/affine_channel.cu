// affine_channel on CUDA: one thread makes four neighbouring elements of a channel where its
// elements allow it, else one.
#include "cuda/common/strided.cuh"
#include "ops/affine_channel.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

// `inner` and `size` are in groups of `elements`.
template <int elements, typename Index>
__global__ void affine_channel_kernel(const float* x,       // may be y
                                      const float* center,  // [channels], or null
                                      const float* scale,   // [channels]
                                      const float* shift,   // [channels]
                                      float* y, const Walk<1> walk) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = grid_thread(); i < walk.size; i += threads) {
    Index row;
    Index o;
    const Index channels = static_cast<Index>(walk.dims[1]);
    if constexpr (sizeof(Index) == 4) {
      row = walk.divisors[2].quotient(static_cast<Index>(i));
      o = walk.divisors[1].quotient(row);
    } else {
      row = static_cast<Index>(i) / static_cast<Index>(walk.dims[2]);
      o = row / channels;
    }
    const Index c = row - o * channels;
    const float middle = center != nullptr ? center[c] : 0.0f;
    const float factor = scale[c];
    const float above = shift[c];
    if constexpr (elements == 4) {
      float4 v = reinterpret_cast<const float4*>(x)[i];
      v.x = (v.x - middle) * factor + above;
      v.y = (v.y - middle) * factor + above;
      v.z = (v.z - middle) * factor + above;
      v.w = (v.w - middle) * factor + above;
      reinterpret_cast<float4*>(y)[i] = v;
    } else {
      y[i] = (x[i] - middle) * factor + above;
    }
  }
}

}  // namespace

void affine_channel(const float* x, const float* center, const float* scale, const float* shift,
                    float* y, const ChannelShape& shape, Stream stream) {
  const bool fours = shape.inner % 4 == 0 && is_aligned(x, 16) && is_aligned(y, 16);
  Strided<1> groups{};
  groups.rank = 3;
  groups.dims[0] = shape.outer;
  groups.dims[1] = shape.channels;
  groups.dims[2] = fours ? shape.inner / 4 : shape.inner;
  groups.size = groups.dims[0] * groups.dims[1] * groups.dims[2];
  if (groups.size == 0) return;
  const unsigned blocks = blocks_for(groups.size);
  with_index(groups.size, [&](auto index) {
    using Index = decltype(index);
    launch("launch of affine_channel_kernel",
           fours ? affine_channel_kernel<4, Index> : affine_channel_kernel<1, Index>, blocks,
           kBlockThreads, 0, stream, 1, x, center, scale, shift, y, Walk<1>(groups));
  });
}

}  // namespace cnn_engine::cuda
