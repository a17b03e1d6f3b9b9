// Step 7, a pipeline: cp.async copies the operands of later iterations from global into shared
// memory while tensor cores work on this one, and no register holds what is on its way. Copies
// of four bytes that ask for none of them write the zeros of the padding. A block makes
// 64 filters of 128 pixels, a warp 32 x 32: eight reads of shared memory for eight mma.sync.
// Step 6 divided to find each term's channel, row and column. A table has them here: the first
// kernel makes it while it packs the weights.
//
// operator: conv2d
// computes: tf32
// requires: groups == 1 && h + pad_top + pad_bottom < 16384 && w + pad_left + pad_right < 16384
// workspace: 8 * ceil_div(c * r * s, DEPTH) * DEPTH +
//            4 * ceil_div(k, FILTERS) * FILTERS * ceil_div(c * r * s, DEPTH) * DEPTH
// launch: conv2d_pack<<<ceil_div(ceil_div(k, FILTERS) * FILTERS * ceil_div(c * r * s, DEPTH) *
// DEPTH,
//         256), 256>>>(weight, workspace, shape);
// launch: conv2d_cp_async<<<dim3(ceil_div(n * out_h * out_w, PIXELS), ceil_div(k, FILTERS)),
//         THREADS>>>(x, workspace, bias, y, shape);
#include "cnn_engine/kernel.h"

#define PIXELS 128
#define FILTERS 64
#define DEPTH 16
#define STAGES 3
#define THREADS 256
#define STRIDE 136  // a row of shared memory: 8 more, so that a warp's reads meet no bank twice

__device__ unsigned tf32(float value) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}

template <int Bytes>
__device__ void copy_async(void* to, const void* from, int bytes = Bytes) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from),
               "n"(Bytes), "r"(bytes)
               : "memory");
}

// Writes the table, (offset in an image, row << 16 | column) of each term, then the weights:
// packed[block of filters][iteration][half of its terms][16 filters][lane][4], the operand of a
// lane: rows l / 4 and l / 4 + 8, columns l % 4 and l % 4 + 4.
extern "C" __global__ void conv2d_pack(const float* weight, float* workspace, Conv2d shape) {
  const int terms = shape.c * shape.r * shape.s, steps = (terms + DEPTH - 1) / DEPTH;
  const int place = blockIdx.x * 256 + threadIdx.x;
  if (place >= (shape.k + FILTERS - 1) / FILTERS * FILTERS * steps * DEPTH) return;
  int2* table = reinterpret_cast<int2*>(workspace);
  float* packed = workspace + 2 * steps * DEPTH;
  if (place < steps * DEPTH) {
    const int s = place % shape.s * shape.dilation_w;
    const int r = place / shape.s % shape.r * shape.dilation_h;
    const int c = place / shape.s / shape.r;
    // What is behind the last term lies below every image.
    table[place] = place < terms ? make_int2((c * shape.h + r) * shape.w + s, r << 16 | s)
                                 : make_int2(0, 32767 << 16);
  }
  const int part = place % 4, lane = place / 4 % 32, tile = place / 128 % 4;
  const int half = place / 512 % 2, step = place / 1024 % steps, block = place / 1024 / steps;
  const int filter = block * FILTERS + tile * 16 + lane / 4 + part % 2 * 8;
  const int term = step * DEPTH + half * 8 + lane % 4 + part / 2 * 4;
  const bool inside = filter < shape.k && term < terms;
  packed[place] = __uint_as_float(tf32(inside ? weight[filter * terms + term] : 0.0f));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_cp_async(const float* __restrict__ x, const float* __restrict__ workspace,
                    const float* __restrict__ bias, float* __restrict__ y, Conv2d shape) {
  __shared__ float4 weights[STAGES][2][4][32];
  __shared__ float columns[STAGES][DEPTH][STRIDE];
  const int area = shape.out_h * shape.out_w, pixels = shape.n * area;
  const int steps = (shape.c * shape.r * shape.s + DEPTH - 1) / DEPTH;
  const int2* table = reinterpret_cast<const int2*>(workspace);
  const float4* packed =
      reinterpret_cast<const float4*>(workspace + 2 * steps * DEPTH) + blockIdx.y * steps * THREADS;
  // What this thread copies: always the same pixel, half of the terms.
  const int own = threadIdx.x % PIXELS, first = threadIdx.x / PIXELS * (DEPTH / 2);
  const int pixel = blockIdx.x * PIXELS + own;
  const int left = pixel % shape.out_w * shape.stride_w - shape.pad_left;
  int top = pixel % area / shape.out_w * shape.stride_h - shape.pad_top;
  const long start =
      static_cast<long>(pixel / area) * shape.c * shape.h * shape.w + top * shape.w + left;
  if (pixel >= pixels) top = -65536;  // above every image

  auto fetch = [&](int step) {
    if (step < steps) {
      const int stage = step % STAGES;
#pragma unroll
      for (int t = first; t < first + DEPTH / 2; ++t) {
        const int2 term = table[step * DEPTH + t];
        const unsigned row = top + (term.y >> 16), column = left + (term.y & 65535);
        const bool inside = row < shape.h && column < shape.w;
        copy_async<4>(&columns[stage][t][own], inside ? x + start + term.x : x, inside ? 4 : 0);
      }
      copy_async<16>(&weights[stage][0][0][0] + threadIdx.x, packed + step * THREADS + threadIdx.x);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = warp / 4 * 2, across = warp % 4 * 32;  // of 16 filters; of pixels
  float sum[2][4][4] = {};
  for (int step = 0; step < STAGES - 1; ++step) fetch(step);
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();  // this stage is there for all, and nobody reads the one before any more
    fetch(step + STAGES - 1);
    const int stage = step % STAGES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 a[2] = {weights[stage][half][tile][lane], weights[stage][half][tile + 1][lane]};
#pragma unroll
      for (int piece = 0; piece < 4; ++piece) {
        const float* b = &columns[stage][half * 8 + lane % 4][across + piece * 8 + lane / 4];
        const unsigned b0 = tf32(b[0]), b1 = tf32(b[4 * STRIDE]);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float* d = sum[m][piece];
          asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
              "{%8,%9}, {%0,%1,%2,%3};"
              : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
              : "r"(__float_as_uint(a[m].x)), "r"(__float_as_uint(a[m].y)),
                "r"(__float_as_uint(a[m].z)), "r"(__float_as_uint(a[m].w)), "r"(b0), "r"(b1));
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int piece = 0; piece < 4; ++piece)
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int filter = blockIdx.y * FILTERS + (tile + m) * 16 + lane / 4 + part / 2 * 8;
        const int at = blockIdx.x * PIXELS + across + piece * 8 + lane % 4 * 2 + part % 2;
        if (filter < shape.k && at < pixels)
          y[(static_cast<long>(at / area) * shape.k + filter) * area + at % area] =
              sum[m][piece][part] + (bias ? bias[filter] : 0.0f);
      }
}
