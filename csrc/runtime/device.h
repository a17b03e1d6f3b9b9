// Which device work goes to. A kernel is launched on the current device and refused on another
// device's stream, so whatever launches first makes the stream's device current.
//
// That is done by the driver's stack of contexts, not by cudaSetDevice: to set the device back that
// was current before makes a context there, hundreds of megabytes on a GPU that nobody may use.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#include "runtime/check.h"
#include "runtime/stream.h"

namespace cnn_engine::cuda {

inline int current_device() {
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

// A function of the driver, which is not linked, as it is since a version of CUDA.
template <typename Function>
Function driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) {
    throw Error(std::string("expected a driver that has ") + name + ", found one without");
  }
  return reinterpret_cast<Function>(function);
}

// What the driver has of contexts; all older than any driver that runs these kernels.
struct Contexts {
  using Get = CUresult (*)(CUcontext*);

  Get current = driver_function<Get>("cuCtxGetCurrent", 4000);
  Get pop = driver_function<Get>("cuCtxPopCurrent", 4000);
  CUresult (*push)(CUcontext) = driver_function<CUresult (*)(CUcontext)>("cuCtxPushCurrent", 4000);
  CUresult (*of_stream)(CUstream, CUcontext*) =
      driver_function<CUresult (*)(CUstream, CUcontext*)>("cuStreamGetCtx", 9020);
  CUresult (*retain)(CUcontext*, CUdevice) =
      driver_function<CUresult (*)(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain", 7000);

  static const Contexts& all() {
    static const Contexts functions;
    return functions;
  }
  static void check(CUresult result, const char* name) {
    if (result != CUDA_SUCCESS) {
      throw Error(std::string(name) + ": CUDA error " + std::to_string(result));
    }
  }
};

// A device's primary context, the one that the runtime uses; made where there is none yet, and
// kept.
inline CUcontext context_of(int device) {
  static std::array<std::atomic<CUcontext>, 64> known{};
  const bool kept = device >= 0 && static_cast<std::size_t>(device) < known.size();
  CUcontext context = kept ? known[device].load(std::memory_order_acquire) : nullptr;
  if (context == nullptr) {
    Contexts::check(Contexts::all().retain(&context, device), "cuDevicePrimaryCtxRetain");
    if (kept) known[device].store(context, std::memory_order_release);
  }
  return context;
}

// The context of a stream; null for the null stream, which is the current device's, and for one
// that is being captured, which cannot be asked: there the caller makes the right one current.
inline CUcontext context_of(Stream stream) {
  CUcontext context = nullptr;
  if (stream == nullptr) return context;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusNone) return context;
  Contexts::check(Contexts::all().of_stream(stream, &context), "cuStreamGetCtx");
  return context;
}

// Makes a device current, and what was before it again at the end: nothing, where nothing was.
class DeviceGuard {
 public:
  explicit DeviceGuard(CUcontext context) {
    if (context == nullptr) return;
    CUcontext current = nullptr;
    Contexts::check(Contexts::all().current(&current), "cuCtxGetCurrent");
    if (current == context) return;
    Contexts::check(Contexts::all().push(context), "cuCtxPushCurrent");
    pushed_ = true;
  }
  explicit DeviceGuard(int device) : DeviceGuard(context_of(device)) {}
  explicit DeviceGuard(Stream stream) : DeviceGuard(context_of(stream)) {}
  ~DeviceGuard() {
    CUcontext popped;
    if (pushed_) Contexts::all().pop(&popped);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace cnn_engine::cuda
