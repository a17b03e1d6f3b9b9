// How the CPU's kernels walk over strided operands (ops/strided.h): in runs along the last
// dimension, shared out over threads by elements, so that neither few long runs nor many short ones
// leave a thread idle.
#pragma once

#include "ops/strided.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

// Calls run(offsets, count) for runs that cover all elements of `walk`: `count` elements that
// follow one another in the last dimension, the first at offsets[k] of operand k.
template <int compute_type, typename Run>
static inline void for_each_run(const Strided<compute_type>& walk, std::int64_t cost, int threads,
                                const Run& run) {
  const int last = walk.rank - 1;
  const std::int64_t length = walk.rank ? walk.dims[last] : 1;
  // Not inlined: it would be compiled for one thread and again for several.
  const auto part = [&](std::int64_t begin, std::int64_t end) __attribute__((noinline)) {
    std::int64_t position[kMaxDims] = {};
    std::int64_t offsets[compute_type] = {};
    std::int64_t rest = begin;
    for (int d = last; d >= 0; --d) {
      position[d] = rest % walk.dims[d];
      rest /= walk.dims[d];
      for (int k = 0; k < compute_type; ++k) offsets[k] += position[d] * walk.strides[k][d];
    }
    for (std::int64_t i = begin; i < end;) {
      const std::int64_t first = walk.rank ? position[last] : 0;
      const std::int64_t count = length - first < end - i ? length - first : end - i;
      run(static_cast<const std::int64_t*>(offsets), count);
      i += count;
      if (i == end) return;
      position[last] = 0;  // the run ended with its dimension: on to the next, as an odometer does
      for (int k = 0; k < compute_type; ++k) offsets[k] -= first * walk.strides[k][last];
      for (int d = last - 1; d >= 0; --d) {
        position[d] += 1;
        for (int k = 0; k < compute_type; ++k) offsets[k] += walk.strides[k][d];
        if (position[d] < walk.dims[d]) break;
        position[d] = 0;
        for (int k = 0; k < compute_type; ++k) offsets[k] -= walk.dims[d] * walk.strides[k][d];
      }
    }
  };
  parallel_for(walk.size, cost, threads, part);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
