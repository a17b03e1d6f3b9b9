// Threads that stay: they wait for work by spinning for a moment, then asleep, so that a pass of
// tens of microseconds can be shared out.
#pragma once

namespace cnn_engine {

// CPUs that this process may use.
int available_cpus();

// Calls body(context, index) for index 0 on the calling thread and, at the same time, for as many
// of [1, threads) as threads of the pool come to it before the caller has returned from its own;
// returns when all have returned. Work must therefore be claimed, not dealt out: a thread that the
// system does not run now costs nothing. Returns false, having done nothing, if the pool serves
// another caller or its threads cannot be started. Bodies must not throw. In a forked child,
// threads are started anew.
bool run_on_threads(int threads, void (*body)(void* context, int index), void* context);

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void yield_cpu();

// Returns when ready() is true: spins for a moment, then lets other threads run.
template <typename Ready>
void wait_until(const Ready& ready) {
  for (int i = 0; !ready(); ++i) {
    if (i < 2000) {
      pause_cpu();
    } else {
      yield_cpu();
    }
  }
}

}  // namespace cnn_engine
