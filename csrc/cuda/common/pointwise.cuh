// The kernels of a tree of functions, for programs that are compiled at first use.
//
// A program (cnn_engine/kernels/cuda/pointwise.py writes it) defines a type of the tree,
//   struct Tree { template <int width> static __device__ void evaluate(const PointwiseCall&, ...);
//   };
// and CNN_ENGINE_POINTWISE(Tree), which makes the kernels that pointwise.cu launches.
#pragma once

#include "cuda/common/binary_functions.cuh"
#include "cuda/common/elements.cuh"
#include "cuda/common/unary.cuh"
#include "cuda/common/walk.cuh"
#include "cuda/common/warp.cuh"

namespace cnn_engine::cuda {

constexpr int kPointwiseTensors = 5;  // the result, and inputs

struct PointwiseCall {
  void* tensors[kPointwiseTensors];
  Walk<kPointwiseTensors> walk;  // over groups; strides are of groups' first elements
  Overflow overflow;
};

// The elements of a group; an operand whose last stride is 0 is repeated over it.
template <typename T, int width>
__device__ inline void read(const PointwiseCall& call, int tensor, std::int64_t at,
                            float (&to)[width]) {
  const T* const from = static_cast<const T*>(call.tensors[tensor]) + at;
  if (width == 1 || call.walk.strides[tensor][call.walk.rank - 1] != 0) {
    return load_neighbours<width>(from, to);
  }
  const float value = widened(*from);
#pragma unroll
  for (int i = 0; i < width; ++i) to[i] = value;
}

template <typename Tree, int width, typename Index>
__device__ inline void evaluate(const PointwiseCall& call) {
  let_successors_start();
  wait_for_inputs();
  const Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= call.walk.size) return;
  std::int64_t at[kPointwiseTensors];
  call.walk.position(i, at);
  Tree::template evaluate<width>(call, at);
}

#define CNN_ENGINE_POINTWISE(Tree)                                    \
  extern "C" __global__ void pointwise_fours(                         \
      const __grid_constant__ cnn_engine::cuda::PointwiseCall call) { \
    cnn_engine::cuda::evaluate<Tree, 4, unsigned>(call);              \
  }                                                                   \
  extern "C" __global__ void pointwise_ones(                          \
      const __grid_constant__ cnn_engine::cuda::PointwiseCall call) { \
    cnn_engine::cuda::evaluate<Tree, 1, unsigned>(call);              \
  }                                                                   \
  extern "C" __global__ void pointwise_many(                          \
      const __grid_constant__ cnn_engine::cuda::PointwiseCall call) { \
    cnn_engine::cuda::evaluate<Tree, 1, std::uint64_t>(call);         \
  }

}  // namespace cnn_engine::cuda
