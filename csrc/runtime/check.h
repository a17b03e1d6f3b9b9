// CUDA calls that fail throw, with the call, its position and the error's name in the message.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace cnn_engine::cuda {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void check(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // told here, and not once more by the next launch
  throw Error(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
              cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

}  // namespace cnn_engine::cuda

#define CUDA_CHECK(call) ::cnn_engine::cuda::check((call), #call, __FILE__, __LINE__)

// After a launch: cudaGetLastError also clears the error, so that it is reported once, where it
// arose.
#define CUDA_CHECK_LAUNCH(kernel) \
  ::cnn_engine::cuda::check(cudaGetLastError(), "launch of " kernel, __FILE__, __LINE__)
