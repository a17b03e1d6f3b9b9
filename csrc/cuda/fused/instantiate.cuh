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
  static constexpr int kBytes = SharedLayout<Net, Parts, InputParts, R>::kBytes;
  // What a device must have for the kernel, which is the instrumented one's, so that both take the
  // same route.
  static constexpr int kSharedBytes = kTimedBytes<Net, Parts, InputParts, R>;
  static_assert(kSharedBytes <= kMostShared);

  // Once a device, before the first launch: a block gets more than 48 KB only when asked for.
  static void prepare() { allow(plain(), kBytes); }
  static void launch_fused_network(const Parameters& p, unsigned long long* ticks,
                                   int multiprocessors, Stream stream) {
    const int teams = multiprocessors / R::kCluster;
    const int blocks = (p.count < teams ? p.count : teams) * R::kCluster;
    if (ticks == nullptr) {
      const Launch launch(blocks, kBytes, stream);
      CUDA_CHECK(cudaLaunchKernelEx(&launch.config, plain(), p));
    } else {
      const auto timed = fused_network_kernel<Net, M, Parts, InputParts, R, true>;
      allow(timed, kSharedBytes);
      const Launch launch(blocks, kSharedBytes, stream);
      CUDA_CHECK(cudaLaunchKernelEx(&launch.config, timed, TimedParameters{p, ticks}));
    }
  }
  // What its code was compiled for, such as 90: on newer devices the driver may have made it from
  // PTX for an older one.
  static int architecture() {
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, plain()));
    return attributes.ptxVersion;
  }
  // Clusters that fit on the device together: fewer than its multiprocessors suggest, since a
  // cluster stays within one of the device's groups of them.
  static int most_at_once() {
    const Launch launch(R::kCluster, kBytes, nullptr);
    int clusters = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, plain(), &launch.config));
    return clusters;
  }

 private:
  static auto plain() { return &fused_network_kernel<Net, M, Parts, InputParts, R, false>; }
  template <class Function>
  static void allow(Function* kernel, int bytes) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  }

  struct Launch {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute cluster = {};

    Launch(int blocks, int shared_bytes, Stream stream) {
      config.gridDim = dim3(blocks);
      config.blockDim = dim3(R::kThreads);
      config.dynamicSmemBytes = shared_bytes;
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

// The most teams of a route whose block fits into `Bytes`.
template <class Net, int Parts, class R, int Bytes, int Groups = R::kGroups>
constexpr int teams_within() {
  if constexpr (Groups == 1) {
    return 1;
  } else {
    using Fewer = Route<R::kWarps, Groups, R::kPixelTiles>;
    if constexpr (Kernel<Net, Half, Parts, Parts, Fewer>::kSharedBytes <= Bytes)
      return Groups;
    else
      return teams_within<Net, Parts, R, Bytes, Groups - 1>();
  }
}

// Several routes, of which a device runs those that its shared memory holds. `Many` is the route of
// batches that fill the device, or `Middle`, its twin of fewer teams; `Few` that of an image a
// multiprocessor, or `Small`, the same with its weights in device memory; `VeryFew` that of an
// image a cluster of multiprocessors.
template <class Net, class M, int Parts, class Many, class Few, class VeryFew>
class NetworkPlan final : public Plan {
 public:
  // For pixels that 16 bits hold exactly (one part), and for any.
  template <class R>
  using One = Kernel<Net, M, Parts, 1, R>;
  template <class R>
  using Two = Kernel<Net, M, Parts, Parts, R>;
  using Middle =
      Route<Many::kWarps, teams_within<Net, Parts, Many, kMiddleShared>(), Many::kPixelTiles>;
  using Small = Route<Few::kWarps, Few::kGroups, Few::kPixelTiles, 1, false>;
  static constexpr bool kHasMiddle = Middle::kGroups > 1 && Middle::kGroups < Many::kGroups;
  static constexpr bool kHasSmall = Two<Few>::kSharedBytes > kLeastShared;
  static constexpr int kNeeded = kHasSmall ? Two<Small>::kSharedBytes : Two<Few>::kSharedBytes;
  static_assert(kNeeded <= kLeastShared);

  NetworkPlan(const NetworkDescription& description, int device, int shared)
      : multiprocessors_(device_attribute(cudaDevAttrMultiProcessorCount, device)),
        shared_(shared) {
    const Packed packed = Packer<Net, M, Parts>(description).take();
    exact_pixels_ = packed.exact_pixels;
    parameters_ = packed.parameters;
    weights_ = DeviceBuffer(packed.weights.data(), packed.weights.size());
    head_ = DeviceBuffer(packed.head.data(), packed.head.size() * sizeof(float));
    head_bias_ = DeviceBuffer(packed.head_bias.data(), packed.head_bias.size() * sizeof(float));
    parameters_.weights = weights_.as<const unsigned char>();
    parameters_.head = head_.as<const float4>();
    parameters_.head_bias = head_bias_.as<const float>();
    const int architecture = Two<Few>::architecture();
    shared_ = std::min(shared_, shared_of(architecture));
    prepare<Many>();
    prepare<Few>();
    if constexpr (kHasMiddle) prepare<Middle>();
    if constexpr (kHasSmall) prepare<Small>();
    if (architecture >= 90 && device_attribute(cudaDevAttrClusterLaunch, device) != 0 &&
        Two<VeryFew>::kSharedBytes <= shared_) {
      prepare<VeryFew>();
      clusters_ = std::min(One<VeryFew>::most_at_once(), Two<VeryFew>::most_at_once());
    }
  }

  void launch(const void* images, bool is_uint8, int n, float* output, unsigned long long* ticks,
              Stream stream) const override {
    if (n == 0) return;
    Parameters p = parameters_;
    p.images = images;
    p.output = output;
    p.count = n;
    p.is_uint8 = is_uint8;
    p.ahead = reinterpret_cast<std::uintptr_t>(images) % (is_uint8 ? 8 : 16) == 0;
    if (is_uint8 && exact_pixels_)
      launch_one_of<One>(p, ticks, stream);
    else
      launch_one_of<Two>(p, ticks, stream);
  }
  int shared_bytes() const override { return taken_; }

 private:
  template <class R>
  void prepare() {
    prepare_if_it_fits<One<R>>();
    prepare_if_it_fits<Two<R>>();
  }
  template <class K>
  void prepare_if_it_fits() {
    if (K::kSharedBytes > shared_) return;
    K::prepare();
    taken_ = std::max(taken_, K::kSharedBytes);
  }

  template <template <class> class Form>
  void launch_one_of(const Parameters& p, unsigned long long* ticks, Stream stream) const {
    const auto launch = [&](auto route) {
      using K = Form<decltype(route)>;
      if (K::kSharedBytes > shared_) return false;
      K::launch_fused_network(p, ticks, multiprocessors_, stream);
      return true;
    };
    if (p.count <= clusters_ && launch(VeryFew())) return;
    if (p.count > multiprocessors_) {
      if (launch(Many())) return;
      if constexpr (kHasMiddle) {
        if (launch(Middle())) return;
      }
    }
    if (launch(Few())) return;
    if constexpr (kHasSmall) launch(Small());
  }

  int multiprocessors_, shared_, taken_ = 0;
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
    return dtype == FusedDtype::float32 ? Float32::kNeeded : Float16::kNeeded;
  }
  static std::unique_ptr<Plan> make(const NetworkDescription& description, FusedDtype dtype,
                                    int device, int shared) {
    switch (dtype) {
      case FusedDtype::float32:
        return std::make_unique<Float32>(description, device, shared);
      case FusedDtype::tf32:  // its 11 significant bits are float16's
      case FusedDtype::float16:
        return std::make_unique<Float16>(description, device, shared);
      case FusedDtype::bfloat16:
        return std::make_unique<Bfloat16Plan>(description, device, shared);
    }
    throw std::invalid_argument("dtype: expected float32, tf32, float16 or bfloat16");
  }
  static constexpr Instantiation instantiation(const char* name) {
    static_assert(kKernelParts<Net> <= kMostParts);
    return {name, Net::kOutputs, &parts<Net>, &difference<Net>, &shared_bytes, &make};
  }
};

}  // namespace cnn_engine::cuda::fused
