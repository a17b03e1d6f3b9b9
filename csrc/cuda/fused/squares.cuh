// Accumulators of 64 squares times 32 filters by a warpgroup (compute capability 9.0a): wgmma reads
// both from shared memory once for four warps, where each would read the weights for itself.
//
// Contract: a layer of which PlaneLayout::kForWarpgroups holds, in one part. Warp w of the
// warpgroup has the tile of 16 squares first_tile + w, and of it what sum_planes gives. What was
// stored for it in shared memory was published (publish_to_wgmma) before a barrier.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/fused/conv.cuh"

namespace cnn_engine::cuda::fused {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasWarpgroups = true;
#define CNN_ENGINE_HOPPER(...) asm volatile(__VA_ARGS__)
#else
constexpr bool kHasWarpgroups = false;
#define CNN_ENGINE_HOPPER(...)
#endif

// What this thread has stored in shared memory is seen by products that begin after a barrier.
__device__ inline void publish_to_wgmma() {
  CNN_ENGINE_HOPPER("fence.proxy.async.shared::cta;" :: : "memory");
}

// Descriptor of a matrix for wgmma, of 16-bit values: blocks of 8x8 of them, each 128 neighbouring
// bytes, that lie `along` bytes apart along K and `across` bytes apart along rows of A or columns
// of B.
__device__ inline std::uint64_t blocks_at(std::uint32_t address, int along, int across) {
  return static_cast<std::uint64_t>(across / 16) << 32 |
         static_cast<std::uint64_t>(along / 16) << 16 | (address & 0x3ffff) / 16;
}

// d += A B, A 64 x 16 and B 16 x 32: d[i] are columns 8 i on of the warp's 16 rows.
#define CNN_ENGINE_MULTIPLY(Format, type)                                                        \
  __device__ inline void multiply(Format, float (&d)[4][4], std::uint64_t a, std::uint64_t b) {  \
    CNN_ENGINE_HOPPER("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                \
                      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, "     \
                      "1, 1, 1, 0, 0;" : "+f"(d[0][0]),                                          \
                      "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), \
                      "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), \
                      "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]),                \
                      "+f"(d[3][3]) : "l"(a), "l"(b) : "memory");                                \
  }
CNN_ENGINE_MULTIPLY(Half, "f16")
CNN_ENGINE_MULTIPLY(Bfloat16, "bf16")
#undef CNN_ENGINE_MULTIPLY

template <class G, class M>
__device__ __forceinline__ void sum_squares(
    Accumulators<1, 4>& accumulators, std::uint32_t input,
    std::uint32_t weights,  // [row][column][step][tile][half of the step][8 filters][8 channels]
    int first_filter_tile, int first_tile) {
  using L = PlaneLayout<G>;
  // The same in a warp, which the compiler does not see.
  input = __shfl_sync(kFullMask, input, 0);
  weights = __shfl_sync(kFullMask, weights, 0);
  // Eight squares are a row of squares: two rows of the input.
  const std::uint64_t a =
      blocks_at(input + first_tile * 4 * L::kRowBytes, L::kPlaneBytes, 2 * L::kRowBytes);
  const std::uint64_t b = blocks_at(weights + first_filter_tile * 256, 128, 256);
  CNN_ENGINE_HOPPER("wgmma.fence.sync.aligned;" :: : "memory");
#pragma unroll
  for (int r = 0; r < G::kKernel; ++r) {
#pragma unroll
    for (int s = 0; s < G::kKernel; ++s) {
#pragma unroll
      for (int step = 0; step < L::kSteps16; ++step) {
        const int from = r * L::kRowBytes + L::column_bytes(s) + step * 2 * L::kPlaneBytes;
        const int kernel_offset = (r * G::kKernel + s) * L::template offset_bytes<1>();
        multiply(M(), accumulators[0][0][0], a + from / 16,
                 b + (kernel_offset + step * G::kFilterTiles * 256) / 16);
      }
    }
  }
  CNN_ENGINE_HOPPER("wgmma.commit_group.sync.aligned;" :: : "memory");
  CNN_ENGINE_HOPPER("wgmma.wait_group.sync.aligned 0;" :: : "memory");
}
#undef CNN_ENGINE_HOPPER

}  // namespace cnn_engine::cuda::fused
