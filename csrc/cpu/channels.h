// Channels that lie side by side, on SIMD lanes.
// Included only by files that are compiled once for each instruction set.
#pragma once

#include <type_traits>

#include "cpu/fused/vector.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Calls run(width, c), for vectors of `width` channels from c on, so that all of them are covered.
// Where they are no whole number of vectors, the last one begins earlier: what it covers again must
// come out the same.
template <typename Run>
CNN_ENGINE_INLINE void for_channels(int channels, const Run& run) {
  int c = 0;
  for (; c + kWide <= channels; c += kWide) run(std::integral_constant<int, kWide>(), c);
  if (c == channels) return;
  static_assert(kWide <= 2 * kNarrow);
  if (channels >= kNarrow && channels - c <= kNarrow) {
    run(std::integral_constant<int, kNarrow>(), channels - kNarrow);
  } else if (channels >= kWide) {
    run(std::integral_constant<int, kWide>(), channels - kWide);
  } else if (channels > kNarrow) {
    run(std::integral_constant<int, kNarrow>(), 0);
    run(std::integral_constant<int, kNarrow>(), channels - kNarrow);
  } else {
    for (; c < channels; ++c) run(std::integral_constant<int, 1>(), c);
  }
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
