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
  struct Shared {
    const Body& body;
    std::int64_t count, threads, next;
    // Of the caller: when it began and ended, and how many indices it did.
    std::int64_t began, ended, own;

    // Claims a part of what is left, down to a small part of all: large ones at first, and none
    // that others would wait for at the end.
    bool claim(std::int64_t& begin, std::int64_t& end) {
      // Builtins: std::atomic's functions could be shared with builds for other instruction sets.
      begin = __atomic_load_n(&next, __ATOMIC_RELAXED);
      do {
        if (begin >= count) return false;
        std::int64_t size = (count - begin) / (2 * threads);
        const std::int64_t least = count / (16 * threads);
        if (size < least) size = least;
        end = begin + (size > 1 ? size : 1);
        if (end > count) end = count;
      } while (!__atomic_compare_exchange_n(&next, &begin, end, true, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED));
      return true;
    }

    static void work(void* context, int index) {
      Shared& shared = *static_cast<Shared*>(context);
      std::int64_t begin, end, done = 0;
      if (index == 0) shared.began = steady_time();
      while (shared.claim(begin, end)) {
        shared.body(begin, end);
        done += end - begin;
      }
      if (index != 0) return;
      shared.ended = steady_time();
      shared.own = done;
    }
  };
  if (count <= 0) return;
  const std::int64_t worth = count * (cost > 0 ? cost : 1) / kWorthAThread;
  if (worth < threads) threads = static_cast<int>(worth);
  if (threads > 1) {
    static Pace paces[64];  // by the logarithm of the work
    Pace& pace = paces[63 - __builtin_clzll(static_cast<unsigned long long>(worth))];
    const Turn turn = begin_pass(pace, threads, steady_time());
    Shared shared{body, count, turn.threads, 0, 0, 0, 0};
    const bool helped = run_on_threads(turn.threads, &Shared::work, &shared);
    const double others = shared.own ? static_cast<double>(count) / shared.own : 0;
    const double alone = static_cast<double>(shared.ended - shared.began) * others;
    end_pass(pace, turn, helped, worth, steady_time(), static_cast<std::int64_t>(alone));
  } else {
    body(std::int64_t{0}, count);
  }
}

}  // namespace cnn_engine
