// What a model says that each of several choices takes, of which the host wants the one of a rank.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <tuple>

namespace cnn_engine::cuda {

template <typename Choice, std::size_t kMost>
class Rated {
 public:
  void add(double time, const Choice& choice) {
    found_[count_] = {time, count_, choice};
    ++count_;
  }

  double least() const {
    double time = std::numeric_limits<double>::infinity();
    for (std::ptrdiff_t i = 0; i < count_; ++i) time = std::min(time, found_[i].time);
    return time;
  }

  // 0 is the fastest, of equals the first that was added; from as many as there are on, the last.
  Choice at(int rank) {
    const auto end = found_.begin() + count_;
    const auto wanted = found_.begin() + std::clamp<std::ptrdiff_t>(rank, 0, count_ - 1);
    std::nth_element(found_.begin(), wanted, end, [](const One& a, const One& b) {
      return std::tie(a.time, a.position) < std::tie(b.time, b.position);
    });
    return wanted->choice;
  }

 private:
  struct One {
    double time;
    std::ptrdiff_t position;
    Choice choice;
  };

  std::array<One, kMost> found_;
  std::ptrdiff_t count_ = 0;
};

}  // namespace cnn_engine::cuda
