#include <algorithm>
#include <array>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cuda/common/launch.cuh"
#include "cuda/common/target.h"
#include "runtime/device.h"

namespace cnn_engine::cuda {
namespace {

constexpr std::size_t kMostDevices = 64;

// Shared memory of which a multiprocessor of 9.0 or 10.0 has room for one block alone.
constexpr int kMuchShared = 120 * 1024;

// Clusters of so many blocks, one to a multiprocessor, that the current device has room for.
int clusters_of(int blocks, int shared_bytes) {
  CUDA_CHECK(
      cudaFuncSetAttribute(any_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  return clusters_at_once(any_kernel, blocks, kBlockThreads, shared_bytes);
}

// Sets the largest cluster, and the groups of multiprocessors that clusters stay in, which no
// attribute says: of each size from 10 on, as many clusters find room as groups have so many. Of
// fewer, groups of 18 have room for two.
void find_groups(Target& target) {
  constexpr int kPortable = 8, kLeast = 10, kLargest = 16;
  target.largest_cluster = 1;
  if (!waits_in_kernels()) return;
  allow_large_clusters(any_kernel);
  const int bytes = std::min(kMuchShared, target.shared_per_block);
  const bool large = clusters_of(kLargest, bytes) > 0;
  target.largest_cluster = large ? kLargest : kPortable;
  if (!large || bytes < kMuchShared) return;
  int found = 0, left = target.multiprocessors;
  for (int size = kLargest; size >= kLeast; --size) {
    const int groups = std::min(clusters_of(size, bytes), Target::kMostGroups);
    for (; found < groups && left >= size; left -= size) target.groups[found++] = size;
  }
  // Larger groups than any cluster have the others, by twos.
  for (int i = 0; i < found && target.groups[i] >= kLargest; ++i) {
    const int more = std::min(2, left);
    target.groups[i] += more;
    left -= more;
  }
  if (left > 0 && found < Target::kMostGroups) target.groups[found] = left;
}

Target ask(int device) {
  const DeviceGuard guard(device);
  const auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
    return value;
  };
  Target target{};
  target.architecture = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                        attribute(cudaDevAttrComputeCapabilityMinor);
  target.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  target.shared_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  target.shared_per_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  find_groups(target);
  target.dependent_launch = waits_in_kernels();
  target.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  // Two transfers a clock; the clock in kHz, the bus in bits.
  target.memory_bandwidth =
      2e3 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
  target.clock = 1e3 * attribute(cudaDevAttrClockRate);
  return target;
}

}  // namespace

const Target& target_of(int device) {
  static std::array<Target, kMostDevices> targets;
  static std::array<std::once_flag, kMostDevices> asked;
  if (device < 0 || static_cast<std::size_t>(device) >= kMostDevices) {
    throw std::invalid_argument("device: expected 0 to " + std::to_string(kMostDevices - 1) +
                                ", found " + std::to_string(device));
  }
  std::call_once(asked[device], [device] { targets[device] = ask(device); });
  return targets[device];
}

const Target& target_here() { return target_of(current_device()); }

}  // namespace cnn_engine::cuda
