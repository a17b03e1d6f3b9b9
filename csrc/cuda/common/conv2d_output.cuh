// Which output element of conv2d a flat index means, and where its sum starts.
#pragma once

#include "ops/conv2d.h"

namespace cnn_engine::cuda {

struct Conv2dOutput {
  const float* image;   // [C / groups, H, W] of its image and group
  const float* filter;  // [C / groups, R, S] of its output channel
  int k;                // output channel
  int top, left;        // the window's first row and column in the image; negative in the padding

  __device__ Conv2dOutput(const float* input, const float* weight, const Conv2dShape& p,
                          unsigned index) {
    const unsigned out_w = p.out_w();
    const unsigned out_h = p.out_h();
    const unsigned row = index / out_w;  // of [N, K, OH]
    const unsigned map = row / out_h;    // of [N, K]
    const unsigned n = map / p.k;
    k = map - n * p.k;
    top = static_cast<int>(row - map * out_h) * p.stride_h - p.pad_top;
    left = static_cast<int>(index - row * out_w) * p.stride_w - p.pad_left;
    image = input + static_cast<std::int64_t>(n) * (p.c * p.h * p.w);
    if (p.groups > 1) image += k / p.group_filters() * (p.group_channels() * p.h * p.w);
    filter = weight + static_cast<std::int64_t>(k) * p.filter_size();
  }
};

// A lane's walk over a filter's kernel offsets: every 32nd, as channel, row and column. Stepping by
// carries keeps division out of the loop.
struct WarpKernelOffsets {
  int c, r, s;
  int step_c, step_r, step_s;

  __device__ WarpKernelOffsets(const Conv2dShape& p, int lane) {
    s = lane % p.s;
    r = lane / p.s % p.r;
    c = lane / p.s / p.r;
    step_s = 32 % p.s;
    step_r = 32 / p.s % p.r;
    step_c = 32 / p.s / p.r;
  }

  __device__ void advance(const Conv2dShape& p) {
    s += step_s;
    r += step_r;
    c += step_c;
    if (s >= p.s) {
      s -= p.s;
      ++r;
    }
    if (r >= p.r) {
      r -= p.r;
      ++c;
    }
  }
};

}  // namespace cnn_engine::cuda
