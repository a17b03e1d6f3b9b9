// Where a pass's time goes, as one thread sees it: the clock is read where a part ends, and what
// has passed since the last reading is that part's. So the parts of a thread sum to its time.
#pragma once

#include <chrono>

namespace cnn_engine::cpu::fused {

class StepClock {
 public:
  explicit StepClock(double* seconds)
      : seconds_(seconds), last_(Clock::now()) {}  // [parts], added to

  void end(int part) {
    const auto now = Clock::now();
    seconds_[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  double* seconds_;
  Clock::time_point last_;
};

// In a pass that nobody times, readings compile to nothing.
struct NoClock {
  void end(int) const {}
};

}  // namespace cnn_engine::cpu::fused
