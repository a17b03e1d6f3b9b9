// FusedNetwork: the kernels that run a description, compiled in or in a program that was compiled
// at first use, its weights on a device, and its launches.
#include <algorithm>
#include <array>
#include <stdexcept>
#include <vector>

#include "cuda/common/target.h"
#include "cuda/fused/library.h"
#include "runtime/device.h"

namespace cnn_engine::cuda {
namespace {

using fused::Instantiation;
using fused::NetworkShape;

// Those that are compiled in.
#ifdef CNN_ENGINE_FUSED_AT_FIRST_USE
constexpr std::array<const Instantiation*, 0> kInstantiations = {};
#else
constexpr std::array kInstantiations = {&fused::kCifar10, &fused::kEce408};
#endif

// The network that a chain is, or null; with a `program` that is not needed.
const Instantiation* find(const NetworkShape& network_shape, const std::string& program = "") {
  if (!program.empty()) return nullptr;
  for (const Instantiation* candidate : kInstantiations) {
    if (same(candidate->network_shape(), network_shape)) return candidate;
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

// The parts and the format of values (mma.cuh); tf32's 11 significant bits are float16's.
int parts_of(FusedDtype dtype) { return dtype == FusedDtype::float32 ? 2 : 1; }
const char* format_of(FusedDtype dtype) {
  return dtype == FusedDtype::bfloat16 ? "Bfloat16" : "Half";
}

int shared_memory(int device, int limit) {
  return std::min(limit, target_of(device).shared_per_block);
}

// Whether what is compiled in has machine code for the device, or what its driver makes some of.
bool is_compiled_for(const Instantiation& network, FusedDtype dtype, int device) {
  const DeviceGuard guard(device);
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, network.of(dtype).plain.of[fused::few][0]);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();  // it is not to be found by the next call that looks
    return false;
  }
  CUDA_CHECK(error);
  return true;
}

// `network` or its `program`, which may be null: then there is nothing to compare with yet.
std::string why_not_fits(const Instantiation* network, const fused::Library* program,
                         FusedDtype dtype, int shared) {
  if (network == nullptr && program == nullptr) return "";
  const int needed = network != nullptr ? network->of(dtype).facts.needed : program->facts().needed;
  if (needed <= shared) return "";
  return std::string(network != nullptr ? network->name : "the network") + " in " + name_of(dtype) +
         ": expected a device with " + std::to_string(needed) +
         " bytes of shared memory per block, found " + std::to_string(shared);
}

std::unique_ptr<fused::Library> load(const std::string& program) {
  return program.empty() ? nullptr : std::make_unique<fused::Library>(program);
}

// The weights of convolutions and of the fully connected layer, and the numbers of each array.
struct Weights {
  fused::Unpacked arrays = {};
  std::int64_t sizes[fused::kMostLayers + 1][2] = {};

  Weights(const NetworkDescription& description, const NetworkShape& network_shape) {
    arrays.scale = description.scale;
    arrays.offset = description.offset;
    std::size_t found = 0;
    for (std::size_t i = 0; i < description.layers.size(); ++i) {
      const LayerDescription& layer = description.layers[i];
      const bool conv = layer.kind == LayerKind::conv2d;
      if (!conv && layer.kind != LayerKind::linear) continue;
      if (layer.weight == nullptr) {
        throw std::invalid_argument("fused: layer " + std::to_string(i + 1) +
                                    ": expected weights, found none");
      }
      std::int64_t kernel_offsets = network_shape.features;  // of the fully connected layer
      if (conv) {
        const fused::LayerShape& l = network_shape.layers[found];
        kernel_offsets = std::int64_t{l.channels} * l.kernel * l.kernel;
      }
      arrays.layers[found] = {layer.weight, layer.bias};
      sizes[found][0] = layer.out_channels * kernel_offsets;
      sizes[found][1] = layer.out_channels;
      ++found;
    }
  }
};

std::unique_ptr<fused::Plan> pack_on_host(const fused::CompiledIn& network,
                                          const fused::Unpacked& weights, int device, int shared) {
  const fused::Facts& facts = network.facts;
  std::vector<unsigned char> packed(facts.weight_bytes);
  std::vector<float> head(facts.head_floats), head_bias(facts.classes);
  fused::Parameters parameters = {};
  bool exact_pixels = false;
  network.pack(weights, {packed.data(), head.data(), head_bias.data(), &parameters, &exact_pixels});
  return std::make_unique<fused::Plan>(
      facts, network.plain, device, shared,
      fused::DeviceWeights{fused::DeviceBuffer(packed.data(), packed.size()),
                           fused::DeviceBuffer(head.data(), head.size() * sizeof(float)),
                           fused::DeviceBuffer(head_bias.data(), head_bias.size() * sizeof(float))},
      parameters, exact_pixels);
}

}  // namespace

struct FusedNetwork::State {
  const Instantiation* instantiation;  // or null
  FusedDtype dtype;
  int device;
  std::unique_ptr<fused::Library> plain, timed;
  fused::Kernels timed_kernels;
  std::unique_ptr<fused::Plan> plan;
  std::vector<std::vector<int>> parts;

