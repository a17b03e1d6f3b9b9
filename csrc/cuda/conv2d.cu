// conv2d on CUDA: checks and the switch between the variants.
#include "cuda/conv2d_direct.cuh"
#include "cuda/conv2d_pad.cuh"
#include "ops/conv2d.h"

namespace cnn_engine::cuda {

void conv2d(const float* input, const float* weight, const float* bias, float* output,
            const Conv2dShape& shape, Conv2dVariant variant, bool reduction, Stream stream) {
  const std::int64_t image_in = std::int64_t{shape.c} * shape.h * shape.w;
  const std::int64_t image_out = std::int64_t{shape.k} * shape.out_h() * shape.out_w();
  for_each_part_of_batch(shape.n, image_out, [&](std::int64_t first, int images) {
    Conv2dShape part = shape;
    part.n = images;
    const float* x = input + first * image_in;
    float* y = output + first * image_out;
    switch (variant) {
      case Conv2dVariant::direct:
        return launch_conv2d_direct(x, weight, bias, y, part, reduction, stream);
      case Conv2dVariant::pad:
        return launch_conv2d_pad(x, weight, bias, y, part, reduction, stream);
    }
  });
}

}  // namespace cnn_engine::cuda
