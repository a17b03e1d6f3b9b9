// Step 6, tensor cores: the product of step 5 in pieces of 16 filters x 8 pixels x 8 terms, each
// one instruction of a warp (mma.sync.m16n8k8). Operands are rounded to tf32, which has 10 bits
// where float32 has 23, and sums are float32: the line `computes` says so, and the check allows
// for that rounding and no more. A block of four warps makes 16 filters of 128 pixels, a warp
// four pieces of eight pixels. The weights are packed first, by a kernel of their own, into the
// order in which the lanes hold them: a lane then reads its four as one float4.
//
// operator: conv2d
// computes: tf32
// requires: groups == 1
// workspace: 4 * ceil_div(k, 16) * 16 * ceil_div(c * r * s, 8) * 8
// launch: conv2d_pack<<<ceil_div(ceil_div(k, 16) * ceil_div(c * r * s, 8) * 128, 128), 128>>>(
//         weight, workspace, shape);
// launch: conv2d_tensor_cores<<<dim3(ceil_div(n * out_h * out_w, PIXELS), ceil_div(k, 16)),
//         THREADS>>>(x, workspace, bias, y, shape);
#include "cnn_engine/kernel.h"

#define PIXELS 128
#define THREADS 128
#define DEPTH 16
#define STRIDE 136  // a row of shared memory: 8 more, so that a warp's reads meet no bank twice

__device__ unsigned tf32(float value) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}

// packed[block of filters][block of terms][lane][4]: lane l holds rows l/4 and l/4 + 8, columns
// l%4 and l%4 + 4.
extern "C" __global__ void conv2d_pack(const float* weight, float* packed, Conv2d shape) {
  const int terms = shape.c * shape.r * shape.s, steps = (terms + 7) / 8;
  const int place = blockIdx.x * 128 + threadIdx.x;
  if (place >= (shape.k + 15) / 16 * steps * 128) return;
  const int part = place % 4, lane = place / 4 % 32, step = place / 128 % steps;
  const int filter = place / 128 / steps * 16 + lane / 4 + part % 2 * 8;
  const int term = step * 8 + lane % 4 + part / 2 * 4;
  const bool inside = filter < shape.k && term < terms;
  packed[place] = __uint_as_float(tf32(inside ? weight[filter * terms + term] : 0.0f));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_tensor_cores(const float* __restrict__ x, const float* __restrict__ packed,
                        const float* __restrict__ bias, float* __restrict__ y, Conv2d shape) {
  __shared__ unsigned columns[DEPTH][STRIDE];
  const int area = shape.out_h * shape.out_w, pixels = shape.n * area;
  const int terms = shape.c * shape.r * shape.s, steps = (terms + 7) / 8;
  // What this thread gathers: always the same pixel.
  const int own = blockIdx.x * PIXELS + threadIdx.x;
  const int top = own % area / shape.out_w * shape.stride_h - shape.pad_top;
  const int left = own % shape.out_w * shape.stride_w - shape.pad_left;
  const float* image = x + own / area * shape.c * shape.h * shape.w;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float4* weights = reinterpret_cast<const float4*>(packed) + blockIdx.y * steps * 32 + lane;
  float sum[4][4] = {};
  for (int t0 = 0; t0 < terms; t0 += DEPTH) {
#pragma unroll
    for (int t = 0; t < DEPTH; ++t) {
      const int term = t0 + t;
      const int s = term % shape.s, r = term / shape.s % shape.r, c = term / (shape.s * shape.r);
      const int row = top + r * shape.dilation_h, column = left + s * shape.dilation_w;
      const bool inside = term < terms && own < pixels && row >= 0 && row < shape.h &&
                          column >= 0 && column < shape.w;
      columns[t][threadIdx.x] = tf32(inside ? image[(c * shape.h + row) * shape.w + column] : 0.0f);
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < DEPTH / 8; ++half) {
      const int step = t0 / 8 + half;
      if (step < steps) {
        const float4 a = weights[step * 32];
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) {
          const int column = warp * 32 + piece * 8 + lane / 4;
          const unsigned b0 = columns[half * 8 + lane % 4][column];
          const unsigned b1 = columns[half * 8 + lane % 4 + 4][column];
          float* d = sum[piece];
          asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
              "{%8,%9}, "
              "{%0,%1,%2,%3};"
              : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
              : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)),
                "r"(__float_as_uint(a.w)), "r"(b0), "r"(b1));
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int piece = 0; piece < 4; ++piece)
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int filter = blockIdx.y * 16 + lane / 4 + part / 2 * 8;
      const int pixel = blockIdx.x * PIXELS + warp * 32 + piece * 8 + lane % 4 * 2 + part % 2;
      if (filter < shape.k && pixel < pixels)
        y[(pixel / area * shape.k + filter) * area + pixel % area] =
            sum[piece][part] + (bias ? bias[filter] : 0.0f);
    }
}
