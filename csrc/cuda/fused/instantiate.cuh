// Makes a compile-time network into an Instantiation: for each dtype its kernels, and which runs
// when.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "cuda/fused/pack.cuh"
#include "cuda/fused/plan.h"
#include "cuda/fused/program.cuh"

namespace cnn_engine::cuda::fused {

template <class Net, class M, int Parts, int InputParts, class R, bool Timed>
__global__ void __launch_bounds__(R::kThreads, 1) fused_network_kernel(
    const __grid_constant__ std::conditional_t<Timed, TimedParameters, Parameters> p) {
  run_network<Net, M, Parts, InputParts, R, Timed>(p);
}

template <class Net, int I = 0>
void add_layers(NetworkShape& network_shape) {
  using G = typename Net::template Layer<I>;
  const LayerKind activation = G::kActivation == Activation::tanh   ? LayerKind::tanh
                               : G::kActivation == Activation::relu ? LayerKind::relu
                                                                    : LayerKind::conv2d;
  network_shape.layers.push_back(
      {G::kChannels, G::kFilters, G::kKernel, G::kPad, G::kStride, activation, G::kPool});
  if constexpr (I + 1 < Net::kLayers) add_layers<Net, I + 1>(network_shape);
}

// `Many`, `Few` and `VeryFew` are measured choices; `Middle` has the teams that fit where there is
// less shared memory, and `Small` no weights in it.
template <class Net, class M, int Parts, class Many, class Few, class VeryFew>
struct Compiled {
  static constexpr int kMiddleTeams = teams_within<Net, Parts, Many, kMiddleShared>();
  using Middle = std::conditional_t<(kMiddleTeams > 1 && kMiddleTeams < Many::kGroups),
                                    Route<Many::kWarps, kMiddleTeams, Many::kPixelTiles>, NoRoute>;
  using Smaller = Route<Few::kWarps, Few::kGroups, Few::kPixelTiles, 1, false>;
  static constexpr bool kHasSmall = kTimedBytes<Net, Parts, Parts, Few> > kLeastShared;
  using Small = std::conditional_t<kHasSmall, Smaller, NoRoute>;
  using Table = Routes<Many, Middle, Few, Small, VeryFew>;
  static constexpr int kNeeded =
      kTimedBytes<Net, Parts, Parts, std::conditional_t<kHasSmall, Smaller, Few>>;
  static constexpr Facts kFacts = facts_of<Net, Parts, Table>(kNeeded);
  static_assert(kNeeded <= kLeastShared);
  static_assert(kFacts.routes[many][1].timed_bytes <= kMostShared &&
                kFacts.routes[very_few][1].timed_bytes <= kMostShared);

  template <int Kind, bool Timed>
  static void add(Kernels& kernels) {
    using R = typename Table::template Of<Kind>;
    if constexpr (R::kThreads > 0) {
      const auto one = &fused_network_kernel<Net, M, Parts, 1, R, Timed>;
      const auto any = &fused_network_kernel<Net, M, Parts, Parts, R, Timed>;
      kernels.of[Kind][0] = reinterpret_cast<const void*>(one);
      kernels.of[Kind][1] = reinterpret_cast<const void*>(any);
    }
  }
  template <bool Timed>
  static Kernels kernels() {
    Kernels all;
    add<many, Timed>(all);
    add<middle, Timed>(all);
    add<few, Timed>(all);
    add<small, Timed>(all);
    add<very_few, Timed>(all);
    return all;
  }
  static void pack(const Unpacked& from, const Packed& to) {
    Packer<Net, M, Parts>(from, to, 0, 1).pack();
  }
  static CompiledIn compiled_in() { return {kFacts, kernels<false>(), kernels<true>(), &pack}; }
};

// float32 has twice the weights and activations, and so room for fewer teams.
template <class Net, class Many16, class Many32, class Few, class VeryFew>
struct Instantiate {
  static const NetworkShape& network_shape() {
    static const NetworkShape made = [] {
      NetworkShape all{Net::kChannels, Net::kHeight,   Net::kWidth,
                       Net::kClasses,  Net::kFeatures, {}};
      add_layers<Net>(all);
      return all;
    }();
    return made;
  }
  static CompiledIn of(FusedDtype dtype) {
    switch (dtype) {
      case FusedDtype::float32:
        return Compiled<Net, Half, 2, Many32, Few, VeryFew>::compiled_in();
      case FusedDtype::tf32:  // its 11 significant bits are float16's
      case FusedDtype::float16:
        return Compiled<Net, Half, 1, Many16, Few, VeryFew>::compiled_in();
      case FusedDtype::bfloat16:
        return Compiled<Net, Bfloat16, 1, Many16, Few, VeryFew>::compiled_in();
    }
    throw std::invalid_argument("dtype: expected float32, tf32, float16 or bfloat16");
  }
  static constexpr Instantiation instantiation(const char* name) {
    return {name, &network_shape, &of};
  }
};

}  // namespace cnn_engine::cuda::fused
