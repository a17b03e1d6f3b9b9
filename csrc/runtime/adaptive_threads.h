// Whether threads pay: learned from passes as they happen, since nothing else tells. Of two virtual
// CPUs the second may be slow to wake, or another's for half of the time; then a pass of tens of
// microseconds is faster on one thread than on two.
//
// Of one kind of pass, the mean times with and without other threads are kept, and the faster way
// is taken. Now and then a few passes go the other way; with other threads, ever more rarely as
// long as that is slower. A long pass with threads tells itself what it would take without them, by
// the caller's own part of it: such passes never go alone to find out, not after a rest either, and
// passes of unlike speed are compared with themselves. What is computed must not depend on the way.
#pragma once

#include <atomic>
#include <cstdint>

namespace cnn_engine {

// One kind of pass; all zero at first. Who gets `writing` without waiting may use the rest: it
// holds how often the process was forked, and one, so that what another thread had in the parent is
// free in the child. Times are nanoseconds, of the steady clock.
struct Pace {
  std::atomic<unsigned> writing{0};
  bool alone = false;         // the way that is taken
  bool known[2] = {};         // [0] helped, [1] alone
  bool tells = false;         // helped passes tell what they would take alone
  double mean[2] = {};        // time of a pass, by its units
  int seen = 0;               // passes before the first that counts
  int trial = 0;              // passes of the other way that are still to come
  double trial_sum = 0;       // of the times of those that count
  std::int64_t shortest = 0;  // pass that was seen
  std::int64_t since = 0;     // when the way was last changed
  std::int64_t next = 0;      // when the next trial begins
  std::int64_t pause = 0;     // from one trial of the helped way to the next
};

// What a pass was told.
struct Turn {
  int threads;
  bool trial;
  std::int64_t start;
};

std::int64_t steady_time();

// How many threads, `threads` or one, the pass that begins at `time` is to use.
Turn begin_pass(Pace& pace, int threads, std::int64_t time);

// The pass ended at `time`. `helped`: what run_on_threads returned; `units`: its size, in anything.
// `alone`: where it was helped, how long the caller would have taken for all of it, at the speed at
// which it did its own part; 0 if that is not known.
void end_pass(Pace& pace, const Turn& turn, bool helped, std::int64_t units, std::int64_t time,
              std::int64_t alone = 0);

}  // namespace cnn_engine
