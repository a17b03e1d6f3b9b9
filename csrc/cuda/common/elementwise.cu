// relu, tanh and normalize on CUDA: one thread makes one output element.
#include "cuda/common/launch.cuh"
#include "ops/elementwise.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

struct Relu {
  // Written so that a NaN, for which every comparison is false, passes through.
  __device__ float operator()(float x) const { return x < 0.0f ? 0.0f : x; }
};

struct Tanh {
  __device__ float operator()(float x) const { return tanhf(x); }
};

struct Normalize {
  float scale, offset;
  __device__ float operator()(std::uint8_t x) const { return x * scale + offset; }
};

template <typename Input, typename Function>
__global__ void elementwise_kernel(const Input* input,  // [size]; relu and tanh may work in place
                                   float* output,       // [size]
                                   std::int64_t size, Function function) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t index = grid_thread();
  if (index < size) output[index] = function(input[index]);
}

template <typename Input, typename Function>
void launch_elementwise(const Input* input, float* output, const ElementwiseShape& shape,
                        Function function, Stream stream) {
  if (shape.size == 0) return;
  launch("launch of elementwise_kernel", elementwise_kernel<Input, Function>,
         blocks_for(shape.size), kBlockThreads, 0, stream, 1, input, output, shape.size, function);
}

}  // namespace

void relu(const float* input, float* output, const ElementwiseShape& shape, Stream stream) {
  launch_elementwise(input, output, shape, Relu{}, stream);
}

void tanh(const float* input, float* output, const ElementwiseShape& shape, Stream stream) {
  launch_elementwise(input, output, shape, Tanh{}, stream);
}

void normalize(const std::uint8_t* input, float* output, const ElementwiseShape& shape, float scale,
               float offset, Stream stream) {
  launch_elementwise(input, output, shape, Normalize{scale, offset}, stream);
}

}  // namespace cnn_engine::cuda
