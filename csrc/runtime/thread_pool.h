// Threads that stay: they wait for work by spinning for a moment, then asleep, so that a pass of
// tens of microseconds can be shared out.
#pragma once

namespace cnn_engine {

// CPUs that this process may use (its first thread's), as they were within the last tenth of a
// second. Threads of the pool run on any of them, whichever thread calls.
int available_cpus();

// Calls body(context, 0) on the calling thread and, at the same time, body(context, index) for as
// many indices of [1, threads) as threads of the pool come to it before the caller has returned
// from its own; returns when all have returned. Work must therefore be claimed, not dealt out: a
// thread that the system does not run now costs nothing, and a caller whom no thread helps does all
// of its work itself. Bodies must not throw.
//
// Any number of threads may call it at once. Together they and those that help them are no more
// than the CPUs, or than what one caller asks for: two callers on two CPUs work alone. In a forked
// child, threads are started anew. Bodies run in the mode of runtime/floating_point.h.
//
// Returns whether other threads were called.
bool run_on_threads(int threads, void (*body)(void* context, int index), void* context);

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void yield_cpu();

// Returns when ready() is true: spins for some microseconds, then lets other threads run, since
// what is waited for may itself be waiting for this CPU.
template <typename Ready>
void wait_until(const Ready& ready) {
  for (int i = 0; !ready(); ++i) {
    if (i < 200) {
      pause_cpu();
    } else {
      yield_cpu();
    }
  }
}

}  // namespace cnn_engine