  void run(const void* images, bool is_uint8, int n, float* output, const fused::Kernels* kernels,
           unsigned long long* ticks, Stream stream) const {
    require_at_least("batch", n, 0);
    const DeviceGuard guard(device);
    plan->launch(images, is_uint8, n, output, kernels, ticks, stream);
  }
};

FusedNetwork::FusedNetwork(const NetworkDescription& description, FusedDtype dtype, int device,
                           int shared_limit, const std::string& program) {
  NetworkShape network_shape;
  std::vector<int> parts;
  std::string why = read(description, network_shape, parts);
  if (!why.empty()) throw std::invalid_argument("fused: " + why);
  const Instantiation* found = find(network_shape, program);
  const DeviceGuard guard(device);
  const int shared = shared_memory(device, shared_limit);
  std::unique_ptr<fused::Library> library = load(program);
  why = why_not_fits(found, library.get(), dtype, shared);
  if (!why.empty()) throw std::invalid_argument("fused: " + why);
  const Weights weights(description, network_shape);
  state_ = std::make_unique<State>(State{found, dtype, device, nullptr, nullptr, {}, nullptr, {}});
  if (found != nullptr) {
    const fused::CompiledIn network = found->of(dtype);
    state_->timed_kernels = network.timed;
    state_->plan = pack_on_host(network, weights.arrays, device, shared);
  } else {
    if (library == nullptr) {
      throw std::invalid_argument("fused: expected the compiled program of source(), found none");
    }
    state_->plain = std::move(library);
    state_->plan =
        state_->plain->plan(weights.arrays, weights.sizes, parts_of(dtype), device, shared);
  }
  int layer = 0;
  for (const int layers : parts) {
    std::vector<int>& part = state_->parts.emplace_back();
    for (int i = 0; i < layers; ++i) part.push_back(layer++);
  }
}

FusedNetwork::~FusedNetwork() {
  if (state_ == nullptr) return;
  try {  // memory and programs are of its device
    const DeviceGuard guard(state_->device);
    state_.reset();
  } catch (const std::exception&) {  // a destructor reports nothing
    state_.reset();
  }
}
FusedNetwork::FusedNetwork(FusedNetwork&&) noexcept = default;
FusedNetwork& FusedNetwork::operator=(FusedNetwork&&) noexcept = default;

std::string FusedNetwork::source(const NetworkDescription& description, FusedDtype dtype,
                                 int device) {
  NetworkShape network_shape;
  std::vector<int> parts;
  const std::string why = read(description, network_shape, parts);
  if (!why.empty()) throw std::invalid_argument("fused: " + why);
  const Instantiation* found = device == kNoDevice ? nullptr : find(network_shape);
  if (found != nullptr && is_compiled_for(*found, dtype, device)) return "";
  return source_of(network_shape, format_of(dtype), parts_of(dtype));
}

std::string FusedNetwork::why_not(const NetworkDescription& description, FusedDtype dtype,
                                  int device, int shared_limit, const std::string& program) {
  NetworkShape network_shape;
  std::vector<int> parts;
  const std::string why = read(description, network_shape, parts);
  if (!why.empty()) return why;
  const DeviceGuard guard(device);
  return why_not_fits(find(network_shape, program), load(program).get(), dtype,
                      shared_memory(device, shared_limit));
}

void FusedNetwork::run(const void* images, bool is_uint8, int n, float* output,
                       Stream stream) const {
  state_->run(images, is_uint8, n, output, nullptr, nullptr, stream);
}

bool FusedNetwork::is_instrumented() const {
  return state_->instantiation != nullptr || state_->timed != nullptr;
}

void FusedNetwork::instrument(const std::string& program) {
  if (is_instrumented()) return;
  const DeviceGuard guard(state_->device);
  auto timed = std::make_unique<fused::Library>(program);
  state_->timed_kernels = timed->kernels(parts_of(state_->dtype));
  state_->timed = std::move(timed);
}

void FusedNetwork::run_timed(const void* images, bool is_uint8, int n, float* output, Stream stream,
                             unsigned long long* ticks) const {
  if (!is_instrumented()) {
    throw std::invalid_argument("fused: expected instrument() before a timed run, found none");
  }
  state_->run(images, is_uint8, n, output, &state_->timed_kernels, ticks, stream);
}

int FusedNetwork::outputs() const { return state_->plan->outputs(); }
const char* FusedNetwork::instantiation() const {
  return state_->instantiation != nullptr ? state_->instantiation->name : "at first use";
}
int FusedNetwork::shared_bytes() const { return state_->plan->shared_bytes(); }
const std::vector<std::vector<int>>& FusedNetwork::parts() const { return state_->parts; }

}  // namespace cnn_engine::cuda
