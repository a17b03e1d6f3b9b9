// Which device work goes to. A kernel is launched on the current device and refused on another
// device's stream, so whatever launches first makes the stream's device current.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/check.h"
#include "runtime/stream.h"

namespace cnn_engine::cuda {

inline int current_device() {
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

// The device of a stream; the null stream is the current device's. Runtimes before 12.8 cannot say,
// nor can a stream that is being captured: there the caller makes the right one current.
inline int device_of(Stream stream) {
  int device = current_device();
#if CUDART_VERSION >= 12080
  if (stream == nullptr) return device;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  if (status == cudaStreamCaptureStatusNone) CUDA_CHECK(cudaStreamGetDevice(stream, &device));
#endif
  return device;
}

// Makes a device current, and the one before it again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : before_(current_device()), changed_(before_ != device) {
    if (changed_) CUDA_CHECK(cudaSetDevice(device));
  }
  explicit DeviceGuard(Stream stream) : DeviceGuard(device_of(stream)) {}
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_;
  bool changed_;
};

}  // namespace cnn_engine::cuda
