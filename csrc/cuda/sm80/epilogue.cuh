// What ends sums that are kept in 16 bits, known as a kernel is compiled.
#pragma once

#include <limits>
#include <type_traits>

#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/rounded.cuh"

namespace cnn_engine::cuda {

// Clamps are no function, relu and clip.
enum class Ends { clamps, hard_swish, swish, any };

// A function, with relu and none as clamps.
inline Activation clamps_of(const Activation& function) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (function.function == UnaryFunction::relu) return {UnaryFunction::clip, 0.0f, kInfinity};
  return function;
}

inline Ends ends_of(const Activation& function) {
  switch (function.function) {
    case UnaryFunction::clip:
      return Ends::clamps;
    case UnaryFunction::hard_swish:
      return Ends::hard_swish;
    case UnaryFunction::swish:
      return Ends::swish;
    default:
      return Ends::any;
  }
}

// Applies a function, of clamps_of(), to values that are kept as T.
template <Ends kEnds, typename T, int n>
__device__ inline void end_in(const Activation& function, float (&value)[n]) {
  if constexpr (kEnds == Ends::any) apply<T>(function, value);
  [[maybe_unused]] const float by = -1.4426950408889634f * function.alpha;  // log2(e)
#pragma unroll
  for (int i = 0; i < n && kEnds != Ends::any; ++i) {
    if constexpr (kEnds == Ends::clamps) {
      value[i] = clamp(value[i], function.alpha, function.beta);
    } else if constexpr (kEnds == Ends::hard_swish) {
      value[i] *= __saturatef((value[i] + 3.0f) * (1.0f / 6.0f));
    } else if constexpr (kEnds == Ends::swish) {
      value[i] *= rounded_logistic(by * value[i]);
    }
  }
}

// Calls body(a constant of Ends): what both functions are, or any.
template <typename Body>
void with_ends(const Activation& inner, const Activation& outer, const Body& body) {
  const Ends ends = ends_of(inner) == ends_of(outer) ? ends_of(inner) : Ends::any;
  if (ends == Ends::clamps) return body(std::integral_constant<Ends, Ends::clamps>{});
  if (ends == Ends::hard_swish) return body(std::integral_constant<Ends, Ends::hard_swish>{});
  if (ends == Ends::swish) return body(std::integral_constant<Ends, Ends::swish>{});
  body(std::integral_constant<Ends, Ends::any>{});
}

// Whether one of the values is finite, and an infinity where it is kept as T.
template <typename T, int n>
__device__ inline bool some_past(const float (&value)[n]) {
  if (!std::is_same_v<T, __half> || largest(value) < 65520.0f) return false;
  bool past = false;
#pragma unroll
  for (int i = 0; i < n; ++i) past |= is_past_float16(value[i]);
  return past;
}

}  // namespace cnn_engine::cuda
