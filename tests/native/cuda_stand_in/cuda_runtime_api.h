// Of CUDA's runtime what csrc/runtime/file_reader.cpp calls, with a thread for a stream and the
// host's memory for the device's: copies are late, as a GPU's are. For file_reader_test.cpp.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "cuda.h"
#include "runtime/stream.h"

#define CUDART_VERSION 12000

enum cudaError_t { cudaSuccess, cudaErrorNotReady = 600, cudaErrorIllegalAddress = 700 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice };
enum { cudaHostAllocPortable, cudaEventDisableTiming, cudaEventBlockingSync };
enum { cudaStreamNonBlocking };

struct CUstream_st {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queued;
  long put = 0, done = 0;
  bool stopping = false;
  std::thread thread{[this] { run(); }};

  ~CUstream_st() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stopping || !queued.empty(); });
      if (queued.empty()) return;
      const auto work = queued.front();
      queued.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      work();
      lock.lock();
      ++done;
      changed.notify_all();
    }
  }
};
using cudaStream_t = CUstream_st*;

struct CUevent_st {
  cudaStream_t stream = nullptr;
  long after = 0;  // so much of the stream's work
};
using cudaEvent_t = CUevent_st*;

// How many calls succeed until one fails; none does where it is negative.
inline std::atomic<int> calls_until_failure{-1};

inline cudaError_t result() {
  return calls_until_failure >= 0 && calls_until_failure-- == 0 ? cudaErrorIllegalAddress
                                                                : cudaSuccess;
}

inline cudaError_t cudaHostAlloc(void** to, std::size_t nbytes, unsigned) {
  const cudaError_t error = result();
  if (error == cudaSuccess) *to = std::malloc(nbytes);
  return error;
}
inline cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const cudaError_t error = result();
  if (error == cudaSuccess) *stream = new CUstream_st;
  return error;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const cudaError_t error = result();
  if (error == cudaSuccess) *event = new CUevent_st;
  return error;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t nbytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  const cudaError_t error = result();
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(stream->mutex);
  ++stream->put;
  stream->queued.push_back([=] { std::memcpy(to, from, nbytes); });
  stream->changed.notify_all();
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(stream->mutex);
  event->stream = stream;
  event->after = stream->put;
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(event->stream->mutex);
  return event->stream->done >= event->after ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::unique_lock<std::mutex> lock(event->stream->mutex);
  event->stream->changed.wait(lock, [&] { return event->stream->done >= event->after; });
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
// Any function that writes a context, or takes one: there is one context.
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    int, cudaDriverEntryPointQueryResult* found) {
  static char context;
  using Context = CUcontext;
  const auto write = [](Context* to) {
    *to = reinterpret_cast<Context>(&context);
    return CUDA_SUCCESS;
  };
  CUresult (*get)(Context*) = write;
  CUresult (*push)(Context) = [](Context) {
    return CUDA_SUCCESS;
  };
  CUresult (*retain)(Context*, CUdevice) = [](Context* to, CUdevice) {
    *to = reinterpret_cast<Context>(&context);
    return CUDA_SUCCESS;
  };
  CUresult (*of_stream)(CUstream, Context*) = [](CUstream, Context* to) {
    *to = reinterpret_cast<Context>(&context);
    return CUDA_SUCCESS;
  };
  const std::string called = name;
  *function = called == "cuCtxPushCurrent"           ? reinterpret_cast<void*>(push)
              : called == "cuDevicePrimaryCtxRetain" ? reinterpret_cast<void*>(retain)
              : called == "cuStreamGetCtx"           ? reinterpret_cast<void*>(of_stream)
                                                     : reinterpret_cast<void*>(get);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorIllegalAddress"; }
inline const char* cudaGetErrorString(cudaError_t) { return "made to fail"; }
