// launch: my_max_pool2d<<<ceil_div(n * c * out_h * out_w, 256), 256>>>(x, y, shape);
#include "cnn_engine/kernel.h"

// A thread makes one output.
extern "C" __global__ void my_max_pool2d(const float* x, float* y, Pool2d shape) {
  const int place = blockIdx.x * blockDim.x + threadIdx.x;
  const int j = place % shape.out_w, i = place / shape.out_w % shape.out_h;
  const int plane = place / (shape.out_w * shape.out_h);
  if (plane >= shape.n * shape.c) return;
  float most = -__int_as_float(0x7f800000);  // minus infinity
  for (int r = 0; r < shape.r; ++r)
    for (int s = 0; s < shape.s; ++s) {
      const int row = i * shape.stride_h + r * shape.dilation_h - shape.pad_top;
      const int column = j * shape.stride_w + s * shape.dilation_w - shape.pad_left;
      if (row < 0 || row >= shape.h || column < 0 || column >= shape.w) continue;
      const float value = x[(plane * shape.h + row) * shape.w + column];
      if (value > most || value != value) most = value;  // NaN wins, and nothing is above it
    }
  y[place] = most;
}
