// Step 3, registers: a thread makes PIXELS neighbouring outputs of FILTERS filters, 32 sums that
// stay in registers. Shared memory, not arithmetic, was what step 2 waited for: two reads a
// multiply-add. Here a row of inputs is read once for all filters and taps, and a tap's weights,
// side by side, as two float4: 40 reads for 160 multiply-adds. The kernel's size is a constant,
// so that the loops over taps are unrolled. The whole image is in shared memory, so that no
// thread is idle at the edge of a tile.
//
// operator: conv2d
// requires: r == SIZE && s == SIZE && stride_h == 1 && stride_w == 1 && dilation_h == 1 &&
//           dilation_w == 1 && groups == 1 &&
//           4 * c * (h * w + SIZE * SIZE * FILTERS) + 4 * PIXELS <= 49152 &&
//           pad_top + pad_left + pad_bottom + pad_right == 0
// launch: conv2d_registers<<<dim3(n, ceil_div(k, FILTERS)), 128,
//         4 * (c * SIZE * SIZE * FILTERS + c * h * w + PIXELS)>>>(x, weight, bias, y, shape);
#include "cnn_engine/kernel.h"

#define SIZE 5
#define PIXELS 4
#define FILTERS 8

extern "C" __global__ void __launch_bounds__(128)
    conv2d_registers(const float* __restrict__ x, const float* __restrict__ weight,
                     const float* __restrict__ bias, float* __restrict__ y, Conv2d shape) {
  extern __shared__ float4 shared[];
  float* taps = reinterpret_cast<float*>(shared);         // [c, SIZE, SIZE, FILTERS]
  float* image = taps + shape.c * SIZE * SIZE * FILTERS;  // [c, h, w], and PIXELS more
  const int n = blockIdx.x, first = blockIdx.y * FILTERS;
  const int inputs = shape.c * shape.h * shape.w, terms = shape.c * SIZE * SIZE;
  for (int p = threadIdx.x; p < inputs + PIXELS; p += blockDim.x)
    image[p] = p < inputs ? x[n * inputs + p] : 0.0f;
  for (int p = threadIdx.x; p < terms * FILTERS; p += blockDim.x) {
    const int f = first + p % FILTERS;
    taps[p] = f < shape.k ? weight[f * terms + p / FILTERS] : 0.0f;
  }
  __syncthreads();
  const int across = (shape.out_w + PIXELS - 1) / PIXELS;
  for (int p = threadIdx.x; p < shape.out_h * across; p += blockDim.x) {
    const int i = p / across, j = p % across * PIXELS;
    float sum[FILTERS][PIXELS] = {};
    for (int c = 0; c < shape.c; ++c)
#pragma unroll
      for (int r = 0; r < SIZE; ++r) {
        const float* row = image + (c * shape.h + i + r) * shape.w + j;
        float in[PIXELS + SIZE - 1];
#pragma unroll
        for (int q = 0; q < PIXELS + SIZE - 1; ++q) in[q] = row[q];
#pragma unroll
        for (int s = 0; s < SIZE; ++s) {
          const float4* tap = shared + ((c * SIZE + r) * SIZE + s) * (FILTERS / 4);
          const float4 a = tap[0], b = tap[1];
          const float w[FILTERS] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
          for (int f = 0; f < FILTERS; ++f)
#pragma unroll
            for (int q = 0; q < PIXELS; ++q) sum[f][q] += in[q + s] * w[f];
        }
      }
#pragma unroll
    for (int f = 0; f < FILTERS; ++f)
#pragma unroll
      for (int q = 0; q < PIXELS; ++q)
        if (first + f < shape.k && j + q < shape.out_w)
          y[((n * shape.k + first + f) * shape.out_h + i) * shape.out_w + j + q] =
              sum[f][q] + (bias ? bias[first + f] : 0.0f);
  }
}
