// FusedNetwork: who runs which steps of a plan, and on which memory.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <type_traits>

#include "cpu/fused/operations.h"
#include "cpu/fused/plan.h"
#include "cpu/fused/step_clock.h"
#include "cpu/kernels.h"
#include "ops/fused_cpu.h"
#include "runtime/adaptive_threads.h"
#include "runtime/thread_pool.h"

namespace cnn_engine::cpu {
namespace {

using fused::Buffer;
using fused::FusedKernels;
using fused::NoClock;
using fused::Pixels;
using fused::Plan;
using fused::Step;
using fused::StepClock;
using fused::StepKind;

// Below this many multiply-adds, other threads cost an image more than they bring.
constexpr double kWorthThreads = 200e3;

// A part of a step for one image; `slot` is the image's position in its group.
void run_part(const FusedKernels& kernels, const Plan& plan, const Step& step, const void* image,
              const Pixels& pixels, float* shared, float* scratch, int slot, int begin, int end) {
  if (begin >= end) return;
  float* tail = shared + plan.tail_offset + slot * plan.tail_stride;
  const float* in = (step.in_tail ? tail : shared) + step.in;
  float* out = (step.out_in_tail ? tail : shared) + step.out;
  switch (step.kind) {
    case StepKind::to_planar:
      return kernels.to_planar(image, pixels, step.conv.image, out, begin, end);
    case StepKind::to_channels_last:
      return kernels.to_channels_last(image, pixels, step.layout, out, begin, end);
    case StepKind::winograd:
      return kernels.winograd(step.conv, in, out, scratch, begin, end);
    case StepKind::direct:
      return kernels.direct(step.conv, in, out, scratch, begin, end);
    case StepKind::max_pool:
      return kernels.max_pool(step.pool, in, out, begin, end);
    case StepKind::activate:
      return kernels.activate(step.activation, out, step.count);
    case StepKind::linear:
      return kernels.linear(step.linear, in, 0, out, 0, scratch, 1, begin, end);
    case StepKind::flatten:
      return kernels.flatten(step.layout, in, out);
    case StepKind::softmax:
      return kernels.softmax(in, out, static_cast<int>(step.count));
  }
}

}  // namespace

struct FusedNetwork::State {
  FusedKernels kernels;
  const char* instruction_set;
  Pixels pixels;
  std::unique_ptr<Plan> plan;
  // Kept for the next calls, of any size: as many as were in use at once, up to this number. No
  // lock, so that a child that is forked in the middle of a call finds none taken.
  std::atomic<Buffer*> workspaces[64] = {};
  Pace paces[32];  // by the logarithm of the images in a pass

  State(const NetworkDescription& description, bool bfloat16, const InstructionSet& set)
      : kernels(*set.fused),
        instruction_set(set.name),
        pixels{description.scale, description.offset, true},
        plan(fused::make_plan(description, bfloat16, *set.fused)) {
#if defined(__x86_64__)
    if (bfloat16) {
      kernels.direct = avx512bf16::fused_direct_bfloat16;
      kernels.linear = avx512bf16::fused_linear_bfloat16;
    }
#endif
  }

  ~State() {
    for (auto& slot : workspaces) delete slot.load(std::memory_order_relaxed);
  }

  std::unique_ptr<Buffer> take() {
    for (auto& slot : workspaces) {
      if (slot.load(std::memory_order_relaxed) == nullptr) continue;
      if (Buffer* workspace = slot.exchange(nullptr, std::memory_order_acquire)) {
        return std::unique_ptr<Buffer>(workspace);
      }
    }
    return std::make_unique<Buffer>(plan->workspace);
  }

  void give_back(std::unique_ptr<Buffer> workspace) {
    for (auto& slot : workspaces) {
      Buffer* none = nullptr;
      if (slot.load(std::memory_order_relaxed) == nullptr &&
          slot.compare_exchange_strong(none, workspace.get(), std::memory_order_release,
                                       std::memory_order_relaxed)) {
        workspace.release();
        return;
      }
    }
  }
};

namespace {

// One call of run(). All work is claimed: whole images in groups first, then parts of the images
// that are left, step by step.
struct Pass {
  const FusedKernels& kernels;
  const Plan& plan;
  Pixels pixels;
  const char* images;
  std::size_t image_bytes;
  float* output;
  int whole;  // images [0, whole) are one thread's each; the others are shared by all
  int n;
  int group;
  int threads;
  std::unique_ptr<Buffer>* workspaces;  // [threads], and one more for what is shared
  double* seconds;                      // [threads, seconds_stride], where a pass is timed
  int seconds_stride;
  std::atomic<int> next{0};  // image
  // Where the shared images are: step s of image i is phase i * steps + s. The upper half is the
  // phase, the lower the next part of it that nobody has claimed.
  std::atomic<std::uint64_t> ticket{0};
  std::atomic<int> done{0};                   // parts of this phase
  mutable std::atomic<bool> left_out{false};  // whether any image was

