// binary on CUDA: one thread makes four neighbouring elements where the operands' last strides are
// 0 or 1 and everything starts at 16 bytes, else one.
#include "cuda/common/binary.cuh"
#include "cuda/common/strided.cuh"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

// Four elements from `at`, or one that is repeated.
template <int elements>
__device__ void load(const float* from, bool repeated, float (&values)[elements]) {
  if constexpr (elements == 1) {
    values[0] = *from;
  } else if (repeated) {
    const float value = *from;
#pragma unroll
    for (int i = 0; i < elements; ++i) values[i] = value;
  } else {
    const float4 v = *reinterpret_cast<const float4*>(from);
    values[0] = v.x;
    values[1] = v.y;
    values[2] = v.z;
    values[3] = v.w;
  }
}

// `walk` is over groups of `elements`; its strides are of groups' first elements. out may be x or
// y.
template <typename Function, int elements, typename Index>
__global__ void binary_kernel(const float* x, const float* y, float* out, const Walk<3> walk) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const bool x_repeated = walk.rank == 0 || walk.strides[1][walk.rank - 1] == 0;
  const bool y_repeated = walk.rank == 0 || walk.strides[2][walk.rank - 1] == 0;
  for (std::int64_t i = grid_thread(); i < walk.size; i += threads) {
    std::int64_t at[3];
    walk.position(static_cast<Index>(i), at);
    float a[elements];
    float b[elements];
    load(x + at[1], x_repeated, a);
    load(y + at[2], y_repeated, b);
#pragma unroll
    for (int e = 0; e < elements; ++e) a[e] = Function::of(a[e], b[e]);
    if constexpr (elements == 4) {
      *reinterpret_cast<float4*>(out + at[0]) = make_float4(a[0], a[1], a[2], a[3]);
    } else {
      out[at[0]] = a[0];
    }
  }
}

template <typename Function>
void launch_binary(const float* x, const float* y, float* out, Strided<3> walk, Stream stream) {
  const bool fours = take_fours(walk, {is_aligned(out, 16), is_aligned(x, 16), is_aligned(y, 16)});
  with_index(walk.size, [&](auto index) {
    using Index = decltype(index);
    const unsigned blocks = blocks_for(walk.size);
    launch("launch of binary_kernel",
           fours ? binary_kernel<Function, 4, Index> : binary_kernel<Function, 1, Index>, blocks,
           kBlockThreads, 0, stream, 1, x, y, out, Walk<3>(walk));
  });
}

}  // namespace

void binary(const float* x, const float* y, float* out, const BinaryShape& shape,
            BinaryFunction function, Stream stream) {
  const Strided<3> walk = walk_of(shape);
  if (walk.size == 0) return;
  switch (function) {
#define CNN_ENGINE_LAUNCH(name) \
  case BinaryFunction::name:    \
    return launch_binary<binary_##name>(x, y, out, walk, stream);
    CNN_ENGINE_BINARY_FUNCTIONS(CNN_ENGINE_LAUNCH)
#undef CNN_ENGINE_LAUNCH
  }
}

}  // namespace cnn_engine::cuda
