// The thread pool and the pace, without Python: for ThreadSanitizer, and for processors that are
// only emulated. scripts/native_test.sh builds it.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "runtime/adaptive_threads.h"
#include "runtime/parallel.h"
#include "runtime/thread_pool.h"

using namespace cnn_engine;

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  std::printf("%s: %s\n", holds ? "ok    " : "FAILED", what);
  failures += !holds;
}

// Counts what is claimed, and whether an index is one thread's at a time.
struct Claims {
  int threads, count;
  std::atomic<int> next{0}, done{0}, wrong{0};
  std::vector<std::atomic<int>> inside;

  Claims(int threads_, int count_) : threads(threads_), count(count_), inside(threads_) {}

  static void work(void* context, int index) {
    auto& claims = *static_cast<Claims*>(context);
    if (index < 0 || index >= claims.threads || claims.inside[index].fetch_add(1) != 0) {
      ++claims.wrong;
      return;
    }
    while (claims.next.fetch_add(1) < claims.count) ++claims.done;
    claims.inside[index].fetch_sub(1);
  }

  bool run() {
    run_on_threads(threads, &Claims::work, this);
    return done == count && wrong == 0;
  }
};

// Several callers at once, each asking for more threads from call to call, so that workers start
// while others look for them.
void test_growth() {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (const int step : {11, 1}) {
        for (int threads = 1; threads <= 64; threads += step) {
          wrong += !Claims((threads + 23 * caller) % 64 + 1, 100).run();
        }
      }
    });
  }
  for (auto& caller : callers) caller.join();
  expect(wrong == 0, "callers that ask for ever more threads at once have all of their work done");
}

// Returns whether other threads come to a call that waits for them, for up to ten seconds.
bool helped() {
  std::atomic<bool> came{false};
  run_on_threads(
      2,
      [](void* context, int index) {
        auto& flag = *static_cast<std::atomic<bool>*>(context);
        if (index) flag.store(true);
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
        while (!flag.load() && std::chrono::steady_clock::now() < end) yield_cpu();
      },
      &came);
  return came.load();
}

void test_threads_come() {
  expect(helped(), "a thread comes to help");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  expect(helped(), "a thread that has gone to sleep is woken");
}

// A caller holds all threads that it may; others must have their work done all the same.
void test_busy() {
  struct Holder {
    std::atomic<int> inside{0};
    std::atomic<bool> free{false};
  } holder;
  const int threads = available_cpus() > 2 ? available_cpus() : 2;
  std::thread first([&] {
    run_on_threads(
        threads,
        [](void* context, int) {
          auto& held = *static_cast<Holder*>(context);
          ++held.inside;
          while (!held.free.load()) yield_cpu();
        },
        &holder);
  });
  while (holder.inside.load() < threads) yield_cpu();
  Claims claims(threads, 100);
  const bool called = run_on_threads(threads, &Claims::work, &claims);
  expect(!called, "a busy pool calls no threads for another caller");
  // Of two threads more, one is left: the other is this caller itself.
  std::atomic<int> helpers{0};
  run_on_threads(
      threads + 2,
      [](void* context, int index) {
        auto& came = *static_cast<std::atomic<int>*>(context);
        if (index) ++came;
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
        while (came.load() < 2 && std::chrono::steady_clock::now() < end) yield_cpu();
      },
      &helpers);
  expect(helpers < 2, "threads of several callers together are no more than one of them may have");
  expect(claims.done == 100, "what a busy pool cannot share, the caller does alone");
  std::vector<std::uint8_t> touched(1000);
  parallel_for(1000, 1000, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) ++touched[i];
  });
  std::size_t once = 0;
  for (const auto times : touched) once += times == 1;
  expect(once == touched.size(), "a loop in a busy pool covers its range once");
  holder.free.store(true);
  first.join();
  expect(helped(), "threads that were held come again");
}

// Loops of any length are covered once, whoever comes; a thread is the same to all of its parts.
void test_loops() {
  bool all_once = true, known = true;
  for (const int threads : {2, 3, 8, 70}) {
    for (const int count : {1, 2, 7, 31, 1000, 4097}) {
      std::vector<std::atomic<int>> touched(count);
      std::atomic<bool> right{true};
      parallel_for(count, kWorthAThread * 100, threads, [&](std::int64_t begin, std::int64_t end) {
        if (loop_thread() < 0 || loop_thread() >= threads) right = false;
        for (std::int64_t i = begin; i < end; ++i) ++touched[i];
      });
      for (const auto& times : touched) all_once &= times == 1;
      known &= right;
    }
  }
  expect(all_once, "loops cover their ranges once");
  expect(known && loop_thread() == 0, "threads of a loop have numbers below its threads");
  // One thread that stops in its first part: the other does all the rest.
  std::atomic<int> inside{0}, done{0};
  std::atomic<bool> waited{false};
  parallel_for(64, kWorthAThread * 100, 2, [&](std::int64_t begin, std::int64_t end) {
    if (inside.fetch_add(1) == 0) {
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (done.load() + (end - begin) < 64 && !waited) {
        yield_cpu();
        waited = std::chrono::steady_clock::now() > until;
      }
    }
    done += static_cast<int>(end - begin);
  });
  expect(done == 64 && !waited, "what a thread that stands still has not claimed, others do");
}

