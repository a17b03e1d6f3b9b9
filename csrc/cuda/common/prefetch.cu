// prefetch on CUDA: few blocks, since what they ask for keeps their multiprocessors' copy engines
// from the kernels beside them.
#include "cuda/common/launch.cuh"
#include "cuda/sm80/mma.cuh"
#include "runtime/check.h"
#include "runtime/prefetch.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kAskingBlocks = 16, kAskingThreads = 128;
constexpr int kAskedFor = 4096;  // bytes of a piece

__device__ void ask_for(const char* memory, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(memory),
               "r"(bytes), "l"(kUsualPolicy)
               : "memory");
#else
  constexpr std::uint32_t kLine = 128;
  for (std::uint32_t at = 0; at < bytes; at += kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(memory + at) : "memory");
  }
#endif
}

__global__ void __launch_bounds__(kAskingThreads)
    prefetch_kernel(const char* memory, std::int64_t rows, std::int64_t row_bytes, int together,
                    int every) {
  const std::int64_t pieces = (row_bytes + kAskedFor - 1) / kAskedFor;
  for (std::int64_t i = grid_thread(); i < rows * pieces; i += kAskingBlocks * kAskingThreads) {
    const std::int64_t row = i / pieces, piece = i - row * pieces;
    if ((row / together + piece) % every != 0) continue;
    const std::int64_t left = row_bytes - piece * kAskedFor;
    ask_for(memory + row * row_bytes + piece * kAskedFor,
            static_cast<std::uint32_t>(left < kAskedFor ? left : kAskedFor));
  }
}

}  // namespace

void prefetch(const void* memory, std::int64_t rows, std::int64_t row_bytes, int together,
              int every, Stream stream) {
  if (rows < 0 || row_bytes < 0 || row_bytes % 16 != 0 || together < 1 || every < 1) {
    throw Error("prefetch: expected rows of a multiple of 16 bytes, and groups and steps from 1");
  }
  keep_most_shared(prefetch_kernel);  // for the kernels beside it
  prefetch_kernel<<<kAskingBlocks, kAskingThreads, 0, stream>>>(static_cast<const char*>(memory),
                                                                rows, row_bytes, together, every);
  CUDA_CHECK_LAUNCH("prefetch_kernel");
}

}  // namespace cnn_engine::cuda
