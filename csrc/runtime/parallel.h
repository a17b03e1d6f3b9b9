// One way to share work between threads: a contiguous range for each, claimed in parts, and what a
// thread has not claimed when others have nothing left, they claim.
//
// Parts are claimed, not dealt out, so that a thread that the system does not run at the moment
// holds nothing up: with dealt parts (an OpenMP static schedule, which this replaced) one busy
// process beside two threads made passes of 2 ms take 24, a slice of the system's scheduler. Ranges
// of their own keep what a thread wrote in one loop in its own caches for the next. Where other
// threads do not pay at all, the caller works alone (runtime/adaptive_threads.h).
#pragma once

#include <cstdint>

#include "runtime/adaptive_threads.h"

namespace cnn_engine {

// Below some ten microseconds of work, waking threads costs more than it brings.
constexpr std::int64_t kWorthAThread = 20000;

// A loop over [0, count): body(context, begin, end) is called for parts of it.
struct Loop {
  void (*body)(const void* context, std::int64_t begin, std::int64_t end);
  const void* context;
  std::int64_t count;
};

// Runs a loop on up to so many threads, at least two; `worth`: its work by kWorthAThread; `paces`:
// of such loops, by the logarithm of that.
void share_loop(const Loop& loop, std::int64_t worth, int threads, Pace (&paces)[64]);

// Which of its loop's threads the calling one is; 0 outside of loops.
int loop_thread();

// Calls body(begin, end) for parts that cover [0, count). Where the parts lie does not change what
// is computed for an index, so results do not depend on the number of threads. `cost` is the work
// of one index in multiply-adds or elements.
template <typename Body>
static inline void parallel_for(std::int64_t count, std::int64_t cost, int threads,
                                const Body& body) {
  if (count <= 0) return;
  const std::int64_t worth = count * (cost > 0 ? cost : 1) / kWorthAThread;
  if (worth < threads) threads = static_cast<int>(worth);
  if (threads <= 1) return body(std::int64_t{0}, count);
  static Pace paces[64];
  const Loop loop{[](const void* context, std::int64_t begin, std::int64_t end) {
                    (*static_cast<const Body*>(context))(begin, end);
                  },
                  &body, count};
  share_loop(loop, worth, threads, paces);
}

}  // namespace cnn_engine
