// Depthwise convolutions of float32 in boxes: a block makes a box of positions of 32 channels. The
// copy engine brings all of the image that their windows read at once, zeros where it ends, so that
// no thread waits for one load after another; a lane makes a channel, a warp `Rows` rows. With
// Means a block adds up what it made: its part of the means over the image's positions.
#pragma once

#include "cuda/sm80/conv2d_nhwc_depthwise.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda {

constexpr int kBoxSide = 7;

template <int Side, int Stride, int Rows>
struct DepthwiseBox {
  static constexpr int kColumns = kBoxSide, kWarps = kBoxSide, kThreads = 32 * kWarps;
  static constexpr int kChannels = kRowBytes / 4, kRows = kWarps * Rows;  // of the box
  static constexpr int kReadColumns = (kColumns - 1) * Stride + Side;
  static constexpr int kReadRows = (kRows - 1) * Stride + Side;
  static constexpr int kBytes = kReadRows * kReadColumns * kRowBytes;
};

// What a warp's lanes have of `Rows` rows of outputs, of which the first begins at `top` in the
// box.
template <int Side, int Stride, typename T, int Rows, int ReadColumns, int Columns>
__device__ inline void sum_windows(const T (*box)[ReadColumns][32], int top, int lane,
                                   const float (&weight)[Side * Side],
                                   float (&sum)[Rows][Columns]) {
#pragma unroll
  for (int y = 0; y < (Rows - 1) * Stride + Side; ++y) {
    float x[ReadColumns];
#pragma unroll
    for (int s = 0; s < ReadColumns; ++s) x[s] = widened(box[top + y][s][lane]);
    // Row y is row r of the windows of the outputs' row (y - r) / Stride.
#pragma unroll
    for (int r = 0; r < Side; ++r) {
      if (y < r || (y - r) % Stride != 0 || (y - r) / Stride >= Rows) continue;
#pragma unroll
      for (int j = 0; j < Columns; ++j) {
        float& one = sum[(y - r) / Stride][j];
        if (r == 0) one = 0.0f;
#pragma unroll
        for (int s = 0; s < Side; ++s) one = fmaf(x[j * Stride + s], weight[r * Side + s], one);
      }
    }
  }
}

template <int Side, int Stride, int Rows, bool Means>
__global__ void __launch_bounds__(DepthwiseBox<Side, Stride, Rows>::kThreads)
    conv2d_nhwc_depthwise_box_kernel(const __grid_constant__ CUtensorMap images,
                                     const __grid_constant__ Depthwise<float> d,
                                     const __grid_constant__ Conv2dShape p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // never launched elsewhere
  using At = DepthwiseBox<Side, Stride, Rows>;
  __shared__ alignas(128) float box[At::kReadRows][At::kReadColumns][At::kChannels];
  __shared__ float totals[Means ? At::kWarps : 1][At::kChannels];
  __shared__ alignas(8) std::uint64_t phases;
  let_successors_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::uint32_t here = shared_address(&phases);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&images);
    init_mbarrier(here, 1);
    fence_mbarrier_init();
  }
  const DepthwisePosition position(d, blockIdx.x);
  const int first_channel = position.group * At::kChannels, c = first_channel + lane;
  const int first_column = position.run * At::kColumns, first_row = position.row * At::kRows;
  const int own = min(c, p.c - 1);  // lanes beyond the last channel store nothing
  float weight[Side * Side];
#pragma unroll
  for (int t = 0; t < Side * Side; ++t) weight[t] = d.packed[t * p.c + own];
  const float bias = d.bias != nullptr ? d.bias[own] : 0.0f;
  __syncthreads();
  wait_for_inputs();
  if (threadIdx.x == 0) {
    expect_tx(here, sizeof(box));
    tma_load_box(shared_address(box), &images, first_channel, first_column * Stride - p.pad_left,
                 first_row * Stride - p.pad_top, static_cast<int>(position.image), here);
  }
  wait_mbarrier(here, 0);

  float sum[Rows][At::kColumns];
  sum_windows<Side, Stride>(box, warp * Rows * Stride, lane, weight, sum);
  const int columns = d.out_w - first_column;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    const int row = first_row + warp * Rows + i;
    if (c >= p.c || row >= d.out_h) break;
    const std::int64_t at =
        (static_cast<std::int64_t>(position.image) * d.out_h + row) * d.out_w + first_column;
    float (&made)[At::kColumns] = sum[i];
#pragma unroll
    for (int j = 0; j < At::kColumns; ++j) {
      made[j] += bias;
      if (d.residual != nullptr && j < columns) {
        made[j] += d.residual[(at + j) * d.pitches.residual + c];
      }
    }
    apply<float>(d.activation, made);
#pragma unroll
    for (int j = 0; j < At::kColumns; ++j) {
      if (j < columns) d.output[(at + j) * d.pitches.y + c] = made[j];
      if (Means && j < columns) total += made[j];
    }
  }
  if constexpr (Means) {
    totals[warp][lane] = total;
    __syncthreads();
    if (warp > 0 || c >= p.c) return;
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < At::kWarps; ++i) total += totals[i][lane];
    const std::int64_t part = d.by_groups.quotient(blockIdx.x);
    d.means[part * p.c + c] = total * d.scale;
  }
#endif
}

}  // namespace cnn_engine::cuda
