// What fused.cpp knows of a network's kernels: how to launch them, and what packs the weights.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/fused/interface.h"
#include "cuda/fused/network_shape.h"
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

// A network's kernels, by RouteKind and form: what cudaLaunchKernelExC takes.
struct Kernels {
  const void* of[kRouteKinds][kForms] = {};
};

// A network's packed weights, in a device's memory.
struct DeviceWeights {
  DeviceBuffer layers, head, head_bias;
};

// A packed network on a device, and its launches.
class Plan {
 public:
  // `shared`: the shared memory that a block may take of the device's.
  Plan(const Facts& facts, const Kernels& kernels, int device, int shared, DeviceWeights weights,
       const Parameters& parameters, bool exact_pixels);

  // The kernel, or with `ticks` [parts] its instrumented form of `timed`, which adds to them.
  void launch(const void* images, bool is_uint8, int n, float* output, const Kernels* timed,
              unsigned long long* ticks, Stream stream) const;
  int outputs() const { return facts_.outputs; }
  // The most shared memory that a block of its kernels takes.
  int shared_bytes() const { return taken_; }

 private:
  bool fits(int kind, int form) const;
  int most_at_once(int form) const;

  Facts facts_;
  Kernels kernels_;
  int multiprocessors_, shared_, taken_ = 0;
  int clusters_ = 0;  // that run at once
  bool exact_pixels_;
  Parameters parameters_;
  DeviceWeights weights_;
};

// A network that is compiled in, in one data type.
struct CompiledIn {
  Facts facts;
  Kernels plain, timed;
  void (*pack)(const Unpacked& from, const Packed& to);  // on the host
};

struct Instantiation {
  const char* name;
  const NetworkShape& (*network_shape)();
  CompiledIn (*of)(FusedDtype dtype);
};

extern const Instantiation kCifar10;
extern const Instantiation kEce408;

}  // namespace cnn_engine::cuda::fused
