// What libstdc++ takes of a newer glibc, for modules that are linked for an
// older one.
#include <unistd.h>

// Whether the process has one thread, so that counts of references need no
// atomic operations (glibc 2.32). This module's own says no for ever, which is
// right for any process.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// A random number (glibc 2.36).
extern "C" __attribute__((visibility("hidden"))) unsigned arc4random() noexcept {
  unsigned number = 0;
  if (getentropy(&number, sizeof number) != 0)
    _exit(127);  // only where the kernel is from before 3.17
  return number;
}