  const void* image(int i) const { return images + i * image_bytes; }

  // float32 images may hold what Winograd's sums do not carry.
  bool regular(int i) const {
    return pixels.is_uint8 || kernels.finite(static_cast<const float*>(image(i)), plan.image_size);
  }

  void write(const float* shared, int slot, int i) const {
    std::memcpy(output + std::size_t(i) * plan.outputs,
                shared + plan.tail_offset + slot * plan.tail_stride + plan.output,
                plan.outputs * sizeof(float));
  }

  template <typename Clock>
  void run_group(int first, int count, float* shared, Clock& clock) const {
    int slots[Plan::kGroup];
    int filled = 0;
    for (int i = first; i < first + count; ++i) {
      if (!regular(i)) {
        left_out.store(true, std::memory_order_relaxed);
        continue;
      }
      for (std::size_t s = 0; s < plan.tail; ++s) {
        const Step& step = plan.steps[s];
        run_part(kernels, plan, step, image(i), pixels, shared, shared + plan.scratch_offset,
                 filled, 0, step.units);
        clock.end(step.part);
      }
      slots[filled++] = i;
    }
    if (filled == 0) return;
    float* tail = shared + plan.tail_offset;
    for (std::size_t s = plan.tail; s < plan.steps.size(); ++s) {
      const Step& step = plan.steps[s];
      if (step.kind == StepKind::linear) {
        kernels.linear(step.linear, tail + step.in, plan.tail_stride, tail + step.out,
                       plan.tail_stride, shared + plan.scratch_offset, filled, 0, step.units);
      } else {
        for (int slot = 0; slot < filled; ++slot) {
          run_part(kernels, plan, step, nullptr, pixels, shared, nullptr, slot, 0, step.units);
        }
      }
      clock.end(step.part);
    }
    for (int slot = 0; slot < filled; ++slot) write(shared, slot, slots[slot]);
    clock.end(plan.steps.back().part);
  }

  template <typename Clock>
  void run_shared(float* shared, float* scratch, Clock& clock) {
    const std::uint64_t steps = plan.steps.size();
    const std::uint64_t phases = (n - whole) * steps;
    std::uint64_t seen = ticket.load(std::memory_order_acquire);
    for (;;) {
      const std::uint64_t phase = seen >> 32;
      if (phase == phases) return;
      const Step& step = plan.steps[phase % steps];
      const int i = whole + static_cast<int>(phase / steps);
      const int parts = std::min(step.units, threads);
      const int part = static_cast<int>(seen & 0xffffffffu);
      if (part == parts) {
        wait_until([&] { return ticket.load(std::memory_order_acquire) >> 32 != phase; });
        clock.end(step.part);
        seen = ticket.load(std::memory_order_acquire);
        continue;
      }
      if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel,
                                        std::memory_order_acquire)) {
        continue;
      }
      run_part(kernels, plan, step, image(i), pixels, shared, scratch, 0, step.units * part / parts,
               step.units * (part + 1) / parts);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == parts) {
        if (phase % steps == steps - 1) write(shared, 0, i);
        done.store(0, std::memory_order_relaxed);
        ticket.store((phase + 1) << 32, std::memory_order_release);
      }
      clock.end(step.part);
      seen = ticket.load(std::memory_order_acquire);
    }
  }

  template <bool timed>
  void work(int index) {
    using Clock = std::conditional_t<timed, StepClock, NoClock>;
    Clock clock = [&] {
      if constexpr (timed) {
        return StepClock(seconds + index * seconds_stride);
      } else {
        return NoClock();
      }
    }();
    float* mine = workspaces[index]->data();
    for (;;) {
      const int first = next.fetch_add(group, std::memory_order_relaxed);
      if (first >= whole) break;
      run_group(first, std::min(group, whole - first), mine, clock);
    }
    if (whole < n) run_shared(workspaces[threads]->data(), mine + plan.scratch_offset, clock);
  }
};

}  // namespace

FusedNetwork::FusedNetwork(const NetworkDescription& description, FusedDtype dtype) {
  const std::string reason = why_not(description, dtype);
  if (!reason.empty()) throw std::invalid_argument(reason);
  state_ = std::make_unique<State>(description, dtype == FusedDtype::bfloat16, selected_set());
}

FusedNetwork::~FusedNetwork() = default;
FusedNetwork::FusedNetwork(FusedNetwork&&) noexcept = default;
FusedNetwork& FusedNetwork::operator=(FusedNetwork&&) noexcept = default;

