// launch: my_lrn<<<ceil_div(n * c * area, 256), 256>>>(x, y, shape);
#include "cnn_engine/kernel.h"

// A thread makes one output.
extern "C" __global__ void my_lrn(const float* x, float* y, Lrn shape) {
  const int place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= shape.n * shape.c * shape.area) return;
  const int c = place / shape.area % shape.c;
  float sum = 0.0f;
  for (int other = c - (shape.size - 1) / 2; other <= c + shape.size / 2; ++other)
    if (other >= 0 && other < shape.c) {
      const float value = x[place + (other - c) * shape.area];
      sum += value * value;
    }
  y[place] = x[place] / powf(shape.k + shape.alpha / shape.size * sum, shape.beta);
}
