// What a model says that each of several choices takes, of which the host wants the one of a rank.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <tuple>

namespace cnn_engine::cuda {

// The rank of a launch of which the choice is to be the same for every batch, so that the order of
// an output's sum is: see choice_for_any_batch().
constexpr int kAnyBatch = -1;

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

  // Calls body with the time and the choice of each, in the order in which they were added.
  template <typename Body>
  void each(const Body& body) const {
    for (std::ptrdiff_t i = 0; i < count_; ++i) body(found_[i].time, found_[i].choice);
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

// Batches for which a choice that is to serve all is rated.
constexpr int kRatedBatches[] = {1, 4, 16, 64};

// The choice that takes least longer than the fastest of each rated batch, at the batch where it
// takes longest. Only what is rated for all of them can be it.
//
// rate(images): what is rated for so many images; is_same(a, b): whether choices are alike.
template <typename Rate, typename IsSame>
auto choice_for_any_batch(const Rate& rate, const IsSame& is_same) {
  constexpr int kCount = sizeof(kRatedBatches) / sizeof(kRatedBatches[0]);
  auto last = rate(kRatedBatches[kCount - 1]);
  std::array<decltype(rate(1)), kCount> rated;
  for (int i = 0; i < kCount; ++i) rated[i] = rate(kRatedBatches[i]);
  auto best = last.at(0);
  double least = std::numeric_limits<double>::infinity();
  last.each([&](double, const auto& choice) {
    double most = 0.0;
    for (const auto& of : rated) {
      double own = std::numeric_limits<double>::infinity();
      of.each([&](double time, const auto& other) {
        if (is_same(choice, other)) own = std::min(own, time);
      });
      most = std::max(most, own / of.least());
    }
    if (most < least) {
      least = most;
      best = choice;
    }
  });
  return best;
}

}  // namespace cnn_engine::cuda
