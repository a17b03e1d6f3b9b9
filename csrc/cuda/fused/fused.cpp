// FusedNetwork: which compiled-in network a description is, its weights on a device, and its
// launches.
#include <stdexcept>
#include <vector>

#include "cuda/fused/plan.h"
#include "runtime/device.h"

namespace cnn_engine::cuda {
namespace {

using fused::Instantiation;

constexpr const Instantiation* kInstantiations[] = {&fused::kCifar10, &fused::kEce408};

// The network that a description is, or null.
const Instantiation* find(const NetworkDescription& description) {
  for (const Instantiation* candidate : kInstantiations) {
    if (candidate->difference(description).empty()) return candidate;
  }
  return nullptr;
}

const char* name_of(FusedDtype dtype) {
  switch (dtype) {
    case FusedDtype::float32:
      return "float32";
    case FusedDtype::tf32:
      return "tf32";
    case FusedDtype::float16:
      return "float16";
    case FusedDtype::bfloat16:
      return "bfloat16";
  }
  return "unknown";
}

int shared_memory(int device, int limit) {
  int bytes = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return limit < bytes ? limit : bytes;
}

std::string why_not_on(const Instantiation& candidate, FusedDtype dtype, int found) {
  const int needed = candidate.shared_bytes(dtype);
  if (needed <= found) return "";
  return std::string(candidate.name) + " in " + name_of(dtype) + ": expected a device with " +
         std::to_string(needed) + " bytes of shared memory a block, found " + std::to_string(found);
}

}  // namespace

struct FusedNetwork::State {
  const Instantiation* instantiation;
  int device;
  std::unique_ptr<fused::Plan> plan;
  std::vector<std::vector<int>> parts;

  void run(const void* images, bool is_uint8, int n, float* output, unsigned long long* ticks,
           Stream stream) const {
    require_at_least("batch", n, 0);
    const DeviceGuard guard(device);
    plan->launch(images, is_uint8, n, output, ticks, stream);
  }
};

FusedNetwork::FusedNetwork(const NetworkDescription& description, FusedDtype dtype, int device,
                           int shared_limit) {
  const std::string why = why_not(description, dtype, device, shared_limit);
  if (!why.empty()) throw std::invalid_argument("fused: " + why);
  for (std::size_t i = 0; i < description.layers.size(); ++i) {
    const LayerDescription& layer = description.layers[i];
    const bool weighted = layer.kind == LayerKind::conv2d || layer.kind == LayerKind::linear;
    if (weighted && layer.weight == nullptr) {
      throw std::invalid_argument("fused: layer " + std::to_string(i + 1) +
                                  ": expected weights, found none");
    }
  }
  const Instantiation* found = find(description);
  const DeviceGuard guard(device);
  state_ = std::make_unique<State>(
      State{found,
            device,
            found->make(description, dtype, device, shared_memory(device, shared_limit)),
            {}});
  int layer = 0;
  for (const int layers : found->parts()) {
    std::vector<int>& part = state_->parts.emplace_back();
    for (int i = 0; i < layers; ++i) part.push_back(layer++);
  }
}

FusedNetwork::~FusedNetwork() = default;
FusedNetwork::FusedNetwork(FusedNetwork&&) noexcept = default;
FusedNetwork& FusedNetwork::operator=(FusedNetwork&&) noexcept = default;

std::string FusedNetwork::why_not(const NetworkDescription& description, FusedDtype dtype,
                                  int device, int shared_limit) {
  const Instantiation* found = find(description);
  if (found != nullptr) return why_not_on(*found, dtype, shared_memory(device, shared_limit));
  std::string why;
  for (const Instantiation* candidate : kInstantiations) {
    why += (why.empty() ? "not " : "; not ") + std::string(candidate->name) + ": " +
           candidate->difference(description);
  }
  return why;
}

void FusedNetwork::run(const void* images, bool is_uint8, int n, float* output,
                       Stream stream) const {
  state_->run(images, is_uint8, n, output, nullptr, stream);
}

void FusedNetwork::run_timed(const void* images, bool is_uint8, int n, float* output, Stream stream,
                             unsigned long long* ticks) const {
  state_->run(images, is_uint8, n, output, ticks, stream);
}

int FusedNetwork::outputs() const { return state_->instantiation->outputs; }
const char* FusedNetwork::instantiation() const { return state_->instantiation->name; }
int FusedNetwork::shared_bytes() const { return state_->plan->shared_bytes(); }
const std::vector<std::vector<int>>& FusedNetwork::parts() const { return state_->parts; }

}  // namespace cnn_engine::cuda
