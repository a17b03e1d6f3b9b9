#include "runtime/parallel.h"

#include <algorithm>
#include <atomic>

#include "runtime/thread_pool.h"

namespace cnn_engine {
namespace {

// Threads beyond so many share ranges; parts of a range where there is enough work for them.
constexpr int kMostRanges = 64, kPartsARange = 16;

thread_local int current = 0;  // index of the thread in its loop

// Parts [first, last) that nobody has claimed, in one word.
class alignas(64) Range {
 public:
  void set(std::uint32_t first, std::uint32_t last) {
    word_.store(std::uint64_t{last} << 32 | first, std::memory_order_relaxed);
  }

  // Claims the first half of what is left, or where it is another's the last, one part at least:
  // much at first, and nothing that others would wait for at the end.
  bool claim(bool own, std::uint32_t& begin, std::uint32_t& end) {
    std::uint64_t word = word_.load(std::memory_order_relaxed), left;
    do {
      const auto first = static_cast<std::uint32_t>(word);
      const auto last = static_cast<std::uint32_t>(word >> 32);
      if (first >= last) return false;
      const std::uint32_t size = std::max<std::uint32_t>(1, (last - first) / 2);
      begin = own ? first : last - size;
      end = begin + size;
      left = own ? std::uint64_t{last} << 32 | end : std::uint64_t{begin} << 32 | first;
    } while (!word_.compare_exchange_weak(word, left, std::memory_order_relaxed));
    return true;
  }

 private:
  std::atomic<std::uint64_t> word_;
};

struct Shared {
  const Loop& loop;
  int ranges;
  std::int64_t parts;
  // Of the caller: when it began and ended, and how many indices it did.
  std::int64_t began = 0, ended = 0, own = 0;
  Range range[kMostRanges];

  Shared(const Loop& loop, int threads)
      : loop(loop),
        ranges(std::min(threads, kMostRanges)),
        parts(std::min(loop.count, std::int64_t{kPartsARange} * ranges)) {
    for (int i = 0; i < ranges; ++i) range[i].set(first_part(i), first_part(i + 1));
  }

  std::uint32_t first_part(int i) const { return static_cast<std::uint32_t>(parts * i / ranges); }
  std::int64_t first(std::uint32_t part) const {
    return loop.count / parts * part + loop.count % parts * part / parts;
  }

  static void work(void* context, int index) {
    Shared& shared = *static_cast<Shared*>(context);
    const Loop& loop = shared.loop;
    std::int64_t done = 0;
    current = index;
    if (index == 0) shared.began = steady_time();
    for (int i = 0; i < shared.ranges; ++i) {
      Range& range = shared.range[(index + i) % shared.ranges];
      for (std::uint32_t part, last; range.claim(i == 0, part, last);) {
        const std::int64_t begin = shared.first(part), end = shared.first(last);
        loop.body(loop.context, begin, end);
        done += end - begin;
      }
    }
    if (index != 0) return;
    shared.ended = steady_time();
    shared.own = done;
  }
};

}  // namespace

int loop_thread() { return current; }

void share_loop(const Loop& loop, std::int64_t worth, int threads, Pace (&paces)[64]) {
  Pace& pace = paces[63 - __builtin_clzll(static_cast<unsigned long long>(worth))];
  const Turn turn = begin_pass(pace, threads, steady_time());
  bool helped = false;
  std::int64_t alone = 0;
  if (turn.threads == 1) {
    loop.body(loop.context, 0, loop.count);
  } else {
    Shared shared(loop, turn.threads);
    helped = run_on_threads(turn.threads, &Shared::work, &shared);
    const double others = shared.own ? static_cast<double>(loop.count) / shared.own : 0;
    alone = static_cast<std::int64_t>(static_cast<double>(shared.ended - shared.began) * others);
  }
  end_pass(pace, turn, helped, worth, steady_time(), alone);
}

}  // namespace cnn_engine
