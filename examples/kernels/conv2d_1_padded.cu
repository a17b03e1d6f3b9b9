// Step 1 again, without the test of bounds: a first kernel copies the images with their zeros
// around them, and the loop over the window then reads whatever is there. A test per
// multiply-add goes, and a pass over all inputs comes.
//
// operator: conv2d
// workspace: 4 * n * c * (h + pad_top + pad_bottom) * (w + pad_left + pad_right)
// launch: conv2d_pad<<<ceil_div(n * c * (h + pad_top + pad_bottom) * (w + pad_left + pad_right),
// 256),
//         256>>>(x, workspace, shape);
// launch: conv2d_padded<<<dim3(n * k, ceil_div(out_h, 16), ceil_div(out_w, 16)), dim3(16, 16)>>>(
//         workspace, weight, bias, y, shape);
#include "cnn_engine/kernel.h"

extern "C" __global__ void conv2d_pad(const float* x, float* padded, Conv2d shape) {
  const int rows = shape.h + shape.pad_top + shape.pad_bottom;
  const int columns = shape.w + shape.pad_left + shape.pad_right;
  const int place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= shape.n * shape.c * rows * columns) return;
  const int row = place / columns % rows - shape.pad_top, column = place % columns - shape.pad_left;
  const bool inside = row >= 0 && row < shape.h && column >= 0 && column < shape.w;
  const int plane = place / columns / rows;
  padded[place] = inside ? x[(plane * shape.h + row) * shape.w + column] : 0.0f;
}

extern "C" __global__ void conv2d_padded(const float* padded, const float* weight,
                                         const float* bias, float* y, Conv2d shape) {
  const int j = blockIdx.z * blockDim.x + threadIdx.x;
  const int i = blockIdx.y * blockDim.y + threadIdx.y;
  const int n = blockIdx.x / shape.k, f = blockIdx.x % shape.k;
  if (i >= shape.out_h || j >= shape.out_w) return;
  const int rows = shape.h + shape.pad_top + shape.pad_bottom;
  const int columns = shape.w + shape.pad_left + shape.pad_right;
  const int channels = shape.c / shape.groups;
  const int first = f / (shape.k / shape.groups) * channels;
  float sum = bias ? bias[f] : 0.0f;
  for (int c = 0; c < channels; ++c)
    for (int r = 0; r < shape.r; ++r)
      for (int s = 0; s < shape.s; ++s) {
        const int row = i * shape.stride_h + r * shape.dilation_h;
        const int column = j * shape.stride_w + s * shape.dilation_w;
        sum += padded[((n * shape.c + first + c) * rows + row) * columns + column] *
               weight[((f * channels + c) * shape.r + r) * shape.s + s];
      }
  y[((n * shape.k + f) * shape.out_h + i) * shape.out_w + j] = sum;
}