std::string FusedNetwork::why_not(const NetworkDescription& description, FusedDtype dtype) {
  if (dtype == FusedDtype::bfloat16) {
    const std::string reason = bfloat16_why_not();
    if (!reason.empty()) return reason;
  }
  return fused::why_not(description);
}

template <bool timed>
std::vector<int> FusedNetwork::run_with(const void* images, bool is_uint8, int n, float* output,
                                        int threads, double* seconds) const {
  using SteadyClock = std::chrono::steady_clock;
  [[maybe_unused]] SteadyClock::time_point start;
  if constexpr (timed) start = SteadyClock::now();
  if (n <= 0) return {};
  State& state = *state_;
  const Plan& plan = *state.plan;
  const std::size_t image_bytes = plan.image_size * (is_uint8 ? 1 : sizeof(float));
  if (plan.multiply_adds * n < kWorthThreads || threads < 1) threads = 1;
  if (threads > 1) threads = std::min(threads, available_cpus());
  Pace& pace = state.paces[31 - __builtin_clz(static_cast<unsigned>(n))];
  const bool paced = threads > 1;
  Turn turn{};
  if (paced) {
    turn = begin_pass(pace, threads, steady_time());
    threads = turn.threads;
  }

  // A few images beyond a multiple of the threads would leave threads idle for a whole image's
  // time.
  int left = n < 8 * threads && plan.multiply_adds >= kWorthThreads ? n % threads : 0;
  for (int i = n - left; i < n && !is_uint8; ++i) {
    const auto* image = static_cast<const float*>(images) + i * plan.image_size;
    if (!state.kernels.finite(image, plan.image_size)) left = 0;
  }
  if (left == 0) threads = std::min(threads, n);

  std::vector<std::unique_ptr<Buffer>> workspaces(threads + (left ? 1 : 0));
  for (auto& workspace : workspaces) workspace = state.take();
  const int parts = static_cast<int>(plan.parts.size());
  const int stride = fused::round_up(parts, 8);  // threads write to cache lines of their own
  std::vector<double> thread_seconds(timed ? std::size_t(threads) * stride : 0);

  const int whole = n - left;
  Pass pass{state.kernels,
            plan,
            {state.pixels.scale, state.pixels.offset, is_uint8},
            static_cast<const char*>(images),
            image_bytes,
            output,
            whole,
            n,
            std::max(1, std::min(Plan::kGroup, whole / threads)),
            threads,
            workspaces.data(),
            thread_seconds.data(),
            stride};
  const bool helped = run_on_threads(
      threads, [](void* context, int index) { static_cast<Pass*>(context)->work<timed>(index); },
      &pass);
  if (paced) end_pass(pace, turn, helped, n, steady_time());
  for (auto& workspace : workspaces) state.give_back(std::move(workspace));
  if constexpr (timed) {
    const double wall = std::chrono::duration<double>(SteadyClock::now() - start).count();
    const double sum = std::accumulate(thread_seconds.begin(), thread_seconds.end(), 0.0);
    for (std::size_t i = 0; i < thread_seconds.size(); ++i) {
      const int part = static_cast<int>(i) % stride;
      if (part < parts && sum > 0) seconds[part] += wall * thread_seconds[i] / sum;
    }
  }
  std::vector<int> left_out;
  for (int i = 0; i < n && pass.left_out.load(); ++i) {
    if (!pass.regular(i)) left_out.push_back(i);
  }
  return left_out;
}

std::vector<int> FusedNetwork::run(const void* images, bool is_uint8, int n, float* output,
                                   int threads) const {
  return run_with<false>(images, is_uint8, n, output, threads, nullptr);
}

std::vector<int> FusedNetwork::run_timed(const void* images, bool is_uint8, int n, float* output,
                                         int threads, double* seconds) const {
  return run_with<true>(images, is_uint8, n, output, threads, seconds);
}

const std::vector<std::vector<int>>& FusedNetwork::parts() const { return state_->plan->parts; }
std::size_t FusedNetwork::image_size() const { return state_->plan->image_size; }
int FusedNetwork::outputs() const { return state_->plan->outputs; }
const char* FusedNetwork::instruction_set() const { return state_->instruction_set; }

double measure_fma_peak(double seconds) {
  using Clock = std::chrono::steady_clock;
  const FusedKernels& kernels = *selected_set().fused;
  double best = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  do {
    const auto start = Clock::now();
    const double flops = kernels.fma_burst(20000);
    const double took = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, flops / took);
  } while (Clock::now() < end);
  return best;
}

}  // namespace cnn_engine::cpu
