// launch: my_conv2d<<<dim3(n * k, ceil_div(out_h, 16), ceil_div(out_w, 16)), dim3(16, 16)>>>(x,
//         weight, bias, y, shape);
#include "cnn_engine/kernel.h"

// A thread makes one output: column j, row i, of filter f of image n.
extern "C" __global__ void my_conv2d(const float* x, const float* weight, const float* bias,
                                     float* y, Conv2d shape) {
  const int j = blockIdx.z * blockDim.x + threadIdx.x;
  const int i = blockIdx.y * blockDim.y + threadIdx.y;
  const int n = blockIdx.x / shape.k, f = blockIdx.x % shape.k;
  if (i >= shape.out_h || j >= shape.out_w) return;
  const int channels = shape.c / shape.groups;  // that a filter sees
  const int first = f / (shape.k / shape.groups) * channels;
  float sum = bias ? bias[f] : 0.0f;
  for (int c = 0; c < channels; ++c)
    for (int r = 0; r < shape.r; ++r)
      for (int s = 0; s < shape.s; ++s) {
        const int row = i * shape.stride_h + r * shape.dilation_h - shape.pad_top;
        const int column = j * shape.stride_w + s * shape.dilation_w - shape.pad_left;
        if (row >= 0 && row < shape.h && column >= 0 && column < shape.w)
          sum += x[((n * shape.c + first + c) * shape.h + row) * shape.w + column] *
                 weight[((f * channels + c) * shape.r + r) * shape.s + s];
      }
  y[((n * shape.k + f) * shape.out_h + i) * shape.out_w + j] = sum;
}
