// delay on CUDA: one thread watches the GPU's nanosecond timer.
#include "cuda/common/timer.cuh"
#include "runtime/check.h"
#include "runtime/delay.h"

namespace cnn_engine::cuda {
namespace {

__global__ void delay_kernel(std::int64_t nanoseconds) {
  const unsigned long long end = global_timer() + nanoseconds;
  while (global_timer() < end) __nanosleep(100);
}

}  // namespace

void delay(std::int64_t nanoseconds, Stream stream) {
  constexpr std::int64_t kLongest = 1'000'000'000;
  if (nanoseconds < 0 || nanoseconds > kLongest) {
    throw Error("delay: expected 0 to 1000000000 nanoseconds, found " +
                std::to_string(nanoseconds));
  }
  delay_kernel<<<1, 1, 0, stream>>>(nanoseconds);
  CUDA_CHECK_LAUNCH("delay_kernel");
}

}  // namespace cnn_engine::cuda
