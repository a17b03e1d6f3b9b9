// Step 2, shared memory: a block makes 16 x 16 outputs of one filter. For one channel after the
// other its threads bring the tile of the input with its border, and the filter's taps, into
// shared memory once; each input is then read r * s times from there, not from the cache.
//
// operator: conv2d
// requires: stride_h == 1 && stride_w == 1 && dilation_h == 1 && dilation_w == 1 &&
//         groups == 1 && r * s <= 400
// launch: conv2d_shared<<<dim3(n * k, ceil_div(out_h, TILE), ceil_div(out_w, TILE)), dim3(TILE,
//         TILE),
//         4 * ((TILE + r - 1) * (TILE + s - 1) + r * s)>>>(x, weight, bias, y, shape);
#include "cnn_engine/kernel.h"

#define TILE 16

extern "C" __global__ void conv2d_shared(const float* x, const float* weight, const float* bias,
                                         float* y, Conv2d shape) {
  extern __shared__ float tile[];  // [rows, columns], then the taps [r, s]
  const int rows = TILE + shape.r - 1, columns = TILE + shape.s - 1;
  float* taps = tile + rows * columns;
  const int n = blockIdx.x / shape.k, f = blockIdx.x % shape.k;
  const int top = blockIdx.y * TILE, left = blockIdx.z * TILE;
  const int thread = threadIdx.y * TILE + threadIdx.x;
  float sum = 0.0f;
  for (int c = 0; c < shape.c; ++c) {
    const float* plane = x + (n * shape.c + c) * shape.h * shape.w;
    for (int p = thread; p < rows * columns; p += TILE * TILE) {
      const int row = top + p / columns - shape.pad_top,
                column = left + p % columns - shape.pad_left;
      const bool inside = row >= 0 && row < shape.h && column >= 0 && column < shape.w;
      tile[p] = inside ? plane[row * shape.w + column] : 0.0f;
    }
    for (int p = thread; p < shape.r * shape.s; p += TILE * TILE)
      taps[p] = weight[(f * shape.c + c) * shape.r * shape.s + p];
    __syncthreads();  // all of the tile is there
    for (int r = 0; r < shape.r; ++r)
      for (int s = 0; s < shape.s; ++s)
        sum += tile[(threadIdx.y + r) * columns + threadIdx.x + s] * taps[r * shape.s + s];
    __syncthreads();  // nobody needs it any more
  }
  const int i = top + threadIdx.y, j = left + threadIdx.x;
  if (i < shape.out_h && j < shape.out_w)
    y[((n * shape.k + f) * shape.out_h + i) * shape.out_w + j] = sum + (bias ? bias[f] : 0.0f);
}
