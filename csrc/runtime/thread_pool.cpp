#include "runtime/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "runtime/floating_point.h"

namespace cnn_engine {
namespace {

using Clock = std::chrono::steady_clock;

// CPUs that the process may use: those of its first thread. The calling thread's own may be fewer.
bool cpus_of_process(cpu_set_t& set) {
  CPU_ZERO(&set);
  return sched_getaffinity(getpid(), sizeof set, &set) == 0 && CPU_COUNT(&set) > 0;
}

// What tells sets apart, as they were when the system was last asked.
std::atomic<std::uint64_t> known_set{0};

std::uint64_t told_apart(const cpu_set_t& set) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = reinterpret_cast<const unsigned char*>(&set);
  for (std::size_t i = 0; i < sizeof set; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return hash;
}

// Lets the calling thread, one of the pool's, run wherever the process may; a thread begins with
// the CPUs of the one that made it.
class Roaming {
 public:
  void follow() {
    const std::uint64_t now = known_set.load(std::memory_order_relaxed);
    if (now == followed_) return;
    followed_ = now;
    cpu_set_t set;
    if (cpus_of_process(set)) sched_setaffinity(0, sizeof set, &set);
  }

 private:
  std::uint64_t followed_ = 0;
};

// Spins until ready() or about 50 microseconds have passed: longer than the pause between the
// passes of a loop, short enough that an idle process uses no CPU. Returns whether it became ready.
template <typename Ready>
bool spin(const Ready& ready) {
  for (int i = 0; i < 64; ++i) {
    if (ready()) return true;
    pause_cpu();
  }
  const auto end = Clock::now() + std::chrono::microseconds(50);
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause_cpu();
    }
  } while (Clock::now() < end);
  return ready();
}

class Pool {
 public:
  bool run(int threads, void (*body)(void*, int), void* context) {
    const int helpers = take_share(threads);
    Worker* called = nullptr;
    int index = 0;
    for (Worker* worker = first_.load(std::memory_order_acquire); worker && index < helpers;
         worker = worker->next) {
      int expected = idle;
      if (worker->state.load(std::memory_order_relaxed) != idle ||
          !worker->state.compare_exchange_strong(expected, reserved)) {
        continue;
      }
      worker->set(body, context, ++index, called);
      called = worker;
      worker->call();
    }
    while (index < helpers) {
      Worker* worker = start(body, context, index + 1, called);
      if (!worker) break;
      called = worker;
      ++index;
    }
    body(context, 0);
    for (Worker* worker = called; worker;) {
      Worker* next = worker->next_called;  // not ours any more once it is idle
      worker->finish();
      worker = next;
    }
    busy_.fetch_sub(1 + helpers, std::memory_order_relaxed);
    return called != nullptr;
  }

 private:
  // Its caller takes it from idle through reserved to called, and back to idle from wherever it has
  // come; the worker itself goes from called through working to done.
  enum State { idle, reserved, called, working, done };

  struct alignas(64) Worker {
    std::atomic<int> state{idle};
    std::atomic<bool> asleep{false};
    void (*body)(void*, int) = nullptr;
    void* context = nullptr;
    int index = 0;
    Worker* next_called = nullptr;  // of the same caller
    Worker* next = nullptr;         // of the pool
    std::mutex mutex;
    std::condition_variable changed;

    void set(void (*to)(void*, int), void* with, int number, Worker* others) {
      body = to;
      context = with;
      index = number;
      next_called = others;
    }

    void call() {
      state.store(called);  // sequentially consistent, as is `asleep`: one sees the other
      if (asleep.load()) {
        const std::lock_guard<std::mutex> lock(mutex);
        changed.notify_one();
      }
    }

    // Takes the call back from a worker that has not come yet, or waits for it to be done.
    void finish() {
      int expected = called;
      if (state.compare_exchange_strong(expected, idle)) return;
      wait_until([&] { return state.load(std::memory_order_acquire) == done; });
      state.store(idle, std::memory_order_release);
    }

    void work() {
      Roaming cpus;
      const auto is_called = [&] {
        return state.load() == called;
      };
      for (;;) {
        if (!spin(is_called)) {
          std::unique_lock<std::mutex> lock(mutex);
          asleep.store(true);
          changed.wait(lock, is_called);
          asleep.store(false);
        }
        int expected = called;
        if (!state.compare_exchange_strong(expected, working)) continue;
        cpus.follow();
        {
          const FloatingPointMode mode;
          body(context, index);
        }
        state.store(done, std::memory_order_release);
      }
    }
  };

  // How many threads may help a caller: what others have taken, CPUs or threads, is not there.
  int take_share(int threads) {
    const int most = std::max(threads, available_cpus()) - 1;
    int busy = busy_.load(std::memory_order_relaxed), helpers;
    do {
      helpers = std::max(0, std::min(threads - 1, most - busy));
    } while (!busy_.compare_exchange_weak(busy, busy + 1 + helpers, std::memory_order_relaxed));
    return helpers;
  }

  // Adds a worker that is called already; null if the system has no more threads.
  Worker* start(void (*body)(void*, int), void* context, int index, Worker* others) {
    auto worker = std::make_unique<Worker>();
    Worker* added = worker.get();
    added->set(body, context, index, others);
    added->state.store(called, std::memory_order_relaxed);
    try {
      // Never joined: the pool lives until the process ends.
      std::thread([added] { added->work(); }).detach();
    } catch (const std::system_error&) {
      return nullptr;
    }
    worker.release();
    added->next = first_.load(std::memory_order_relaxed);
    while (!first_.compare_exchange_weak(added->next, added, std::memory_order_release,
                                         std::memory_order_relaxed)) {
    }
    return added;
  }

  std::atomic<Worker*> first_{nullptr};  // a list that only grows
  std::atomic<int> busy_{0};             // callers and the threads that may help them
};

std::atomic<Pool*> pool{nullptr};

// Only the thread that called fork() lives in a child: the parent's pool is left where it is, and a
// new one is made when it is needed.
void forget_pool() { pool.store(nullptr); }

[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, forget_pool);

Pool& instance() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current == nullptr) {
    auto made = std::make_unique<Pool>();
    if (pool.compare_exchange_strong(current, made.get())) return *made.release();
  }
  return *current;
}

int count_cpus() {
  cpu_set_t set;
  if (cpus_of_process(set)) {
    known_set.store(told_apart(set), std::memory_order_relaxed);
    return CPU_COUNT(&set);
  }
  const unsigned count = std::thread::hardware_concurrency();
  return count ? static_cast<int>(count) : 1;
}

}  // namespace

int available_cpus() {
  // Asking the system costs more than all else that a call of the pool does.
  static std::atomic<int> known{0};
  static std::atomic<std::int64_t> until{0};
  const std::int64_t now = Clock::now().time_since_epoch().count();
  if (now >= until.load(std::memory_order_acquire)) {
    known.store(count_cpus(), std::memory_order_relaxed);
    constexpr Clock::duration kept = std::chrono::milliseconds(100);
    until.store(now + kept.count(), std::memory_order_release);
  }
  return known.load(std::memory_order_relaxed);
}

bool run_on_threads(int threads, void (*body)(void* context, int index), void* context) {
  const FloatingPointMode mode;
  if (threads <= 1) {
    body(context, 0);
    return false;
  }
  return instance().run(threads, body, context);
}

void yield_cpu() { std::this_thread::yield(); }

}  // namespace cnn_engine
