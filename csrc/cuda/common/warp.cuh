// What all kernels know, those too that are compiled at first use: a warp, and how kernels follow
// on each other.
#pragma once

namespace cnn_engine::cuda {

constexpr int kWarpThreads = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// A value that a warp's threads share, so that the compiler keeps it once.
__device__ inline int same_in_warp(int value) { return __shfl_sync(kFullMask, value, 0); }

// Returns once all that the kernels before this one on the stream wrote can be seen.
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel on the stream may start once every block has called this, or ended.
__device__ inline void let_successors_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace cnn_engine::cuda
