// A program of program.cuh that was compiled at run time, on a device.
#pragma once

#include <string>

#include "cuda/fused/plan.h"

namespace cnn_engine::cuda::fused {

class Library {
 public:
  // Loads machine code or PTX for the current device. Throws CudaError if it is none for it.
  explicit Library(const std::string& code);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const Facts& facts() const { return facts_; }
  // Of the routes that there are; a single form stands for both where values have one part.
  Kernels kernels(int parts) const;
  // Packs weights of host memory on the device, and makes a plan of them.
  std::unique_ptr<Plan> plan(const Unpacked& weights,
                             const std::int64_t (&sizes)[kMostLayers + 1][2], int parts, int device,
                             int shared) const;

 private:
  const void* kernel(const char* name) const;

  cudaLibrary_t library_ = nullptr;
  Facts facts_ = {};
};

}  // namespace cnn_engine::cuda::fused
