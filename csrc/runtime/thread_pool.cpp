#include "runtime/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace cnn_engine {
namespace {

// Spins until ready() or about 50 microseconds have passed: longer than the pause between the
// passes of a loop, short enough that an idle process uses no CPU. Returns whether it became ready.
template <typename Ready>
bool spin(const Ready& ready) {
  using Clock = std::chrono::steady_clock;
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
    const std::unique_lock<std::mutex> mine(callers_, std::try_to_lock);
    if (!mine.owns_lock() || !grow(threads - 1)) return false;
    body_ = body;
    context_ = context;
    for (int i = 1; i < threads; ++i) wake(workers_[i - 1]);
    body(context, 0);
    for (int i = 1; i < threads; ++i) finish(workers_[i - 1]);
    return true;
  }

 private:
  enum State { idle, called, working };

  struct alignas(64) Worker {
    std::atomic<int> state{idle};
    std::atomic<bool> asleep{false};
    std::mutex mutex;
    std::condition_variable changed;
  };

  bool grow(int count) {
    while (static_cast<int>(workers_.size()) < count) {
      workers_.emplace_back();
      const int index = static_cast<int>(workers_.size());
      try {
        // Never joined: the pool lives until the process ends.
        std::thread([this, index] { work(workers_[index - 1], index); }).detach();
      } catch (const std::system_error&) {
        workers_.pop_back();
        return false;
      }
    }
    return true;
  }

  static void wake(Worker& worker) {
    worker.state.store(called);  // sequentially consistent, as is `asleep`: one sees the other
    if (worker.asleep.load()) {
      const std::lock_guard<std::mutex> lock(worker.mutex);
      worker.changed.notify_one();
    }
  }

  // Takes the call back from a worker that has not come yet, or waits for it to be done.
  static void finish(Worker& worker) {
    int expected = called;
    if (worker.state.compare_exchange_strong(expected, idle)) return;
    wait_until([&] { return worker.state.load(std::memory_order_acquire) == idle; });
  }

  void work(Worker& worker, int index) {
    const auto is_called = [&] {
      return worker.state.load() == called;
    };
    for (;;) {
      if (!spin(is_called)) {
        std::unique_lock<std::mutex> lock(worker.mutex);
        worker.asleep.store(true);
        worker.changed.wait(lock, is_called);
        worker.asleep.store(false);
      }
      int expected = called;
      if (!worker.state.compare_exchange_strong(expected, working)) continue;
      body_(context_, index);
      worker.state.store(idle, std::memory_order_release);
    }
  }

  std::mutex callers_;
  std::deque<Worker> workers_;  // a deque: workers never move
  void (*body_)(void*, int) = nullptr;
  void* context_ = nullptr;
};

std::atomic<Pool*> pool{nullptr};

// Only the thread that called fork() lives in a child: the parent's pool is left where it is, and a
// new one is made when it is needed.
void forget_pool() { pool.store(nullptr); }

Pool& instance() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, forget_pool); });
  Pool* current = pool.load();
  if (current == nullptr) {
    auto* made = new Pool;
    if (pool.compare_exchange_strong(current, made)) return *made;
    delete made;
  }
  return *current;
}

}  // namespace

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  const unsigned count = std::thread::hardware_concurrency();
  return count ? static_cast<int>(count) : 1;
}

bool run_on_threads(int threads, void (*body)(void* context, int index), void* context) {
  if (threads == 1) {
    body(context, 0);
    return true;
  }
  return instance().run(threads, body, context);
}

void yield_cpu() { std::this_thread::yield(); }

}  // namespace cnn_engine
