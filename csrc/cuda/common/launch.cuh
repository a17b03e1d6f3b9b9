// How the layered kernels are laid over a grid: threads or warps, one after another over the
// outputs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/common/target.h"
#include "cuda/common/warp.cuh"
#include "runtime/check.h"
#include "runtime/stream.h"

namespace cnn_engine::cuda {

constexpr int kBlockThreads = 256;

// Products that are summed apart: a float32 sum's error grows with its length, and that of rows as
// long as a VGG's 25,088 would otherwise be the network's.
constexpr int kPartOfSum = 256;

// Blocks of kBlockThreads for `threads` threads.
inline unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>((threads + kBlockThreads - 1) / kBlockThreads);
}

// Calls body(first image, images) for parts of a batch that have fewer than 2^31 outputs, so that
// kernels divide 32-bit numbers only (64-bit division is a subroutine on a GPU). The shapes keep
// one image's tensors below 2^31 elements; rows with others between them may be more.
template <typename Body>
void for_each_part_of_batch(int images, std::int64_t outputs_an_image, const Body& body) {
  constexpr std::int64_t kHighest = std::numeric_limits<std::int32_t>::max();
  if (images > 0 && outputs_an_image > kHighest) {
    throw std::invalid_argument("image: expected at most 2^31 - 1 elements, found " +
                                std::to_string(outputs_an_image));
  }
  const std::int64_t most = outputs_an_image > 0 ? kHighest / outputs_an_image : kHighest;
  for (std::int64_t first = 0; first < images; first += most) {
    const std::int64_t left = images - first;
    body(first, static_cast<int>(left < most ? left : most));
  }
}

namespace {  // in each file its own, since files are compiled for different devices

// Stands for all kernels of the file that includes this.
[[maybe_unused]] __global__ void any_kernel() {}

// What `find` returns on the current device, found out once: a number from 1 to 127.
class OfDevice {
 public:
  template <typename Find>
  int get(const Find& find) {
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    if (static_cast<std::size_t>(device) >= found_.size()) return find();
    signed char answer = found_[device].load(std::memory_order_relaxed);
    if (answer == 0) {
      answer = static_cast<signed char>(find());
      found_[device].store(answer, std::memory_order_relaxed);
    }
    return answer;
  }

 private:
  std::array<std::atomic<signed char>, 64> found_{};
};

// Whether this file's kernels may wait for their inputs by themselves on the current device, and be
// clusters. The device must have that, and so must their code: a device of 9.0 or later may run
// what its driver made from PTX for 8.0, where wait_for_inputs() is nothing.
[[maybe_unused]] bool waits_in_kernels() {
  constexpr int no = 1, yes = 2;
  static OfDevice devices;
  return devices.get([] {
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, any_kernel));
    return attributes.ptxVersion >= 90 ? yes : no;
  }) == yes;
}

// Has multiprocessors that run a kernel keep as much shared memory as there is. One that runs
// kernels with less has less of its memory as shared memory, and changes that only once it runs
// none: a kernel that has much could not start beside it.
template <typename Kernel>
void keep_most_shared(Kernel kernel) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared));
}

// Makes a kernel ready to have so many bytes of shared memory.
template <typename Kernel>
void make_ready(Kernel kernel, int bytes) {
  constexpr int kMuch = 32 * 1024;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (bytes > kMuch) keep_most_shared(kernel);
}

// Bytes of shared memory of which blocks that need `bytes` ask for, so that no more of them share a
// multiprocessor than all their number makes, or `least`. Most multiprocessors are still taken when
// a kernel starts early: its blocks would gather on those few that are free.
inline int spread_bytes(int bytes, std::int64_t blocks, const Target& target, int least = 1) {
  const std::int64_t together = (blocks + target.multiprocessors - 1) / target.multiprocessors;
  const std::int64_t all = target.shared_per_multiprocessor;
  const int more = static_cast<int>(all / (std::max<std::int64_t>(together, least) + 1));
  return std::max(bytes, more);
}

// Lets a kernel be launched as clusters of more than eight blocks.
template <typename Kernel>
void allow_large_clusters(Kernel kernel) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
}

// Launches `kernel` so that it may start while the kernel before it on the stream still runs
// (programmatic dependent launch, compute capability 9.0; before that in order). It must call
// wait_for_inputs() before it touches what another kernel of the pass does. `cluster` blocks along
// z are a cluster.
template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            unsigned shared_bytes, Stream stream, int cluster, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (waits_in_kernels()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {1, 1, static_cast<unsigned>(cluster)};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name, __FILE__,
        __LINE__);
}

// Clusters of so many blocks along z that a device has room for at once, of a kernel that is ready;
// 0 where it has none that large: more than eight need not be there.
template <typename... Parameters>
[[maybe_unused]] int clusters_at_once(void (*kernel)(Parameters...), int blocks, int threads,
                                      int shared_bytes) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, 1, static_cast<unsigned>(blocks)};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1, 1, blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  const cudaError_t found = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (found == cudaErrorInvalidClusterSize) {
    cudaGetLastError();  // reported here, and no more
    return 0;
  }
  CUDA_CHECK(found);
  return clusters;
}

}  // namespace

// This thread's position in a one-dimensional grid.
__device__ inline std::int64_t grid_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

}  // namespace cnn_engine::cuda