void test_fork() {
  expect(helped(), "threads come before a fork");
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(helped() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  expect(status == 0, "a forked child has threads of its own");
  expect(helped(), "the parent keeps its threads");
}

// Passes of a made-up clock: so long with two threads, so long alone. Long ones tell what they
// would take alone.
struct Simulation {
  Pace pace;
  std::int64_t time = 1;
  int alone = 0, all = 0;

  void run(int passes, std::int64_t with_help, std::int64_t without, int stall_every = 0,
           bool tells = false) {
    alone = all = 0;
    for (int i = 0; i < passes; ++i) {
      pass(with_help, without, stall_every && i % stall_every == 0 ? 4'000'000 : 0, tells);
    }
  }

  void pass(std::int64_t with_help, std::int64_t without, std::int64_t stall, bool tells) {
    const Turn turn = begin_pass(pace, 2, time);
    const bool is_alone = turn.threads == 1;
    alone += is_alone;
    ++all;
    time += is_alone ? without : with_help + stall;
    end_pass(pace, turn, !is_alone, 1, time, tells ? without : 0);
  }
};

void test_pace() {
  {
    Simulation s;
    s.run(20000, 20'000, 35'000);
    expect(s.alone < s.all / 50, "threads that pay are used");
    s.run(20000, 70'000, 35'000);
    expect(s.alone > s.all * 9 / 10, "threads that begin to cost are left out");
    s.run(200000, 20'000, 35'000);
    expect(s.alone < s.all / 2, "threads that pay again are found");
  }
  {
    Simulation s;
    s.run(20000, 250'000, 45'000);
    expect(s.alone > s.all * 9 / 10, "threads that cost from the start are left out");
    const std::int64_t began = s.time;
    s.run(20000, 250'000, 45'000);
    expect(s.time - began < std::int64_t{20000} * 45'000 * 103 / 100,
           "trials of slow threads cost under 3 %");
  }
  {
    Simulation s;  // a thread that loses its CPU again and again, and is fast in between
    s.run(100000, 20'000, 35'000, 100);
    expect(s.time < std::int64_t{100000} * 35'000 * 105 / 100,
           "threads that stall make passes at most 5 % slower than none");
  }
  {
    Simulation s;
    s.run(20000, 20'000, 35'000);
    s.run(200, 20'000, 35'000, 4);
    expect(s.alone > 190, "a stall stops the use of threads at once, not at the next trial");
  }
  {
    Simulation s;
    s.run(20000, 600'000, 1'000'000, 0, true);
    expect(s.alone == 0, "long passes that threads shorten never go alone");
    s.run(1000, 1'100'000, 1'000'000, 0, true);
    expect(s.alone > 700, "long passes that threads lengthen soon go alone");
    s.run(20000, 600'000, 1'000'000, 0, true);
    expect(s.alone < s.all / 2, "threads that pay again are found by long passes");
  }
  {
    Simulation s;
    s.run(1000, 600'000, 1'000'000, 0, true);
    for (int i = 0; i < 100; ++i) {
      s.time += 60'000'000;
      s.run(5, 600'000, 1'000'000, 0, true);
      if (s.alone) break;
    }
    expect(s.alone == 0, "long passes that threads shorten do not go alone after a rest either");
    s.run(1000, 50'000'000, 1'000'000, 0, true);
    const int disturbed = s.alone;
    s.run(400, 600'000, 1'000'000, 0, true);
    expect(disturbed > 900 && s.alone < 300,
           "threads that were a hundred times as slow are found soon after");
  }
  {
    Simulation stalled;
    stalled.run(1000, 600'000, 1'000'000, 5, true);
    expect(stalled.alone > 900, "long passes that stall go alone");
    // Passes of one size, but of unlike speed: which of them a trial meets is chance.
    int most = 0;
    for (std::uint32_t state = 1; state <= 16; ++state) {
      Simulation s;
      s.run(1000, 600'000, 1'000'000, 5, true);
      s.alone = 0;
      std::uint32_t chance = state;
      for (int i = 0; i < 20000; ++i) {
        chance = chance * 1664525u + 1013904223u;
        const std::int64_t slow = chance >> 31 ? 20 : 1;
        s.pass(slow * 700'000, slow * 1'000'000, 0, true);
      }
      most = s.alone > most ? s.alone : most;
    }
    expect(most < 50, "long passes of unlike speed are compared with themselves");
  }
  {
    // The first passes touch their memory: they count a hundred times as much in means of times.
    Simulation s;
    s.run(2, 100'000'000, 190'000'000, 0, true);
    s.run(1000, 1'100'000, 1'000'000, 0, true);
    expect(s.alone > 800, "threads that cost are left out soon after first passes that took long");
  }
  {
    Simulation s;
    s.run(50, 1'000'000'000, 1'900'000'000);
    expect(s.alone == 0, "long passes are tried alone only after many");
  }
}

}  // namespace

int main() {
  alarm(300);  // what waits for a thread that never comes ends the test
  test_growth();
  test_threads_come();
  test_busy();
  test_loops();
  test_fork();
  test_pace();
  std::printf("%d failed\n", failures);
  return failures != 0;
}
