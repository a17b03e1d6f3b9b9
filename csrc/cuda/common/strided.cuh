// How CUDA kernels find their position among strided operands (ops/strided.h): one thread, one
// element or one group of elements side by side.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/walk.cuh"
#include "ops/strided.h"

namespace cnn_engine::cuda {

static_assert(kWalkDims == kMaxDims);

// Calls launch(Index{}) with the index type that `size` needs.
template <typename Launch>
void with_index(std::int64_t size, const Launch& launch) {
  if (is_narrow(size)) {
    launch(0u);
  } else {
    launch(std::uint64_t{0});
  }
}

inline bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

}  // namespace cnn_engine::cuda
