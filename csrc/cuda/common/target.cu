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
  target.largest_cluster = largest_cluster();
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
