// One way to share work between threads: contiguous parts of a range, one a thread.
#pragma once

#include <cstdint>

namespace cnn_engine {

// Calls body(begin, end) for parts that cover [0, count). A part is never split further, so results
// do not depend on the number of threads. `cost` is a part's work in multiply-adds or elements for
// one index: below about ten microseconds of work, waking threads costs more than it brings.
template <typename Body>
static inline void parallel_for(std::int64_t count, std::int64_t cost, int threads,
                                const Body& body) {
  constexpr std::int64_t kWorthAThread = 20000;
  const std::int64_t useful = count * (cost > 0 ? cost : 1) / kWorthAThread;
  std::int64_t parts = threads < count ? threads : count;
  if (useful < parts) parts = useful;
  if (parts <= 1) {
    if (count > 0) body(std::int64_t{0}, count);
    return;
  }
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(parts))
  for (std::int64_t part = 0; part < parts; ++part) {
    body(count * part / parts, count * (part + 1) / parts);
  }
}

}  // namespace cnn_engine
