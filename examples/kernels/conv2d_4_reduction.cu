// Step 4, a reduction: the 32 lanes of a warp share one output's sum, each takes every 32nd
// term, and shuffles add up what they have in five steps. It keeps a GPU busy where there are
// few outputs with long sums; where there are many outputs, as here, shuffles and the lanes
// without a term are what it costs.
//
// operator: conv2d
// requires: groups == 1
// launch: conv2d_reduction<<<ceil_div(n * k * out_h * out_w, WARPS), dim3(32, WARPS)>>>(x,
//         weight, bias, y, shape);
#include "cnn_engine/kernel.h"

#define WARPS 8

extern "C" __global__ void conv2d_reduction(const float* x, const float* weight, const float* bias,
                                            float* y, Conv2d shape) {
  const int place = blockIdx.x * WARPS + threadIdx.y;
  if (place >= shape.n * shape.k * shape.out_h * shape.out_w) return;  // the whole warp
  const int j = place % shape.out_w, i = place / shape.out_w % shape.out_h;
  const int f = place / (shape.out_w * shape.out_h) % shape.k;
  const int n = place / (shape.out_w * shape.out_h * shape.k);
  const int terms = shape.c * shape.r * shape.s;
  float sum = 0.0f;
  for (int t = threadIdx.x; t < terms; t += 32) {
    const int s = t % shape.s, r = t / shape.s % shape.r, c = t / (shape.s * shape.r);
    const int row = i * shape.stride_h + r * shape.dilation_h - shape.pad_top;
    const int column = j * shape.stride_w + s * shape.dilation_w - shape.pad_left;
    if (row >= 0 && row < shape.h && column >= 0 && column < shape.w)
      sum += x[((n * shape.c + c) * shape.h + row) * shape.w + column] * weight[f * terms + t];
  }
  for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffff, sum, half);
  if (threadIdx.x == 0) y[place] = sum + (bias ? bias[f] : 0.0f);
}
