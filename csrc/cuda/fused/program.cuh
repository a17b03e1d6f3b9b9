// A network's kernels as a table of routes; and, where the network is not compiled in, as a program
// of its own, which NVRTC compiles at first use from these headers: kernels by name, what the host
// must know to launch them, and what packs the weights.
//
//   using Net = Network<...>;
//   CNN_ENGINE_FUSED_PROGRAM(Net, Half, 2)
//
// Its kernels are called fused_<kind>_<form>, with the numbers of a RouteKind and a form. Where
// CNN_ENGINE_FUSED_TIMED is defined they are the instrumented ones.
#pragma once

#include "cuda/fused/pack.cuh"

namespace cnn_engine::cuda::fused {

struct NoRoute {
  static constexpr int kThreads = 0;
};

// A route, or NoRoute, for each RouteKind.
template <class Many, class Middle, class Few, class Small, class VeryFew>
struct Routes {
 private:
  template <int Kind>
  struct Number {};
  static Many of(Number<many>);
  static Middle of(Number<middle>);
  static Few of(Number<few>);
  static Small of(Number<small>);
  static VeryFew of(Number<very_few>);

 public:
  template <int Kind>
  using Of = decltype(of(Number<Kind>()));
};

template <class Net, int Parts, class Table, int Kind, int Form>
__host__ __device__ constexpr RouteFacts route_facts() {
  using R = typename Table::template Of<Kind>;
  if constexpr (R::kThreads == 0) {
    return {0, 1, 0, 0};
  } else {
    constexpr int kInputParts = Form == 0 ? 1 : Parts;
    return {R::kThreads, R::kCluster, SharedLayout<Net, Parts, kInputParts, R>::kBytes,
            kTimedBytes<Net, Parts, kInputParts, R>};
  }
}

// `needed`: bytes of shared memory that a block needs at least.
template <class Net, int Parts, class Table>
__host__ __device__ constexpr Facts facts_of(int needed) {
  return {
      {{route_facts<Net, Parts, Table, many, 0>(), route_facts<Net, Parts, Table, many, 1>()},
       {route_facts<Net, Parts, Table, middle, 0>(), route_facts<Net, Parts, Table, middle, 1>()},
       {route_facts<Net, Parts, Table, few, 0>(), route_facts<Net, Parts, Table, few, 1>()},
       {route_facts<Net, Parts, Table, small, 0>(), route_facts<Net, Parts, Table, small, 1>()},
       {route_facts<Net, Parts, Table, very_few, 0>(),
        route_facts<Net, Parts, Table, very_few, 1>()}},
      Net::kChannels * Net::kPixels,
      Net::kOutputs,
      SharedLayout<Net, Parts, 1, Route<1, 1, 1>>::kWeightBytes,
      kHeadFloats<Net>,
      Net::kClasses,
      needed};
}

// The most teams of four warps, up to `Groups`, that there is room for.
template <class Net, int Parts, class R, int Bytes, int Groups = R::kGroups>
__host__ __device__ constexpr int teams_within() {
  if constexpr (Groups == 1) {
    return 1;
  } else {
    using Fewer = typename R::template OfTeams<Groups>;
    if constexpr (kTimedBytes<Net, Parts, Parts, Fewer> <= Bytes)
      return Groups;
    else
      return teams_within<Net, Parts, R, Bytes, Groups - 1>();
  }
}

#ifdef __CUDACC_RTC__
#ifdef CNN_ENGINE_FUSED_TIMED
constexpr bool kTimedProgram = true;
using ProgramParameters = TimedParameters;
#else
constexpr bool kTimedProgram = false;
using ProgramParameters = Parameters;
#endif

template <bool Condition, class R, class Else = NoRoute>
struct RouteIf {
  using type = R;
};
template <class R, class Else>
struct RouteIf<false, R, Else> {
  using type = Else;
};

// The routes of a network that nobody measured: as many teams of four warps as there is room for,
// up to eight; sixteen warps; and a cluster of four blocks of eight. Few images are loaded ahead,
// while inputs are cleared: of two parts by clusters alone, whose threads have the registers.
// Inputs overlay each other where there is no room else. One architecture is compiled for, so there
// is no `middle`.
template <class Net, int Parts>
struct Program {
  template <class R>
  static constexpr bool kFits = kTimedBytes<Net, Parts, Parts, R> <= shared_of(kArchitecture);
  using Most = Route<4, 8, 1>;
  static constexpr int kTeams = teams_within<Net, Parts, Most, shared_of(kArchitecture)>();
  using Many = typename Most::template OfTeams<kTeams>;
  template <class R>
  using Roomy = typename RouteIf<kFits<R>, R, typename R::Overlaid>::type;
  using Few = Roomy<Route<16, 1, 1, 1, true, false, Parts == 1>>;
  using Small = Route<16, 1, 1, 1, false>;
  using VeryFew = Roomy<Route<8, 1, 1, 4, true, false, true>>;
  using Table = Routes<typename RouteIf<(kTeams > 1), Many>::type, NoRoute,
                       typename RouteIf<kFits<Few>, Few>::type,
                       typename RouteIf<!kFits<Few> && kFits<Small>, Small>::type,
                       typename RouteIf<(kArchitecture >= 90) && kFits<VeryFew>, VeryFew>::type>;
  static constexpr Facts kFacts =
      facts_of<Net, Parts, Table>(kTimedBytes<Net, Parts, Parts, Small>);

  template <int Kind>
  static constexpr int kThreads =
      Table::template Of<Kind>::kThreads > 0 ? Table::template Of<Kind>::kThreads : 32;
  template <class M, int Kind, int Form>
  __device__ static void run(const ProgramParameters& p) {
    using R = typename Table::template Of<Kind>;
    if constexpr (R::kThreads > 0) {
      run_network<Net, M, Parts, Form == 0 ? 1 : Parts, R, kTimedProgram>(p);
    }
  }
};

#define CNN_ENGINE_FUSED_KERNEL(Net, M, Parts, kind, form)                             \
  extern "C" __global__ void __launch_bounds__(Program<Net, Parts>::kThreads<kind>, 1) \
      fused_##kind##_##form(const __grid_constant__ ProgramParameters p) {             \
    if constexpr (form < Parts) Program<Net, Parts>::run<M, kind, form>(p);            \
  }
// With values of one part both forms are the same kernel, the first.
#define CNN_ENGINE_FUSED_PROGRAM(Net, M, Parts)                            \
  extern "C" __constant__ const Facts facts = Program<Net, Parts>::kFacts; \
  CNN_ENGINE_FUSED_KERNEL(Net, M, Parts, 0, 0)                             \
  CNN_ENGINE_FUSED_KERNEL(Net, M, Parts, 0, 1)                             \
  CNN_ENGINE_FUSED_KERNEL(Net, M, Parts, 2, 0)                             \
  CNN_ENGINE_FUSED_KERNEL(Net, M, Parts, 2, 1)                             \
  CNN_ENGINE_FUSED_KERNEL(Net, M, Parts, 3, 0)                             \
  CNN_ENGINE_FUSED_KERNEL(Net, M, Parts, 3, 1)                             \
  CNN_ENGINE_FUSED_KERNEL(Net, M, Parts, 4, 0)                             \
  CNN_ENGINE_FUSED_KERNEL(Net, M, Parts, 4, 1)                             \
  extern "C" __global__ void pack(const __grid_constant__ Unpacked from,   \
                                  const __grid_constant__ Packed to) {     \
    Packer<Net, M, Parts>(from, to, threadIdx.x, blockDim.x).pack();       \
  }
#endif

}  // namespace cnn_engine::cuda::fused
