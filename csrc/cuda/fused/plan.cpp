#include "cuda/fused/plan.h"

#include <algorithm>
#include <cstdint>

#include "cuda/common/target.h"

namespace cnn_engine::cuda::fused {
namespace {

struct Launch {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute cluster = {};

  Launch(const RouteFacts& route, int blocks, int shared_bytes, Stream stream) {
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(route.threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(route.cluster), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = route.cluster > 1 ? 1 : 0;
  }
  Launch(const Launch&) = delete;
};

// A block gets more than 48 KB only when asked for.
void allow(const void* kernel, int bytes) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// What a kernel's code was compiled for, such as 90.
int architecture_of(const void* kernel) {
  cudaFuncAttributes attributes;
  CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  return attributes.ptxVersion;
}

}  // namespace

Plan::Plan(const Facts& facts, const Kernels& kernels, int device, int shared,
           DeviceWeights weights, const Parameters& parameters, bool exact_pixels)
    : facts_(facts),
      kernels_(kernels),
      multiprocessors_(target_of(device).multiprocessors),
      shared_(shared),
      exact_pixels_(exact_pixels),
      parameters_(parameters),
      weights_(std::move(weights)) {
  parameters_.weights = weights_.layers.as<const unsigned char>();
  parameters_.head = weights_.head.as<const float4>();
  parameters_.head_bias = weights_.head_bias.as<const float>();
  // On newer devices the driver may have made machine code from PTX for an older one, which has
  // neither its shared memory nor clusters.
  const int architecture =
      architecture_of(kernels_.of[few][1] ? kernels_.of[few][1] : kernels_.of[small][1]);
  shared_ = std::min(shared_, shared_of(architecture));
  if (architecture < 90) {
    for (RouteFacts& route : facts_.routes[very_few]) route.threads = 0;
  }
  for (int kind = 0; kind < kRouteKinds; ++kind) {
    for (int form = 0; form < kForms; ++form) {
      if (!fits(kind, form)) continue;
      const RouteFacts& route = facts_.routes[kind][form];
      allow(kernels_.of[kind][form], route.bytes);
      taken_ = std::max(taken_, route.timed_bytes);
    }
  }
  if (fits(very_few, 1)) clusters_ = std::min(most_at_once(0), most_at_once(1));
}

// The instrumented kernel's memory counts, so that both take the same route.
bool Plan::fits(int kind, int form) const {
  const RouteFacts& route = facts_.routes[kind][form];
  return route.threads > 0 && route.timed_bytes <= shared_;
}

// Clusters that fit on the device together: fewer than its multiprocessors suggest, since a cluster
// stays within one of the device's groups of them.
int Plan::most_at_once(int form) const {
  const RouteFacts& route = facts_.routes[very_few][form];
  const Launch launch(route, route.cluster, route.bytes, nullptr);
  int clusters = 0;
  CUDA_CHECK(
      cudaOccupancyMaxActiveClusters(&clusters, kernels_.of[very_few][form], &launch.config));
  return clusters;
}

void Plan::launch(const void* images, bool is_uint8, int n, float* output, const Kernels* timed,
                  unsigned long long* ticks, Stream stream) const {
  if (n == 0) return;
  TimedParameters p{parameters_, ticks};
  p.images = images;
  p.output = output;
  p.count = n;
  p.is_uint8 = is_uint8;
  const int item = is_uint8 ? 1 : sizeof(float), ahead = is_uint8 ? 8 : 16;
  p.ahead = reinterpret_cast<std::uintptr_t>(images) % ahead == 0 &&
            static_cast<std::int64_t>(facts_.image) * item % ahead == 0;
  const int form = is_uint8 && exact_pixels_ ? 0 : 1;
  RouteKind kind = fits(few, form) ? few : small;
  if (n <= clusters_) {
    kind = very_few;
  } else if (n > multiprocessors_ && (fits(many, form) || fits(middle, form))) {
    kind = fits(many, form) ? many : middle;
  }
  const RouteFacts& route = facts_.routes[kind][form];
  const int blocks = std::min(n, multiprocessors_ / route.cluster) * route.cluster;
  const void* kernel = kernels_.of[kind][form];
  int bytes = route.bytes;
  if (timed != nullptr) {
    kernel = timed->of[kind][form];
    bytes = route.timed_bytes;
    allow(kernel, bytes);
  }
  const Launch launch(route, blocks, bytes, stream);
  void* arguments[] = {&p};  // of which a plain kernel takes the first part
  CUDA_CHECK(cudaLaunchKernelExC(&launch.config, kernel, arguments));
}

}  // namespace cnn_engine::cuda::fused
