// FusedNetwork: which compiled-in network a description is, its weights on a device, and its
// launches.
//
// ece408's kernel ends with its convolutions; the linear layers after it are a tail that is run
// here and not by nodes of their own. A network in float16, bfloat16 or tf32 computes so inside its
// kernel alone: no layered kernel has those types, so an engine of that type would have none for
// the tail. And a network that is one call needs no memory between its layers for a whole batch:
// kTailImages at a time are enough.
#include <stdexcept>
#include <vector>

#include "cuda/fused/linear_tiled.cuh"
#include "cuda/fused/plan.h"
#include "cuda/timer.cuh"
#include "ops/elementwise.h"
#include "ops/linear.h"
#include "ops/softmax.h"
#include "runtime/device.h"

namespace cnn_engine::cuda {
namespace {

using fused::DeviceBuffer;
using fused::Instantiation;

constexpr const Instantiation* kInstantiations[] = {&fused::kCifar10, &fused::kEce408};

// A layer after the kernel, run by its layered operator.
struct TailLayer {
  LayerKind kind;
  int in_features, out_features;
  DeviceBuffer weight, bias;
  bool has_bias;
};

// The network that a description is, and how many of its layers the kernel runs; or null.
const Instantiation* find(const NetworkDescription& description, std::size_t& used) {
  for (const Instantiation* candidate : kInstantiations) {
    if (candidate->difference(description, used).empty()) return candidate;
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

// Times the steps of an instrumented run that goes on after its kernel, with the GPU's nanosecond
// timer, read by kernels of one thread between the steps.
struct StepClock {
  unsigned long long last;   // when the step before ended
  unsigned long long empty;  // what a step that does nothing would take
  // That the instrumented kernel adds to; 0 between runs.
  unsigned long long ticks[fused::kMostParts];
};

__global__ void start_steps_kernel(StepClock* clock) {
  const unsigned long long now = global_timer();
  clock->empty = now - clock->last;  // right the second time
  clock->last = now;
}

// Adds the picoseconds of the step that ends here to its part, or to its parts in proportion to
// their ticks.
__global__ void end_step_kernel(StepClock* clock, int parts, unsigned long long* to) {
  const unsigned long long now = global_timer(), passed = now - clock->last;
  clock->last = now;
  // The timer may tick seldom: a step takes some time, and over many runs the differences are
  // right.
  const unsigned long long taken = 1000 * (passed > clock->empty ? passed - clock->empty : 1);
  if (parts == 1) {
    *to += taken;
    return;
  }
  double all = 0;
  for (int part = 0; part < parts; ++part) all += clock->ticks[part];
  for (int part = 0; part < parts; ++part) {
    to[part] += static_cast<unsigned long long>(taken * (clock->ticks[part] / all));
    clock->ticks[part] = 0;
  }
}

}  // namespace

struct FusedNetwork::State {
  // Images between the kernel and the layered operators after it: enough to fill a large GPU.
  static constexpr int kTailImages = 8192;

  const Instantiation* instantiation = nullptr;
  int device = 0;
  int outputs = 0;
  std::unique_ptr<fused::Plan> plan;
  std::vector<TailLayer> tail;
  DeviceBuffer workspace[2];  // [kTailImages, widest], used in turn
  DeviceBuffer step_clock;    // StepClock, where there is a tail
  int kernel_parts = 0;
  std::vector<std::vector<int>> parts;

  void add_parts() {
    int layer = 0;
    const auto add = [&](int layers) {
      std::vector<int>& part = parts.emplace_back();
      for (int i = 0; i < layers; ++i) part.push_back(layer++);
    };
    for (const int layers : instantiation->parts()) add(layers);
    kernel_parts = static_cast<int>(parts.size());
    for (std::size_t i = 0; i < tail.size(); ++i) add(1);
  }

  void add_tail(const NetworkDescription& description, std::size_t first) {
    std::size_t widest = outputs;
    for (std::size_t i = first; i < description.layers.size(); ++i) {
      const LayerDescription& layer = description.layers[i];
      TailLayer& next = tail.emplace_back();
      next.kind = layer.kind;
      next.in_features = outputs;
      if (layer.kind == LayerKind::linear) {
        outputs = layer.out_channels;
        LinearShape{1, next.in_features, outputs}.validate();
        next.weight = DeviceBuffer(layer.weight, sizeof(float) * outputs * next.in_features);
        next.has_bias = layer.bias != nullptr;
        if (next.has_bias) next.bias = DeviceBuffer(layer.bias, sizeof(float) * outputs);
      }
      next.out_features = outputs;
      if (static_cast<std::size_t>(outputs) > widest) widest = outputs;
    }
    if (tail.empty()) return;
    for (DeviceBuffer& buffer : workspace)
      buffer = DeviceBuffer(sizeof(float) * widest * kTailImages);
    const StepClock zero = {};
    step_clock = DeviceBuffer(&zero, sizeof(zero));
  }

  void start_steps(Stream stream) const {
    for (int i = 0; i < 2; ++i) {
      start_steps_kernel<<<1, 1, 0, stream>>>(step_clock.as<StepClock>());
      CUDA_CHECK_LAUNCH("start_steps_kernel");
    }
  }
  void end_step(int parts, unsigned long long* to, Stream stream) const {
    end_step_kernel<<<1, 1, 0, stream>>>(step_clock.as<StepClock>(), parts, to);
    CUDA_CHECK_LAUNCH("end_step_kernel");
  }

  // `ticks`: of the tail's layers, or null.
  void run_tail(const float* input, int n, float* output, unsigned long long* ticks,
                Stream stream) const {
    int turn = 1;
    for (std::size_t i = 0; i < tail.size(); ++i, turn ^= 1) {
      const TailLayer& layer = tail[i];
      float* to = i + 1 == tail.size() ? output : workspace[turn].as<float>();
      const ElementwiseShape values{std::int64_t{n} * layer.in_features, 4};
      switch (layer.kind) {
        case LayerKind::linear: {
          const LinearShape shape{n, layer.in_features, layer.out_features};
          const float* bias = layer.has_bias ? layer.bias.as<float>() : nullptr;
          // A tile wants many rows and columns; a warp for each output does better with few.
          if (n >= fused::kLinearRows && layer.out_features >= fused::kLinearColumns) {
            fused::launch_linear_tiled(input, layer.weight.as<float>(), bias, to, shape, stream);
          } else {
            linear(input, layer.weight.as<float>(), bias, to, shape, true, stream);
          }
          break;
        }
        case LayerKind::relu:
          relu(input, to, values, stream);
          break;
        case LayerKind::tanh:
          tanh(input, to, values, stream);
          break;
        case LayerKind::softmax:
          softmax(input, to, SoftmaxShape{n, layer.in_features}, false, stream);
          break;
        case LayerKind::conv2d:
        case LayerKind::max_pool2d:
          throw std::logic_error("fused: a convolution after the kernel");
      }
      if (ticks != nullptr) end_step(1, ticks + i, stream);
      input = to;
    }
  }

  void run(const void* images, bool is_uint8, int n, float* output, unsigned long long* ticks,
           Stream stream) const {
    if (tail.empty()) return plan->launch(images, is_uint8, n, output, ticks, stream);
    const std::int64_t image_bytes =
        std::int64_t{instantiation->image_elements} * (is_uint8 ? 1 : 4);
    for (int first = 0; first < n; first += kTailImages) {
      const int count = n - first < kTailImages ? n - first : kTailImages;
      const void* from = static_cast<const unsigned char*>(images) + first * image_bytes;
      float* between = workspace[0].as<float>();
      float* to = output + std::int64_t{first} * outputs;
      if (ticks == nullptr) {
        plan->launch(from, is_uint8, count, between, nullptr, stream);
        run_tail(between, count, to, nullptr, stream);
      } else {
        start_steps(stream);
        plan->launch(from, is_uint8, count, between, step_clock.as<StepClock>()->ticks, stream);
        end_step(kernel_parts, ticks, stream);
        run_tail(between, count, to, ticks + kernel_parts, stream);
      }
    }
  }
};

FusedNetwork::FusedNetwork(const NetworkDescription& description, FusedDtype dtype, int device,
                           int shared_limit)
    : state_(std::make_unique<State>()) {
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
  std::size_t used = 0;
  state_->instantiation = find(description, used);
  const DeviceGuard guard(device);
  state_->device = device;
  state_->outputs = state_->instantiation->outputs;
  state_->plan =
      state_->instantiation->make(description, dtype, device, shared_memory(device, shared_limit));
  state_->add_tail(description, used);
  state_->add_parts();
}

FusedNetwork::~FusedNetwork() = default;
FusedNetwork::FusedNetwork(FusedNetwork&&) noexcept = default;
FusedNetwork& FusedNetwork::operator=(FusedNetwork&&) noexcept = default;

std::string FusedNetwork::why_not(const NetworkDescription& description, FusedDtype dtype,
                                  int device, int shared_limit) {
  std::size_t used = 0;
  const Instantiation* found = find(description, used);
  if (found != nullptr) return why_not_on(*found, dtype, shared_memory(device, shared_limit));
  std::string why;
  for (const Instantiation* candidate : kInstantiations) {
    why += (why.empty() ? "not " : "; not ") + std::string(candidate->name) + ": " +
           candidate->difference(description, used);
  }
  return why;
}

void FusedNetwork::run(const void* images, bool is_uint8, int n, float* output,
                       Stream stream) const {
  require_at_least("batch", n, 0);
  const DeviceGuard guard(state_->device);
  state_->run(images, is_uint8, n, output, nullptr, stream);
}

void FusedNetwork::run_timed(const void* images, bool is_uint8, int n, float* output, Stream stream,
                             unsigned long long* ticks) const {
  require_at_least("batch", n, 0);
  const DeviceGuard guard(state_->device);
  state_->run(images, is_uint8, n, output, ticks, stream);
}

int FusedNetwork::outputs() const { return state_->outputs; }
const char* FusedNetwork::instantiation() const { return state_->instantiation->name; }
int FusedNetwork::shared_bytes() const { return state_->plan->shared_bytes(); }
bool FusedNetwork::whole() const { return state_->tail.empty(); }
const std::vector<std::vector<int>>& FusedNetwork::parts() const { return state_->parts; }

}  // namespace cnn_engine::cuda
