// The ceiling of float32 arithmetic without tensor cores: fused multiply-adds and nothing else.
#include <cuda_runtime.h>

#include "cuda/common/target.h"
#include "ops/fused_cuda.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 256, kChains = 16, kRounds = 4096;

// Each thread runs kChains independent chains: more than the adder's latency needs, all in
// registers.
__global__ void __launch_bounds__(kThreads)
    fma_peak_kernel(float* output, float factor, float term) {
  float value[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) value[i] = static_cast<float>(threadIdx.x + i);
#pragma unroll 1
  for (int round = 0; round < kRounds; round += 8) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < kChains; ++i) value[i] = fmaf(value[i], factor, term);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum += value[i];
  if (sum == -1.0f) *output = sum;  // never, but the compiler cannot know
}

struct Event {
  cudaEvent_t event = nullptr;
  Event() { CUDA_CHECK(cudaEventCreate(&event)); }
  ~Event() {
    if (event != nullptr) cudaEventDestroy(event);
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
};

}  // namespace

double measure_fma_peak() {
  const int blocks = 8 * target_here().multiprocessors;
  constexpr int kLaunches = 12, kWarmup = 4;
  Event start, stop;
  double best = 0;
  for (int launch = 0; launch < kLaunches; ++launch) {
    CUDA_CHECK(cudaEventRecord(start.event, nullptr));
    fma_peak_kernel<<<blocks, kThreads>>>(nullptr, 0.999f, 0.001f);
    CUDA_CHECK_LAUNCH("fma_peak_kernel");
    CUDA_CHECK(cudaEventRecord(stop.event, nullptr));
    CUDA_CHECK(cudaEventSynchronize(stop.event));
    float milliseconds = 0;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start.event, stop.event));
    const double rate = 1e3 * blocks * kThreads * double{kChains} * kRounds / milliseconds;
    if (launch >= kWarmup && rate > best) best = rate;
  }
  return best;
}

}  // namespace cnn_engine::cuda
