// launch: my_conv_transpose2d<<<dim3(n * k, ceil_div(out_h, 16), ceil_div(out_w, 16)), dim3(16,
//         16)>>>(
//         x, weight, bias, y, shape);
#include "cnn_engine/kernel.h"

// A thread makes one output: it looks for the inputs whose filters reach it.
extern "C" __global__ void my_conv_transpose2d(const float* x, const float* weight,
                                               const float* bias, float* y, ConvTranspose2d shape) {
  const int j = blockIdx.z * blockDim.x + threadIdx.x;
  const int i = blockIdx.y * blockDim.y + threadIdx.y;
  const int n = blockIdx.x / shape.k, f = blockIdx.x % shape.k;
  if (i >= shape.out_h || j >= shape.out_w) return;
  const int filters = shape.k / shape.groups, channels = shape.c / shape.groups;
  const int first = f / filters * channels;
  float sum = bias ? bias[f] : 0.0f;
  for (int c = first; c < first + channels; ++c)
    for (int r = 0; r < shape.r; ++r)
      for (int s = 0; s < shape.s; ++s) {
        const int row = i + shape.pad_top - r * shape.dilation_h;
        const int column = j + shape.pad_left - s * shape.dilation_w;
        if (row < 0 || column < 0 || row % shape.stride_h || column % shape.stride_w) continue;
        if (row / shape.stride_h >= shape.h || column / shape.stride_w >= shape.w) continue;
        sum += x[((n * shape.c + c) * shape.h + row / shape.stride_h) * shape.w +
                 column / shape.stride_w] *
               weight[((c * filters + f % filters) * shape.r + r) * shape.s + s];
      }
  y[((n * shape.k + f) * shape.out_h + i) * shape.out_w + j] = sum;
}
