// The GPU's nanosecond timer: one for all multiprocessors, and not their clock.
#pragma once

namespace cnn_engine::cuda {

__device__ inline unsigned long long global_timer() {
  unsigned long long nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

}  // namespace cnn_engine::cuda
