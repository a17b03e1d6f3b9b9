// Makes a compile-time network into an Instantiation: for each dtype its kernels, and which runs
// when.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "cuda/fused/match.cuh"
#include "cuda/fused/pack.cuh"
#include "cuda/fused/plan.h"

namespace cnn_engine::cuda::fused {

template <class Net, class M, int Parts, int InputParts, class R>
struct Kernel {
  using S = SharedLayout<Net, Parts, InputParts, R>;
  static constexpr int kSharedBytes = S::kBytes;

  // Once a device, before the first launch: a block gets more than 48 KB only when asked for.
  static void prepare() {
    CUDA_CHECK(cudaFuncSetAttribute(fused_network_kernel<Net, M, Parts, InputParts, R>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes));
  }
  static void launch_fused_network(const Parameters& p, int multiprocessors, Stream stream) {
    const int teams = multiprocessors / R::kCluster;
    Launch launch((p.count < teams ? p.count : teams) * R::kCluster, stream);
    CUDA_CHECK(
        cudaLaunchKernelEx(&launch.config, fused_network_kernel<Net, M, Parts, InputParts, R>, p));
  }
  // Clusters that fit on the device together: fewer than its multiprocessors suggest, since a
  // cluster stays within one of the device's groups of them.
  static int most_at_once() {
    const Launch launch(R::kCluster, nullptr);
    int clusters = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(
        &clusters, fused_network_kernel<Net, M, Parts, InputParts, R>, &launch.config));
    return clusters;
  }

 private:
  struct Launch {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute cluster = {};

    Launch(int blocks, Stream stream) {
      config.gridDim = dim3(blocks);
      config.blockDim = dim3(R::kThreads);
      config.dynamicSmemBytes = S::kBytes;
      config.stream = stream;
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {R::kCluster, 1, 1};
      config.attrs = &cluster;
      config.numAttrs = R::kCluster > 1 ? 1 : 0;
    }
    Launch(const Launch&) = delete;
  };
};

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// `Many` is the route of batches that fill the device, `Few` that of an image a multiprocessor,
// which also takes over where the device's shared memory is too small for the others, and `VeryFew`
// that of an image a cluster of multiprocessors.
template <class Net, class M, int Parts, class Many, class Few, class VeryFew>
class NetworkPlan final : public Plan {
 public:
  using ManyOne = Kernel<Net, M, Parts, 1, Many>;
  using FewOne = Kernel<Net, M, Parts, 1, Few>;
  using VeryFewOne = Kernel<Net, M, Parts, 1, VeryFew>;
  using ManyTwo = Kernel<Net, M, Parts, Parts, Many>;
  using FewTwo = Kernel<Net, M, Parts, Parts, Few>;
  using VeryFewTwo = Kernel<Net, M, Parts, Parts, VeryFew>;
  static constexpr int kLeastShared = FewTwo::kSharedBytes;

  NetworkPlan(const NetworkDescription& description, int device)
      : multiprocessors_(device_attribute(cudaDevAttrMultiProcessorCount, device)),
        shared_(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
    const Packed packed = Packer<Net, M, Parts>(description).take();
    exact_pixels_ = packed.exact_pixels;
    parameters_ = packed.parameters;
    weights_ = DeviceBuffer(packed.weights.data(), packed.weights.size());
    head_ = DeviceBuffer(packed.head.data(), packed.head.size() * sizeof(float));
    head_bias_ = DeviceBuffer(packed.head_bias.data(), packed.head_bias.size() * sizeof(float));
    parameters_.weights = weights_.as<const unsigned char>();
    parameters_.head = head_.as<const float4>();
    parameters_.head_bias = head_bias_.as<const float>();
    FewOne::prepare();
    FewTwo::prepare();
    if (ManyOne::kSharedBytes <= shared_) ManyOne::prepare();
    if (ManyTwo::kSharedBytes <= shared_) ManyTwo::prepare();
    if (device_attribute(cudaDevAttrClusterLaunch, device) != 0 &&
        VeryFewTwo::kSharedBytes <= shared_) {
      VeryFewOne::prepare();
      VeryFewTwo::prepare();
      clusters_ = std::min(VeryFewOne::most_at_once(), VeryFewTwo::most_at_once());
    }
  }

  void launch(const void* images, bool is_uint8, int n, float* output,
              Stream stream) const override {
    if (n == 0) return;
    Parameters p = parameters_;
    p.images = images;
    p.output = output;
    p.count = n;
    p.is_uint8 = is_uint8;
    p.ahead = reinterpret_cast<std::uintptr_t>(images) % (is_uint8 ? 8 : 16) == 0;
    if (is_uint8 && exact_pixels_)
      launch_one_of<ManyOne, FewOne, VeryFewOne>(p, stream);
    else
      launch_one_of<ManyTwo, FewTwo, VeryFewTwo>(p, stream);
  }

 private:
  template <class ManyKernel, class FewKernel, class VeryFewKernel>
  void launch_one_of(const Parameters& p, Stream stream) const {
    if (p.count <= clusters_) {
      VeryFewKernel::launch_fused_network(p, multiprocessors_, stream);
    } else if (p.count > multiprocessors_ && ManyKernel::kSharedBytes <= shared_) {
      ManyKernel::launch_fused_network(p, multiprocessors_, stream);
    } else {
      FewKernel::launch_fused_network(p, multiprocessors_, stream);
    }
  }

  int multiprocessors_, shared_;
  int clusters_ = 0;  // that run at once
  bool exact_pixels_ = false;
  Parameters parameters_ = {};
  DeviceBuffer weights_, head_, head_bias_;
};

// float32 has twice the weights and activations, and so room for fewer teams.
template <class Net, class Many16, class Many32, class Few, class VeryFew>
struct Instantiate {
  using Float32 = NetworkPlan<Net, Half, 2, Many32, Few, VeryFew>;
  using Float16 = NetworkPlan<Net, Half, 1, Many16, Few, VeryFew>;
  using Bfloat16Plan = NetworkPlan<Net, Bfloat16, 1, Many16, Few, VeryFew>;

  static int shared_bytes(FusedDtype dtype) {
    return dtype == FusedDtype::float32 ? Float32::kLeastShared : Float16::kLeastShared;
  }
  static std::unique_ptr<Plan> make(const NetworkDescription& description, FusedDtype dtype,
                                    int device) {
    switch (dtype) {
      case FusedDtype::float32:
        return std::make_unique<Float32>(description, device);
      case FusedDtype::tf32:  // its 11 significant bits are float16's
      case FusedDtype::float16:
        return std::make_unique<Float16>(description, device);
      case FusedDtype::bfloat16:
        return std::make_unique<Bfloat16Plan>(description, device);
    }
    throw std::invalid_argument("dtype: expected float32, tf32, float16 or bfloat16");
  }
  static constexpr Instantiation instantiation(const char* name) {
    return {name, Net::kChannels * Net::kPixels, Net::kOutputs, &difference<Net>, &shared_bytes,
            &make};
  }
};

}  // namespace cnn_engine::cuda::fused
