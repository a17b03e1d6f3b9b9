// grid_sample on CUDA: a thread takes a position, finds its pixels and weights once, and reads some
// channels by them; neighbouring threads take neighbouring positions.
#include "cuda/common/launch.cuh"
#include "ops/grid_sample.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kGridChannels = 8;  // of a thread

template <int taps, int rank>
__global__ void grid_sample_kernel(const float* __restrict__ input,  // [N, C, D, H, W]
                                   const float* __restrict__ grid,   // [N, O, rank]
                                   float* __restrict__ output,       // [N, C, O]
                                   const GridSampleShape p) {
  const std::int64_t position = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (position >= std::int64_t{p.images} * p.positions) return;
  const std::int64_t image = position / p.positions;
  const int at = static_cast<int>(position - image * p.positions);
  GridPixels of[rank];
#pragma unroll
  for (int d = 0; d < rank; ++d) {
    of[d] = p.pixels(grid[position * rank + rank - 1 - d], p.sizes[3 - rank + d]);
  }
  const int first = blockIdx.y * kGridChannels;
  const int end = min(first + kGridChannels, p.channels);
  const std::int64_t plane = p.plane();
  for (int c = first; c < end; ++c) {
    const float* x = input + (image * p.channels + c) * plane;
    float sum = 0.0f;
    constexpr int kDeep = rank > 2 ? taps : 1, kHigh = rank > 1 ? taps : 1;
#pragma unroll
    for (int k = 0; k < kDeep; ++k) {
#pragma unroll
      for (int r = 0; r < kHigh; ++r) {
        int row = 0;
        float weight = 1.0f;
        if constexpr (rank > 2) row = of[0].at[k], weight = of[0].weight[k];
        if constexpr (rank > 1) {
          row = row * p.sizes[1] + of[rank - 2].at[r];
          weight *= of[rank - 2].weight[r];
        }
#pragma unroll
        for (int s = 0; s < taps; ++s) {
          const float w = weight * of[rank - 1].weight[s];
          if (w != 0.0f) sum = fmaf(w, x[row * p.sizes[2] + of[rank - 1].at[s]], sum);
        }
      }
    }
    output[(image * p.channels + c) * p.positions + at] = sum;
  }
}

template <int taps>
void launch_grid_sample(const float* input, const float* grid, float* output,
                        const GridSampleShape& p, Stream stream) {
  const dim3 blocks(blocks_for(std::int64_t{p.images} * p.positions),
                    (p.channels + kGridChannels - 1) / kGridChannels);
  const auto launch = [&](auto kernel) {
    kernel<<<blocks, kBlockThreads, 0, stream>>>(input, grid, output, p);
    CUDA_CHECK_LAUNCH("grid_sample_kernel");
  };
  if (p.rank == 1) return launch(grid_sample_kernel<taps, 1>);
  if (p.rank == 2) return launch(grid_sample_kernel<taps, 2>);
  if constexpr (taps < 4) launch(grid_sample_kernel<taps, 3>);
}

}  // namespace

void grid_sample(const float* input, const float* grid, float* output, const GridSampleShape& shape,
                 Stream stream) {
  if (shape.images == 0 || shape.positions == 0 || shape.channels == 0) return;
  switch (shape.mode) {
    case GridMode::nearest:
      return launch_grid_sample<1>(input, grid, output, shape, stream);
    case GridMode::linear:
      return launch_grid_sample<2>(input, grid, output, shape, stream);
    case GridMode::cubic:
      return launch_grid_sample<4>(input, grid, output, shape, stream);
  }
}

}  // namespace cnn_engine::cuda
