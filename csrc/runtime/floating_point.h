// The one floating-point mode that kernels compute in, whatever a thread's own is: rounded to
// nearest, subnormal numbers kept, nothing trapped. Else the bits of a result would depend on which
// thread came to compute it.
#pragma once

#include <cstdint>

namespace cnn_engine {

// Sets that mode for the calling thread, and its own again at the end.
class FloatingPointMode {
 public:
  FloatingPointMode() : before_(get()) {
    if (before_ != kDefault) set(kDefault);
  }
  ~FloatingPointMode() {
    if (before_ != kDefault) set(before_);
  }
  FloatingPointMode(const FloatingPointMode&) = delete;
  FloatingPointMode& operator=(const FloatingPointMode&) = delete;

  // For Python, where nothing is of a scope: sets a mode, and returns the one before.
  static std::uint64_t exchange(std::uint64_t mode) {
    const Word before = get();
    set(static_cast<Word>(mode));
    return before;
  }
  static std::uint64_t usual() { return kDefault; }

 private:
#if defined(__x86_64__)
  using Word = std::uint32_t;
  // The lowest six bits are no mode: they say what has happened since they were last cleared.
  static constexpr Word kDefault = 0x1f80, kHappened = 0x3f;
  static Word get() { return __builtin_ia32_stmxcsr() & ~kHappened; }
  static void set(Word mode) {
    __builtin_ia32_ldmxcsr(mode | (__builtin_ia32_stmxcsr() & kHappened));
  }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word kDefault = 0;
  static Word get() {
    Word mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(Word mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  using Word = int;
  static constexpr Word kDefault = 0;
  static Word get() { return kDefault; }
  static void set(Word) {}
#endif

  Word before_;
};

}  // namespace cnn_engine
