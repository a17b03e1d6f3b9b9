// How the layered kernels are laid over a grid: threads or warps, one after another over the
// outputs.
#pragma once

#include <cstdint>
#include <limits>

namespace cnn_engine::cuda {

constexpr int kBlockThreads = 256;
constexpr int kWarpThreads = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// Blocks of kBlockThreads for `threads` threads.
inline unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>((threads + kBlockThreads - 1) / kBlockThreads);
}

// Calls body(first image, images) for parts of a batch that have fewer than 2^31 outputs, so that
// kernels divide 32-bit numbers only (64-bit division is a subroutine on a GPU). The shapes keep
// one image's tensors below 2^31 elements.
template <typename Body>
void for_each_part_of_batch(int images, std::int64_t outputs_an_image, const Body& body) {
  constexpr std::int64_t kHighest = std::numeric_limits<std::int32_t>::max();
  const std::int64_t most = outputs_an_image > 0 ? kHighest / outputs_an_image : kHighest;
  for (std::int64_t first = 0; first < images; first += most) {
    const std::int64_t left = images - first;
    body(first, static_cast<int>(left < most ? left : most));
  }
}

// This thread's place in a one-dimensional grid.
__device__ inline std::int64_t grid_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

}  // namespace cnn_engine::cuda
