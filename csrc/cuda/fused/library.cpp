#include "cuda/fused/library.h"

namespace cnn_engine::cuda::fused {

Library::Library(const std::string& code) {
  CUDA_CHECK(cudaLibraryLoadData(&library_, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  try {
    void* facts = nullptr;
    std::size_t bytes = 0;
    CUDA_CHECK(cudaLibraryGetGlobal(&facts, &bytes, library_, "facts"));
    CUDA_CHECK(cudaMemcpy(&facts_, facts, sizeof(facts_), cudaMemcpyDeviceToHost));
  } catch (...) {
    cudaLibraryUnload(library_);
    throw;
  }
}

Library::~Library() { cudaLibraryUnload(library_); }

const void* Library::kernel(const char* name) const {
  cudaKernel_t found = nullptr;
  CUDA_CHECK(cudaLibraryGetKernel(&found, library_, name));
  return static_cast<const void*>(found);
}

Kernels Library::kernels(int parts) const {
  Kernels all;
  for (int kind = 0; kind < kRouteKinds; ++kind) {
    for (int form = 0; form < kForms; ++form) {
      if (facts_.routes[kind][form].threads == 0) continue;
      const int compiled = form < parts ? form : 0;
      all.of[kind][form] =
          kernel(("fused_" + std::to_string(kind) + "_" + std::to_string(compiled)).c_str());
    }
  }
  return all;
}

std::unique_ptr<Plan> Library::plan(const Unpacked& weights,
                                    const std::int64_t (&sizes)[kMostLayers + 1][2], int parts,
                                    int device, int shared) const {
  Unpacked there = weights;
  std::vector<DeviceBuffer> copies;
  for (int i = 0; i <= kMostLayers; ++i) {
    const auto copy = [&](const float*& array, std::int64_t size) {
      if (array == nullptr) return;
      copies.emplace_back(array, static_cast<std::size_t>(size) * sizeof(float));
      array = copies.back().as<const float>();
    };
    copy(there.layers[i].weight, sizes[i][0]);
    copy(there.layers[i].bias, sizes[i][1]);
  }
  struct Result {
    Parameters parameters;
    bool exact_pixels;
  } result = {};
  const auto zeros = [](std::size_t bytes) {
    DeviceBuffer made(bytes);
    if (bytes > 0) CUDA_CHECK(cudaMemset(made.as<void>(), 0, bytes));
    return made;
  };
  DeviceBuffer packed = zeros(facts_.weight_bytes);
  DeviceBuffer head = zeros(facts_.head_floats * sizeof(float));
  DeviceBuffer head_bias = zeros(facts_.classes * sizeof(float));
  const DeviceBuffer results = zeros(sizeof(Result));
  Result* const to = results.as<Result>();
  Packed out{packed.as<unsigned char>(), head.as<float>(), head_bias.as<float>(), &to->parameters,
             &to->exact_pixels};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  void* arguments[] = {&there, &out};
  CUDA_CHECK(cudaLaunchKernelExC(&config, kernel("pack"), arguments));
  CUDA_CHECK(cudaMemcpy(&result, to, sizeof(result), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
  return std::make_unique<Plan>(
      facts_, kernels(parts), device, shared,
      DeviceWeights{std::move(packed), std::move(head), std::move(head_bias)}, result.parameters,
      result.exact_pixels);
}

}  // namespace cnn_engine::cuda::fused
