// What is captured into CUDA graphs, and how long it lives.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/check.h"
#include "runtime/stream.h"

namespace cnn_engine::cuda {

// The capture that a stream is part of, 0 where it is part of none, and its graph.
struct Capture {
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;

  explicit Capture(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long number = 0;
#if CUDART_VERSION >= 13000
    CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &number, &graph));
#else
    CUDA_CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, &number, &graph));
#endif
    if (status == cudaStreamCaptureStatusActive) {
      id = number;
    } else {
      graph = nullptr;
    }
  }
};

// Numbers that stand for what graphs use, once these graphs and all that was made of them are gone.
class Released {
 public:
  // Has the graph that a stream is captured into hold `number`.
  static void hold(Stream stream, std::uint64_t number) {
    const Capture capture(stream);
    if (capture.graph == nullptr) throw Error("expected a stream that is captured, found another");
    auto held = std::make_unique<std::uint64_t>(number);
    cudaUserObject_t object;
    CUDA_CHECK(
        cudaUserObjectCreate(&object, held.get(), &release, 1, cudaUserObjectNoDestructorSync));
    held.release();  // release() has it from now on
    const cudaError_t failed =
        cudaGraphRetainUserObject(capture.graph, object, 1, cudaGraphUserObjectMove);
    if (failed != cudaSuccess) cudaUserObjectRelease(object, 1);
    CUDA_CHECK(failed);
  }
  // Returns the numbers that no graph holds any more, each once.
  static std::vector<std::uint64_t> take() {
    Released& all = instance();
    const std::lock_guard<std::mutex> lock(all.mutex_);
    return std::exchange(all.numbers_, {});
  }

 private:
  // Called by a thread of the driver, which may call nothing of CUDA.
  static void CUDART_CB release(void* held) {
    const std::unique_ptr<std::uint64_t> number(static_cast<std::uint64_t*>(held));
    Released& all = instance();
    const std::lock_guard<std::mutex> lock(all.mutex_);
    all.numbers_.push_back(*number);
  }
  static Released& instance() {
    static Released* const all = new Released;  // that thread may outlive what is static
    return *all;
  }

  std::mutex mutex_;
  std::vector<std::uint64_t> numbers_;
};

}  // namespace cnn_engine::cuda
