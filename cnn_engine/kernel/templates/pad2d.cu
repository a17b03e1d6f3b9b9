// launch: my_pad2d<<<ceil_div(n * c * out_h * out_w, 256), 256>>>(x, y, shape);
#include "cnn_engine/kernel.h"

// A thread makes one output.
extern "C" __global__ void my_pad2d(const float* x, float* y, Pad2d shape) {
  const int place = blockIdx.x * blockDim.x + threadIdx.x;
  const int j = place % shape.out_w, i = place / shape.out_w % shape.out_h;
  const int plane = place / (shape.out_w * shape.out_h);
  if (plane >= shape.n * shape.c) return;
  const int row = i - shape.pad_top, column = j - shape.pad_left;
  const bool inside = row >= 0 && row < shape.h && column >= 0 && column < shape.w;
  y[place] = inside ? x[(plane * shape.h + row) * shape.w + column] : 0.0f;
}
