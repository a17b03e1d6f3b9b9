// One way to share work between threads: contiguous parts of a range, claimed one after another.
//
// Parts are claimed, not dealt out, so that a thread that the system does not run at the moment
// holds nothing up: with dealt parts (an OpenMP static schedule, which this replaced) one busy
// process beside two threads made passes of 2 ms take 24, a slice of the system's scheduler. Where
// other threads do not pay at all, the caller works alone (runtime/pace.h).
#pragma once

#include <cstdint>

#include "runtime/pace.h"
#include "runtime/thread_pool.h"

namespace cnn_engine {

// Calls body(begin, end) for parts that cover [0, count). Where the parts lie does not change what
// is computed for an index, so results do not depend on the number of threads. `cost` is the work
// of one index in multiply-adds or elements: below some ten microseconds of it, waking threads
// costs more than it brings.
template <typename Body>
static inline void parallel_for(std::int64_t count, std::int64_t cost, int threads,
                                const Body& body) {
  constexpr std::int64_t kWorthAThread = 20000;
  constexpr int kPartsAThread = 4;
  struct Shared {
    const Body& body;
    std::int64_t count, parts, next;

    static void work(void* context, int) {
      Shared& shared = *static_cast<Shared*>(context);
      for (;;) {
        // Builtins: std::atomic's functions could be shared with builds for other instruction sets.
        const std::int64_t part = __atomic_fetch_add(&shared.next, 1, __ATOMIC_RELAXED);
        if (part >= shared.parts) return;
        shared.body(shared.count * part / shared.parts, shared.count * (part + 1) / shared.parts);
      }
    }
  };
  if (count <= 0) return;
  const std::int64_t worth = count * (cost > 0 ? cost : 1) / kWorthAThread;
  if (worth < threads) threads = static_cast<int>(worth);
  if (threads > 1) {
    static Pace paces[64];  // by the logarithm of the work
    Pace& pace = paces[63 - __builtin_clzll(static_cast<unsigned long long>(worth))];
    const Turn turn = begin_pass(pace, threads, steady_time());
    const std::int64_t most = std::int64_t{threads} * kPartsAThread;
    Shared shared{body, count, count < most ? count : most, 0};
    const bool helped = run_on_threads(turn.threads, &Shared::work, &shared);
    end_pass(pace, turn, helped, worth, steady_time());
  } else {
    body(std::int64_t{0}, count);
  }
}

}  // namespace cnn_engine
