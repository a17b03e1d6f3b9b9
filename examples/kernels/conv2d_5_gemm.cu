// Step 5, a matrix product: y [k, pixels] = weight [k, terms] * columns [terms, pixels], where a
// pixel is one place of one image, and columns are never written: a block gathers DEPTH terms of
// its PIXELS pixels into shared memory at a time. A thread has 4 x 4 sums in registers: 8 reads
// of shared memory for 16 multiply-adds. Any kernel, stride, padding and dilation run at the
// same speed, and pixels of several images share a block.
//
// operator: conv2d
// requires: groups == 1
// launch: conv2d_gemm<<<dim3(ceil_div(n * out_h * out_w, PIXELS), ceil_div(k, FILTERS)),
//         THREADS>>>(
//         x, weight, bias, y, shape);
#include "cnn_engine/kernel.h"

#define FILTERS 16
#define PIXELS 128
#define DEPTH 16
#define THREADS 128

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_gemm(const float* __restrict__ x, const float* __restrict__ weight,
                const float* __restrict__ bias, float* __restrict__ y, Conv2d shape) {
  __shared__ float4 a[DEPTH][FILTERS / 4];  // a term's weights of four filters side by side
  __shared__ float4 b[DEPTH][PIXELS / 4];
  const int area = shape.out_h * shape.out_w, pixels = shape.n * area;
  const int terms = shape.c * shape.r * shape.s;
  const int first = blockIdx.y * FILTERS;
  // What this thread gathers: always the same pixel.
  const int own = blockIdx.x * PIXELS + threadIdx.x;
  const int top = own % area / shape.out_w * shape.stride_h - shape.pad_top;
  const int left = own % shape.out_w * shape.stride_w - shape.pad_left;
  const float* image = x + own / area * shape.c * shape.h * shape.w;
  const int group = threadIdx.x / 32,
            lane = threadIdx.x % 32;  // of filters, and of pixels, by four
  float sum[4][4] = {};
  for (int t0 = 0; t0 < terms; t0 += DEPTH) {
#pragma unroll
    for (int t = 0; t < DEPTH; ++t) {
      const int term = t0 + t;
      const int s = term % shape.s, r = term / shape.s % shape.r, c = term / (shape.s * shape.r);
      const int row = top + r * shape.dilation_h, column = left + s * shape.dilation_w;
      const bool inside = term < terms && own < pixels && row >= 0 && row < shape.h &&
                          column >= 0 && column < shape.w;
      reinterpret_cast<float*>(b[t])[threadIdx.x] =
          inside ? image[(c * shape.h + row) * shape.w + column] : 0.0f;
    }
#pragma unroll
    for (int p = threadIdx.x; p < DEPTH * FILTERS; p += THREADS) {
      const int t = p % DEPTH, f = p / DEPTH;
      const bool inside = t0 + t < terms && first + f < shape.k;
      reinterpret_cast<float*>(a[t])[f] = inside ? weight[(first + f) * terms + t0 + t] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < DEPTH; ++t) {
      const float4 u = a[t][group], v = b[t][lane];
      const float left_of[4] = {u.x, u.y, u.z, u.w}, right_of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int f = 0; f < 4; ++f)
#pragma unroll
        for (int q = 0; q < 4; ++q) sum[f][q] += left_of[f] * right_of[q];
    }
    __syncthreads();
  }
#pragma unroll
  for (int f = 0; f < 4; ++f)
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int filter = first + 4 * group + f, pixel = blockIdx.x * PIXELS + 4 * lane + q;
      if (filter < shape.k && pixel < pixels)
        y[(pixel / area * shape.k + filter) * area + pixel % area] =
            sum[f][q] + (bias ? bias[filter] : 0.0f);
    }
}
