// What ends sums that are kept in 16 bits, known as a kernel is compiled.
#pragma once

#include <limits>
#include <type_traits>

#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/rounded.cuh"

namespace cnn_engine::cuda {

// Clamps are no function, relu and clip.
enum class KnownActivation { clamps, hard_swish, swish, any };

// A function, with relu and none as clamps.
inline Activation clamps_of(const Activation& function) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (function.function == UnaryFunction::relu) return {UnaryFunction::clip, 0.0f, kInfinity};
  return function;
}

inline KnownActivation known_activation_of(const Activation& function) {
  switch (function.function) {
    case UnaryFunction::clip:
      return KnownActivation::clamps;
    case UnaryFunction::hard_swish:
      return KnownActivation::hard_swish;
    case UnaryFunction::swish:
      return KnownActivation::swish;
    default:
      return KnownActivation::any;
  }
}

// Applies a function, of clamps_of(), to values that are kept as T.
template <KnownActivation kKnown, typename T, int n>
__device__ inline void apply_known(const Activation& function, float (&value)[n]) {
  if constexpr (kKnown == KnownActivation::any) apply<T>(function, value);
  [[maybe_unused]] const float by = -1.4426950408889634f * function.alpha;  // log2(e)
#pragma unroll
  for (int i = 0; i < n && kKnown != KnownActivation::any; ++i) {
    if constexpr (kKnown == KnownActivation::clamps) {
      value[i] = clamp(value[i], function.alpha, function.beta);
    } else if constexpr (kKnown == KnownActivation::hard_swish) {
      value[i] *= __saturatef((value[i] + 3.0f) * (1.0f / 6.0f));
    } else if constexpr (kKnown == KnownActivation::swish) {
      value[i] *= rounded_logistic(by * value[i]);
    }
  }
}

// Calls body(a constant of KnownActivation): what both functions are, or any.
template <typename Body>
void with_known_activations(const Activation& inner, const Activation& outer, const Body& body) {
  const KnownActivation known = known_activation_of(inner) == known_activation_of(outer)
                                    ? known_activation_of(inner)
                                    : KnownActivation::any;
  if (known == KnownActivation::clamps)
    return body(std::integral_constant<KnownActivation, KnownActivation::clamps>{});
  if (known == KnownActivation::hard_swish)
    return body(std::integral_constant<KnownActivation, KnownActivation::hard_swish>{});
  if (known == KnownActivation::swish)
    return body(std::integral_constant<KnownActivation, KnownActivation::swish>{});
  body(std::integral_constant<KnownActivation, KnownActivation::any>{});
}

// Whether one of the values is finite, and an infinity where it is kept as T. To round pairs again
// costs nothing where they are stored.
template <typename T, int n>
__device__ inline bool some_past(const float (&value)[n]) {
  bool past = false;
  if constexpr (std::is_same_v<T, __half>) {
    static_assert(n % 2 == 0);
    __half2 most = __float2half2_rn(0.0f);
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      most = __hmax2(most, __habs2(__floats2half2_rn(value[i], value[i + 1])));
    }
    const __half2 infinity = __float2half2_rn(INFINITY);
    if (__builtin_expect(!__hblt2(most, infinity), false)) {  // or no number
#pragma unroll
      for (int i = 0; i < n; ++i) past |= is_past_float16(value[i]);
    }
  }
  return past;
}

// Looks for finite pairs that became infinities of float16, without a branch: what is made of many
// values in a row is made side by side. Of other types it looks for nothing.
template <typename T>
class PastRange {
 public:
  // What was `from` is `made`, two values of T each; or is not looked at.
  __device__ void look(std::uint32_t from, std::uint32_t made, bool counts = true) {
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 none = __half2half2(__ushort_as_half(counts ? 0 : 0x7fff));  // 0 or NaN
      // NaN of an infinity, and of NaN: maxima leave them out.
      const __half2 found = __hfma2(as_pair(from), none, as_pair(made));
      most_ = __hmax2(most_, __habs2(found));
    }
  }
  __device__ bool found() const {
    if constexpr (!std::is_same_v<T, __half>) return false;
    return !__hblt2(most_, __float2half2_rn(INFINITY));
  }

 private:
  static __device__ __half2 as_pair(std::uint32_t bits) {
    __half2 pair;
    memcpy(&pair, &bits, sizeof(pair));
    return pair;
  }

  __half2 most_ = __float2half2_rn(0.0f);
};

}  // namespace cnn_engine::cuda
