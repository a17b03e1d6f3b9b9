// linear_mma: a block makes a tile of 64 x 64 outputs with four warps, each 32 x 32.
//
// Parts of 32 features go through registers to shared memory, where x becomes float16: those of the
// next part are on their way while tensor cores multiply this one. Turing has no asynchronous
// copies. Rows in shared memory are 80 bytes apart, so that a warp's fragments come from all banks.
#include <cstdint>

#include "cuda/common/activation.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/storage.cuh"
#include "ops/linear_mma.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kTile = 64, kDepth = 32, kThreads = 128;
constexpr int kPitch = kDepth + 8;                         // of shared memory, in halves
constexpr int kRun = 8;                                    // halves of a packed piece: 16 bytes
constexpr int kRows = 2, kColumns = 4;                     // 16 x 8 products of a warp
constexpr int kInputs = kTile * kDepth / kThreads;         // values of x that a thread brings
constexpr int kPieces = kTile * kDepth / kRun / kThreads;  // pieces of weights that it brings

int padded(int features) { return (features + kRun - 1) / kRun * kRun; }

// d += a * b, of [16, 8] and [8, 8] halves; a row of b is an output's weights.
__device__ inline void multiply(float (&d)[4], const std::uint32_t (&a)[2], std::uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ inline std::uint32_t pair_at(const __half* address) {
  return *reinterpret_cast<const std::uint32_t*>(address);
}

// A thread's part of what a step needs, between global and shared memory. With Fours, x is read in
// runs of four: F is a multiple of 4, and x at a multiple of 16.
template <bool Fours>
class Part {
 public:
  __device__ void load(const float* x, const __half* weights, const LinearShape& p, int packed_row,
                       int first_row, int first_output, int first) {
    constexpr int kWidth = Fours ? 4 : 1;
#pragma unroll
    for (int i = 0; i < kInputs; i += kWidth) {
      const int index = (i / kWidth * kThreads + threadIdx.x) * kWidth;
      const int row = first_row + index / kDepth, f = first + index % kDepth;
      const bool some = row < p.n && f < p.in_features;
      const float* const from = x + static_cast<std::int64_t>(row) * p.in_features + f;
      if constexpr (Fours) {
        const float4 run = some ? *reinterpret_cast<const float4*>(from) : float4{};
        x_[i] = run.x;
        x_[i + 1] = run.y;
        x_[i + 2] = run.z;
        x_[i + 3] = run.w;
      } else {
        x_[i] = some ? *from : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int index = (i * kThreads + threadIdx.x) * kRun;
      const int m = first_output + index / kDepth, f = first + index % kDepth;
      const bool some = m < p.out_features && f < packed_row;
      const __half* const from = weights + static_cast<std::int64_t>(m) * packed_row + f;
      weights_[i] = some ? *reinterpret_cast<const uint4*>(from) : uint4{};
    }
  }

  // Returns whether a finite x became an infinity.
  __device__ bool store(__half (&x)[kTile][kPitch], __half (&weights)[kTile][kPitch]) const {
    constexpr int kWidth = Fours ? 4 : 1;
    bool past = false;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      const int index = (i / kWidth * kThreads + threadIdx.x) * kWidth + i % kWidth;
      x[index / kDepth][index % kDepth] = __float2half_rn(x_[i]);
      past |= is_past_float16(x_[i]);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int index = (i * kThreads + threadIdx.x) * kRun;
      *reinterpret_cast<uint4*>(&weights[index / kDepth][index % kDepth]) = weights_[i];
    }
    return past;
  }

 private:
  float x_[kInputs];
  uint4 weights_[kPieces];
};

template <bool Fours>
__global__ void __launch_bounds__(kThreads)
    linear_mma_kernel(const float* __restrict__ input,    // [N, F]
                      const __half* __restrict__ packed,  // [M, F], rows of whole pieces
                      const float* __restrict__ bias,     // [M] or null
                      float* __restrict__ output,         // [N, M]
                      const LinearShape p, int packed_row, const Activation activation,
                      const Overflow overflow) {
  __shared__ __align__(16) __half x[kTile][kPitch];
  __shared__ __align__(16) __half weights[kTile][kPitch];
  const int first_row = blockIdx.y * kTile, first_output = blockIdx.x * kTile;
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const int row = warp / 2 * 32 + lane / 4, column = warp % 2 * 32 + lane / 4;
  const int pair = lane % 4 * 2;

  float accumulators[kRows][kColumns][4] = {};
  Part<Fours> part;
  bool past = false;
  part.load(input, packed, p, packed_row, first_row, first_output, 0);
  for (int first = 0; first < p.in_features; first += kDepth) {
    past |= part.store(x, weights);
    __syncthreads();
    if (first + kDepth < p.in_features) {
      part.load(input, packed, p, packed_row, first_row, first_output, first + kDepth);
    }
#pragma unroll
    for (int k = 0; k < kDepth; k += 8) {
      std::uint32_t a[kRows][2], b[kColumns];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        a[i][0] = pair_at(&x[row + 16 * i][k + pair]);
        a[i][1] = pair_at(&x[row + 16 * i + 8][k + pair]);
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) b[j] = pair_at(&weights[column + 8 * j][k + pair]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) multiply(accumulators[i][j], a[i], b[j]);
      }
    }
    __syncthreads();
  }
  if (past) tell(overflow);

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        const int n = first_row + row + 16 * i + at / 2 * 8;
        const int m = first_output + warp % 2 * 32 + 8 * j + pair + at % 2;
        if (n >= p.n || m >= p.out_features) continue;
        const float sum = accumulators[i][j][at] + (bias ? bias[m] : 0.0f);
        output[static_cast<std::int64_t>(n) * p.out_features + m] = apply(activation, sum);
      }
    }
  }
}

