// conv_transpose2d on CUDA: one thread makes one output, from the kernel offsets that input
// elements reach it by.
#include "cuda/common/launch.cuh"
#include "ops/conv_transpose2d.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

__global__ void conv_transpose2d_kernel(const float* __restrict__ input,   // [N, C, H, W]
                                        const float* __restrict__ weight,  // [C, K / groups, R, S]
                                        const float* __restrict__ bias,    // [K] or null
                                        float* __restrict__ output,        // [N, K, OH, OW]
                                        const ConvTranspose2dShape p) {
  const std::int64_t thread = grid_thread();
  if (thread >= p.output_size()) return;
  const unsigned index = static_cast<unsigned>(thread);
  const unsigned out_w = p.out_w(), out_h = p.out_h();
  const unsigned row = index / out_w, map = row / out_h, n = map / p.k, k = map - n * p.k;
  const int y = static_cast<int>(row - map * out_h) + p.pad_top;
  const int x = static_cast<int>(index - row * out_w) + p.pad_left;
  const int channels = p.group_channels(), filters = p.group_filters();
  const int group = k / filters;
  const int kernel_offsets = filters * p.r * p.s;  // of a channel
  const float* image =
      input + (static_cast<std::int64_t>(n) * p.c + group * channels) * (p.h * p.w);
  const float* filter = weight + static_cast<std::int64_t>(group) * channels * kernel_offsets +
                        (k - group * filters) * (p.r * p.s);
  float sum = 0.0f;
  for (int c = 0; c < channels; ++c, image += p.h * p.w, filter += kernel_offsets) {
    for (int r = 0; r < p.r; ++r) {
      const int from_y = y - r * p.dilation_h, i = from_y / p.stride_h;
      if (from_y < 0 || i >= p.h || i * p.stride_h != from_y) continue;
      for (int s = 0; s < p.s; ++s) {
        const int from_x = x - s * p.dilation_w, j = from_x / p.stride_w;
        if (from_x < 0 || j >= p.w || j * p.stride_w != from_x) continue;
        sum += image[i * p.w + j] * filter[r * p.s + s];
      }
    }
  }
  output[index] = bias ? sum + bias[k] : sum;
}

}  // namespace

void conv_transpose2d(const float* input, const float* weight, const float* bias, float* output,
                      const ConvTranspose2dShape& shape, Stream stream) {
  const std::int64_t image_in = std::int64_t{shape.c} * shape.h * shape.w;
  const std::int64_t image_out = std::int64_t{shape.k} * shape.out_h() * shape.out_w();
  for_each_part_of_batch(shape.n, image_out, [&](std::int64_t first, int images) {
    ConvTranspose2dShape part = shape;
    part.n = images;
    conv_transpose2d_kernel<<<blocks_for(part.output_size()), kBlockThreads, 0, stream>>>(
        input + first * image_in, weight, bias, output + first * image_out, part);
    CUDA_CHECK_LAUNCH("conv_transpose2d_kernel");
  });
}

}  // namespace cnn_engine::cuda
