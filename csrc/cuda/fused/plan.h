// What fused.cpp knows of a network that is compiled in: whether a description is it, and how to
// run it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/fused_cuda.h"
#include "runtime/check.h"

namespace cnn_engine::cuda::fused {

// Memory of the current device, freed with the object.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes) {
    if (bytes > 0) CUDA_CHECK(cudaMalloc(&data_, bytes));
  }
  // Holds a copy of host memory, complete on return: cudaMemcpy may return while the driver still
  // moves what it staged of pageable memory, and a stream that does not wait for the null stream
  // would read what was there before.
  DeviceBuffer(const void* from, std::size_t bytes) : DeviceBuffer(bytes) {
    if (bytes == 0) return;
    CUDA_CHECK(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) cudaFree(data_);  // a destructor reports nothing
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// A compiled-in network with its weights on a device.
class Plan {
 public:
  virtual ~Plan() = default;
  // The kernel, or with `ticks` [parts] its instrumented form, which adds to them.
  virtual void launch(const void* images, bool is_uint8, int n, float* output,
                      unsigned long long* ticks, Stream stream) const = 0;
  // The most shared memory that a block of its kernels takes.
  virtual int shared_bytes() const = 0;
};

constexpr int kMostParts = 8;  // of one kernel, that an instrumented run times

struct Instantiation {
  const char* name;
  int outputs;                  // an image
  std::vector<int> (*parts)();  // layers that each timed part of the kernel covers, in order
  // "" if the description is this network; else the first difference.
  std::string (*difference)(const NetworkDescription& description);
  // Shared memory that a block needs at least.
  int (*shared_bytes)(FusedDtype dtype);
  // `shared`: the shared memory that a block may take of the device's.
  std::unique_ptr<Plan> (*make)(const NetworkDescription& description, FusedDtype dtype, int device,
                                int shared);
};

extern const Instantiation kCifar10;
extern const Instantiation kEce408;

}  // namespace cnn_engine::cuda::fused
