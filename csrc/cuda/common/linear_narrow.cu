// linear_narrow on CUDA: y[n,m] = b[m] + sum over f of x[n,f] * w[m,f]
//
// Layouts: x [N,F], w [M,F], b [M] or null, y [N,M]; float32. A block of 128 threads makes 64 rows
// x 48 columns of y; a thread 4 x 6 of them in registers. 32 features of both tiles at a time come
// to shared memory, features outermost, so that a thread reads its rows as one vector and its
// columns as three. Features past F are zeros there, and rows and columns past the ends repeat the
// last and are not stored.
#include "ops/linear_narrow.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kLinearRows = 64, kLinearColumns = 48, kLinearFeatures = 32, kLinearThreads = 128;

__global__ void __launch_bounds__(kLinearThreads)
    linear_narrow_kernel(const float* __restrict__ input,   // [N, F]
                         const float* __restrict__ weight,  // [M, F]
                         const float* __restrict__ bias,    // [M] or null
                         float* __restrict__ output,        // [N, M]
                         const LinearShape p) {
  constexpr int kPad = 4;  // keeps vectors aligned and spreads the transposed stores over the banks
  __shared__ __align__(16) float x[kLinearFeatures][kLinearRows + kPad];
  __shared__ __align__(16) float w[kLinearFeatures][kLinearColumns + kPad];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8 * 6;  // of this thread, in the tile
  const int first_row = blockIdx.x * kLinearRows, first_column = blockIdx.y * kLinearColumns;
  constexpr int kWarps = kLinearThreads / 32;
  constexpr int kRowsEach = kLinearRows / kWarps, kColumnsEach = kLinearColumns / kWarps;
  // The next tiles wait in registers while this one's products are summed.
  float next_x[kRowsEach], next_w[kColumnsEach];
  const auto load = [&](int f) {
    const bool inside = f + lane < p.in_features;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const std::int64_t n = min(first_row + warp + i * kWarps, p.n - 1);
      next_x[i] = inside ? input[n * p.in_features + f + lane] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kColumnsEach; ++i) {
      const std::int64_t m = min(first_column + warp + i * kWarps, p.out_features - 1);
      next_w[i] = inside ? weight[m * p.in_features + f + lane] : 0.0f;
    }
  };
  float sum[4][6] = {};
  load(0);
  for (int f = 0; f < p.in_features; f += kLinearFeatures) {
    __syncthreads();  // the tile before this one has been read
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) x[lane][warp + i * kWarps] = next_x[i];
#pragma unroll
    for (int i = 0; i < kColumnsEach; ++i) w[lane][warp + i * kWarps] = next_w[i];
    __syncthreads();
    if (f + kLinearFeatures < p.in_features) load(f + kLinearFeatures);
#pragma unroll 8
    for (int k = 0; k < kLinearFeatures; ++k) {
      const float4 a = *reinterpret_cast<const float4*>(&x[k][row]);
      float b[6];
#pragma unroll
      for (int j = 0; j < 6; j += 2) {
        const float2 pair = *reinterpret_cast<const float2*>(&w[k][column + j]);
        b[j] = pair.x;
        b[j + 1] = pair.y;
      }
#pragma unroll
      for (int j = 0; j < 6; ++j) {
        sum[0][j] = fmaf(a.x, b[j], sum[0][j]);
        sum[1][j] = fmaf(a.y, b[j], sum[1][j]);
        sum[2][j] = fmaf(a.z, b[j], sum[2][j]);
        sum[3][j] = fmaf(a.w, b[j], sum[3][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      const int n = first_row + row + i, m = first_column + column + j;
      if (n < p.n && m < p.out_features) {
        output[std::int64_t{n} * p.out_features + m] = bias ? sum[i][j] + bias[m] : sum[i][j];
      }
    }
  }
}

}  // namespace

void linear_narrow(const float* input, const float* weight, const float* bias, float* output,
                   const LinearShape& shape, Stream stream) {
  if (shape.n == 0) return;
  const dim3 grid((shape.n + kLinearRows - 1) / kLinearRows,
                  (shape.out_features + kLinearColumns - 1) / kLinearColumns);
  linear_narrow_kernel<<<grid, kLinearThreads, 0, stream>>>(input, weight, bias, output, shape);
  CUDA_CHECK_LAUNCH("linear_narrow_kernel");
}

}  // namespace cnn_engine::cuda
