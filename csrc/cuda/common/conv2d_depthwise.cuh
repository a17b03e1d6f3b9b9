// conv2d_blocked where each group has one channel: no product of matrices, but as many bytes as
// sums.
//
// A thread makes `Rows` outputs below each other, so that a row of the image, once read, serves all
// of them; neighbouring threads make neighbouring columns (their reads are coalesced, and the
// first-level cache serves the kernel offsets that overlap). With Side > 0: square kernels with
// dilation 1 and equal strides of Stride, compiled in, their kernel offsets in registers. Side = 0:
// any kernel, stride and dilation, a row per thread.
#pragma once

#include "cuda/common/conv2d_blocked.cuh"

namespace cnn_engine::cuda {

template <int Side, int Stride, int Rows>
__global__ void conv2d_depthwise_kernel(const float* __restrict__ input,   // [N, C, H, W]
                                        const float* __restrict__ weight,  // [K, R, S]
                                        float* __restrict__ output,        // [N, K, OH, OW]
                                        const Epilogue epilogue, const Conv2dShape p) {
  const unsigned out_w = p.out_w(), out_h = p.out_h(), bands = (out_h + Rows - 1) / Rows;
  const std::int64_t thread = grid_thread();
  if (thread >= static_cast<std::int64_t>(p.n) * p.k * bands * out_w) return;
  const unsigned index = static_cast<unsigned>(thread);  // at most as many as outputs
  const unsigned row = index / out_w, x = index - row * out_w;
  const unsigned map = row / bands, first = (row - map * bands) * Rows;
  const unsigned n = map / p.k, k = map - n * p.k;
  const int stride_h = Side > 0 ? Stride : p.stride_h, stride_w = Side > 0 ? Stride : p.stride_w;
  const int top = static_cast<int>(first) * stride_h - p.pad_top;
  const int left = static_cast<int>(x) * stride_w - p.pad_left;
  const std::int64_t plane = static_cast<std::int64_t>(n) * p.c + k / p.group_filters();
  const float* image = input + plane * (p.h * p.w);
  const float* filter = weight + static_cast<std::int64_t>(k) * p.r * p.s;
  float sum[Rows] = {};
  if constexpr (Side > 0) {
    float kernel_offsets[Side][Side];
#pragma unroll
    for (int i = 0; i < Side * Side; ++i) kernel_offsets[i / Side][i % Side] = filter[i];
#pragma unroll
    for (int i = 0; i < (Rows - 1) * Stride + Side; ++i) {
      const int y = top + i;
      float values[Side];
#pragma unroll
      for (int s = 0; s < Side; ++s) {
        const bool inside = y >= 0 && y < p.h && left + s >= 0 && left + s < p.w;
        values[s] = inside ? image[y * p.w + left + s] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < Rows; ++j) {
        const int r = i - j * Stride;
        if (r < 0 || r >= Side) continue;
#pragma unroll
        for (int s = 0; s < Side; ++s) sum[j] = fmaf(values[s], kernel_offsets[r][s], sum[j]);
      }
    }
  } else {
    for (int r = 0; r < p.r; ++r) {
      const int y = top + r * p.dilation_h;
      if (y < 0 || y >= p.h) continue;
      for (int s = 0; s < p.s; ++s) {
        const int column = left + s * p.dilation_w;
        if (column < 0 || column >= p.w) continue;
        sum[0] = fmaf(image[y * p.w + column], filter[r * p.s + s], sum[0]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < Rows; ++j) {
    if (first + j >= out_h) break;
    const std::int64_t at = (static_cast<std::int64_t>(map) * out_h + first + j) * out_w + x;
    output[at] = epilogue(sum[j], k, at);
  }
}

inline void launch_conv2d_depthwise(const float* input, const float* weight,
                                    const Epilogue& epilogue, float* output,
                                    const Conv2dShape& shape, Stream stream) {
  const auto launch = [&](auto kernel, int rows) {
    const std::int64_t threads =
        std::int64_t{shape.n} * shape.k * shape.out_w() * ((shape.out_h() + rows - 1) / rows);
    kernel<<<blocks_for(threads), kBlockThreads, 0, stream>>>(input, weight, output, epilogue,
                                                              shape);
    CUDA_CHECK_LAUNCH("conv2d_depthwise_kernel");
  };
  const bool square = shape.r == shape.s && shape.stride_h == shape.stride_w &&
                      shape.dilation_h == 1 && shape.dilation_w == 1;
  const int side = square ? shape.s : 0, stride = shape.stride_h;
  if (side == 3 && stride == 1) return launch(conv2d_depthwise_kernel<3, 1, 4>, 4);
  if (side == 3 && stride == 2) return launch(conv2d_depthwise_kernel<3, 2, 4>, 4);
  if (side == 5 && stride == 1) return launch(conv2d_depthwise_kernel<5, 1, 4>, 4);
  if (side == 5 && stride == 2) return launch(conv2d_depthwise_kernel<5, 2, 4>, 4);
  if (side == 7 && stride == 1) return launch(conv2d_depthwise_kernel<7, 1, 4>, 4);
  launch(conv2d_depthwise_kernel<0, 1, 1>, 1);
}

}  // namespace cnn_engine::cuda