__global__ void linear_mma_pack_kernel(const float* __restrict__ weight,  // [M, F]
                                       __half* __restrict__ packed,       // [M, packed_row]
                                       int features, int packed_row, std::int64_t size) {
  const std::int64_t index = grid_thread();
  if (index >= size) return;
  const std::int64_t m = index / packed_row;
  const int f = static_cast<int>(index - m * packed_row);
  packed[index] = __float2half_rn(f < features ? weight[m * features + f] : 0.0f);
}

}  // namespace

std::int64_t linear_mma_packed(const LinearShape& shape, int) {
  return std::int64_t{2} * shape.out_features * padded(shape.in_features);
}

void linear_mma_pack(const float* weight, void* packed, const LinearShape& shape, Stream stream) {
  const int row = padded(shape.in_features);
  const std::int64_t size = std::int64_t{shape.out_features} * row;
  linear_mma_pack_kernel<<<blocks_for(size), kBlockThreads, 0, stream>>>(
      weight, static_cast<__half*>(packed), shape.in_features, row, size);
  CUDA_CHECK_LAUNCH("linear_mma_pack_kernel");
}

void linear_mma(const float* input, const void* packed, float* output, const LinearShape& shape,
                const Epilogue& epilogue, Stream stream) {
  if (epilogue.residual.data || !is_aligned(packed, 16)) {
    throw std::invalid_argument(
        "linear_mma: expected packed weights at a multiple of 16, and no residual");
  }
  constexpr int kMostRows = 65535 * kTile;  // of a grid
  const bool fours = shape.in_features % 4 == 0 && is_aligned(input, 16);
  const auto kernel = fours ? linear_mma_kernel<true> : linear_mma_kernel<false>;
  for (int first = 0; first < shape.n; first += kMostRows) {
    LinearShape p = shape;
    p.n = std::min(kMostRows, shape.n - first);
    const dim3 grid((p.out_features + kTile - 1) / kTile, (p.n + kTile - 1) / kTile);
    kernel<<<grid, kThreads, 0, stream>>>(
        input + std::int64_t{first} * p.in_features, static_cast<const __half*>(packed),
        epilogue.bias, output + std::int64_t{first} * p.out_features, p, padded(p.in_features),
        epilogue.activation, epilogue.overflow);
    CUDA_CHECK_LAUNCH("linear_mma_kernel");
  }
}

}  // namespace cnn_engine::cuda
