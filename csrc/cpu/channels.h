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
  static_assert(kWide <= 2 * kNarrow);
  // Each width is called in one place: it is compiled there, and kernels are long.
  int c = 0;
  if (channels >= kWide) {
    for (;;) {
      run(std::integral_constant<int, kWide>(), c);
      c += kWide;
      if (channels - c <= (kNarrow < kWide ? kNarrow : 0)) break;
      if (c + kWide > channels) c = channels - kWide;
    }
    if (c == channels) return;
    c = channels - kNarrow;
  }
  if (kNarrow < kWide && channels >= kNarrow) {
    for (;; c = channels - kNarrow) {
      run(std::integral_constant<int, kNarrow>(), c);
      if (c + kNarrow >= channels) return;
    }
  }
  for (; c < channels; ++c) run(std::integral_constant<int, 1>(), c);
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
