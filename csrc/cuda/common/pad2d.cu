// pad2d on CUDA: one thread makes one output element, border or copy.
#include "cuda/common/launch.cuh"
#include "ops/pad2d.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

__global__ void pad2d_kernel(const float* __restrict__ input,  // [N, C, H, W]
                             float* __restrict__ output,       // [N, C, OH, OW]
                             const Pad2dShape p) {
  const std::int64_t thread = grid_thread();
  if (thread >= p.output_size()) return;
  const unsigned index = static_cast<unsigned>(thread);
  const unsigned out_w = p.out_w();
  const unsigned out_h = p.out_h();
  const unsigned row = index / out_w;
  const unsigned map = row / out_h;
  const int y = static_cast<int>(row - map * out_h) - p.pad_top;
  const int x = static_cast<int>(index - row * out_w) - p.pad_left;
  const bool inside = y >= 0 && y < p.h && x >= 0 && x < p.w;
  output[index] = inside ? input[static_cast<std::int64_t>(map) * (p.h * p.w) + y * p.w + x] : 0.0f;
}

}  // namespace

void pad2d(const float* input, float* output, const Pad2dShape& shape, Stream stream) {
  const std::int64_t image_in = std::int64_t{shape.c} * shape.h * shape.w;
  const std::int64_t image_out = std::int64_t{shape.c} * shape.out_h() * shape.out_w();
  for_each_part_of_batch(shape.n, image_out, [&](std::int64_t first, int images) {
    Pad2dShape part = shape;
    part.n = images;
    pad2d_kernel<<<blocks_for(part.output_size()), kBlockThreads, 0, stream>>>(
        input + first * image_in, output + first * image_out, part);
    CUDA_CHECK_LAUNCH("pad2d_kernel");
  });
}

}  // namespace cnn_engine::cuda
