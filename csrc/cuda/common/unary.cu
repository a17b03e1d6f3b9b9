// unary on CUDA: one thread makes four neighbouring elements where both arrays start at 16 bytes,
// else one.
#include "cuda/common/strided.cuh"
#include "cuda/common/unary.cuh"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

template <typename Function>
__global__ void unary_kernel(const float* input,  // [size]
                             float* output,       // [size]; may be the input
                             std::int64_t size, float a, float b, bool vectors) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t groups = vectors ? size / 4 : 0;
  for (std::int64_t i = grid_thread(); i < groups; i += threads) {
    float4 v = reinterpret_cast<const float4*>(input)[i];
    v.x = Function::of(v.x, a, b);
    v.y = Function::of(v.y, a, b);
    v.z = Function::of(v.z, a, b);
    v.w = Function::of(v.w, a, b);
    reinterpret_cast<float4*>(output)[i] = v;
  }
  for (std::int64_t i = groups * 4 + grid_thread(); i < size; i += threads) {
    output[i] = Function::of(input[i], a, b);
  }
}

template <typename Function>
void launch_unary(const float* input, float* output, std::int64_t size, float a, float b,
                  Stream stream) {
  const bool vectors = is_aligned(input, 16) && is_aligned(output, 16);
  const unsigned blocks = blocks_for(vectors ? size / 4 + size % 4 : size);
  launch("launch of unary_kernel", unary_kernel<Function>, blocks, kBlockThreads, 0, stream, 1,
         input, output, size, a, b, vectors);
}

}  // namespace

void unary(const float* input, float* output, std::int64_t size, UnaryFunction function,
           float alpha, float beta, Stream stream) {
  if (size <= 0) return;
  switch (function) {
#define CNN_ENGINE_LAUNCH(name) \
  case UnaryFunction::name:     \
    return launch_unary<unary_##name>(input, output, size, alpha, beta, stream);
    CNN_ENGINE_UNARY_FUNCTIONS(CNN_ENGINE_LAUNCH)
#undef CNN_ENGINE_LAUNCH
  }
}

}  // namespace cnn_engine::cuda
