// max_pool2d on CUDA: one thread makes one output element.
#include "cuda/common/launch.cuh"
#include "ops/max_pool2d.h"
#include "ops/window.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

__global__ void max_pool2d_kernel(const float* __restrict__ input,  // [N, C, H, W]
                                  float* __restrict__ output,       // [N, C, OH, OW]
                                  const MaxPool2dShape p) {
  const std::int64_t thread = grid_thread();
  if (thread >= p.output_size()) return;
  const unsigned index = static_cast<unsigned>(thread);
  const unsigned out_w = p.out_w();
  const unsigned out_h = p.out_h();
  const unsigned row = index / out_w;
  const unsigned map = row / out_h;
  const int top = static_cast<int>(row - map * out_h) * p.stride_h - p.pad_top;
  const int left = static_cast<int>(index - row * out_w) * p.stride_w - p.pad_left;
  const float* image = input + static_cast<std::int64_t>(map) * (p.h * p.w);
  float best = -INFINITY;
  const int y_end = end_inside(top, p.r, p.dilation_h, p.h);
  const int x_end = end_inside(left, p.s, p.dilation_w, p.w);
  for (int y = first_inside(top, p.dilation_h); y < y_end; y += p.dilation_h) {
    for (int x = first_inside(left, p.dilation_w); x < x_end; x += p.dilation_w) {
      const float value = image[y * p.w + x];
      if (value > best || value != value) best = value;  // a NaN wins and, as best, stays
    }
  }
  output[index] = best;
}

}  // namespace

void max_pool2d(const float* input, float* output, const MaxPool2dShape& shape, Stream stream) {
  const std::int64_t image_in = std::int64_t{shape.c} * shape.h * shape.w;
  const std::int64_t image_out = std::int64_t{shape.c} * shape.out_h() * shape.out_w();
  for_each_part_of_batch(shape.n, image_out, [&](std::int64_t first, int images) {
    MaxPool2dShape part = shape;
    part.n = images;
    max_pool2d_kernel<<<blocks_for(part.output_size()), kBlockThreads, 0, stream>>>(
        input + first * image_in, output + first * image_out, part);
    CUDA_CHECK_LAUNCH("max_pool2d_kernel");
  });
}

}  // namespace cnn_engine::cuda
