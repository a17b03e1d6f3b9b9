#include "runtime/adaptive_threads.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

namespace cnn_engine {
namespace {

// The weight of a pass in its mean: so many passes are remembered. A helped pass that waited for a
// thread that had lost its CPU takes a hundred times as long as others, so that one of them tips
// the balance. A pass alone that takes so long lost its own CPU, which says nothing about threads:
// it counts as kOutlier passes.
constexpr double kRemembered = 64, kOutlier = 4;
// Passes of a trial, after those that wake the threads and refill caches.
constexpr int kWarmUp = 2, kTrial = 6;
constexpr double kClearly = 1.03;  // a difference that counts
constexpr std::int64_t kMillisecond = 1'000'000;
// Between two trials: of the way without threads, which cannot be much slower, and of the other;
// but at least so many passes that trials cost a hundredth or two of the time.
constexpr std::int64_t kAlonePause = 50 * kMillisecond;
constexpr std::int64_t kFirstPause = 2 * kMillisecond, kLastPause = 1000 * kMillisecond;
constexpr std::int64_t kPassesATrial = 400;
// Where passes tell themselves, after so many alone: some tens of passes of a network.
constexpr std::int64_t kLongPassesATrial = 200;
// What the other way's mean is at most, by this way's: how much slower it has been says nothing
// about what it is now.
constexpr double kMuchSlower = 1.25;
// Passes that would take so long alone: what the caller's own part of them says is believed. In
// shorter ones, what passes from one CPU's caches to the other's slows the caller down as well.
constexpr std::int64_t kLong = kMillisecond / 50;

std::atomic<unsigned> generation{1};  // of this process, by forks

[[maybe_unused]] const int pace_at_fork =
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });

class Writer {
 public:
  explicit Writer(Pace& pace) : pace_(pace) {
    const unsigned mine = generation.load(std::memory_order_relaxed);
    unsigned found = pace.writing.load(std::memory_order_relaxed);
    mine_ = found != mine &&
            pace.writing.compare_exchange_strong(found, mine, std::memory_order_acquire);
  }
  ~Writer() {
    if (mine_) pace_.writing.store(0, std::memory_order_release);
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  explicit operator bool() const { return mine_; }

 private:
  Pace& pace_;
  bool mine_;
};

void plan_trial(Pace& pace, std::int64_t time) {
  pace.trial = 0;
  if (pace.tells) {
    pace.next = time + kLongPassesATrial * pace.shortest;
    return;
  }
  const std::int64_t pause = pace.alone ? pace.pause : kAlonePause;
  pace.next = time + std::max(pause, kPassesATrial * pace.shortest);
}

void change_ways(Pace& pace, std::int64_t time) {
  // Threads that soon turned out to be slow after all have longer to wait for the next trial.
  const bool soon = time - pace.since < 8 * pace.pause;
  if (!pace.alone) pace.pause = soon ? std::min(2 * pace.pause, kLastPause) : kFirstPause;
  pace.alone = !pace.alone;
  pace.since = time;
  plan_trial(pace, time);
}

void count_trial(Pace& pace, double taken, std::int64_t time) {
  const bool other = !pace.alone;
  const double limit = kTrial * pace.mean[pace.alone];
  const int counted = std::max(0, kTrial + 1 - pace.trial);
  if (counted || taken > limit) pace.trial_sum += taken;
  --pace.trial;
  if (pace.trial > 0 && pace.trial_sum <= limit) return;  // it may still be the faster one
  const double mean = pace.trial_sum / std::max(1, counted);
  const double before = std::min(pace.mean[other], kMuchSlower * pace.mean[pace.alone]);
  pace.mean[other] = pace.known[other] ? (before + mean) / 2 : mean;
  pace.known[other] = true;
  if (pace.mean[other] * kClearly < pace.mean[pace.alone]) return change_ways(pace, time);
  if (pace.alone) pace.pause = std::min(2 * pace.pause, kLastPause);
  plan_trial(pace, time);
}

void count_usual(Pace& pace, double taken, std::int64_t time) {
  double& mean = pace.mean[pace.alone];
  if (!pace.known[pace.alone]) {
    if (++pace.seen <= kWarmUp) return;  // threads are started, memory is touched
    pace.known[pace.alone] = true;
    mean = taken;
    pace.since = time;
    pace.pause = kFirstPause;
    pace.next = time + std::max(kFirstPause, kPassesATrial * pace.shortest);
    return;
  }
  if (pace.alone) taken = std::min(taken, kOutlier * mean);
  mean += (taken - mean) / kRemembered;
  if (pace.known[!pace.alone] && mean > kClearly * pace.mean[!pace.alone]) change_ways(pace, time);
}

}  // namespace

std::int64_t steady_time() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

Turn begin_pass(Pace& pace, int threads, std::int64_t time) {
  Turn turn{threads, false, time};
  const Writer writer(pace);
  if (!writer) return turn;
  const bool wanted = pace.alone || !pace.tells;
  if (wanted && pace.trial == 0 && pace.known[pace.alone] && time >= pace.next) {
    pace.trial = kWarmUp + kTrial;
    pace.trial_sum = 0;
  }
  turn.trial = pace.trial > 0;
  if (pace.alone != turn.trial) turn.threads = 1;
  return turn;
}

void end_pass(Pace& pace, const Turn& turn, bool helped, std::int64_t units, std::int64_t time,
              std::int64_t without) {
  const bool alone = turn.threads == 1;
  if (!alone && !helped) return;  // the threads are others' now
  const Writer writer(pace);
  if (!writer) return;
  const std::int64_t length = std::max<std::int64_t>(1, time - turn.start);
  pace.shortest = pace.shortest ? std::min(pace.shortest, length) : length;
  double taken = static_cast<double>(length) / static_cast<double>(units);
  if (!alone && without > 0) pace.tells = without >= kLong;
  if (!alone && without >= kLong) {
    double& mean = pace.mean[1];
    const double estimate = static_cast<double>(without) / static_cast<double>(units);
    if (pace.alone) {
      taken *= mean / estimate;  // of a pass like those alone
    } else {
      if (pace.known[1] && estimate > kOutlier * mean) return;  // the caller lost its own CPU
      // What slows both ways down (memory that is touched first) says nothing about threads: it is
      // the passes' own ratios that are remembered, by moving both means together.
      const double before = pace.known[1] ? mean : estimate;
      mean = before + (estimate - before) / kRemembered;
      pace.mean[0] *= mean / before;
      taken *= mean / estimate;
      pace.known[1] = true;
      pace.next = std::max(pace.next, time + kAlonePause);
    }
  }
  if (turn.trial) {
    if (pace.trial > 0 && alone != pace.alone) count_trial(pace, taken, time);
  } else if (alone == pace.alone) {
    count_usual(pace, taken, time);
  }
}

}  // namespace cnn_engine
