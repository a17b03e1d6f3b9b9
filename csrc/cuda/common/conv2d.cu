// conv2d on CUDA: checks and the switch between the variants.
#include "cuda/common/conv2d_direct.cuh"
#include "cuda/common/conv2d_pad.cuh"
#include "cuda/common/conv2d_tiled.cuh"
#include "ops/conv2d.h"

namespace cnn_engine::cuda {
namespace {

void require_tiled_fits(const char* name, const Conv2dShape& shape) {
  if (shape.groups != 1) {
    throw std::invalid_argument(std::string(name) + ": expected 1 group, found " +
                                std::to_string(shape.groups));
  }
  if (fits_conv2d_tiled(shape)) return;
  throw std::invalid_argument(
      std::string(name) + ": expected a kernel whose tile fits into " +
      std::to_string(kTiledSharedBytes) + " bytes of shared memory, found " +
      std::to_string(shape.r) + "x" + std::to_string(shape.s) + " with stride " +
      std::to_string(shape.stride_h) + "x" + std::to_string(shape.stride_w));
}

}  // namespace

void conv2d(const float* input, const float* weight, const float* bias, float* output,
            const Conv2dShape& shape, Conv2dVariant variant, bool reduction, Stream stream) {
  if (variant == Conv2dVariant::tiled) {
    require_tiled_fits("variant tiled", shape);
    if (reduction) throw std::invalid_argument("variant tiled: expected no reduction, found one");
  }
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
      case Conv2dVariant::tiled:
        return launch_conv2d_tiled(x, weight, bias, y, part, stream);
    }
  });
}

void conv2d_step(const float* input, const float* weight, const float* bias, float* output,
                 const Conv2dShape& shape, bool relu, bool pool, Stream stream) {
  require_tiled_fits("conv2d_step", shape);
  const std::int64_t image_in = std::int64_t{shape.c} * shape.h * shape.w;
  const std::int64_t image_out = std::int64_t{shape.k} *
                                 (pool ? shape.out_h() / 2 : shape.out_h()) *
                                 (pool ? shape.out_w() / 2 : shape.out_w());
  const std::int64_t image_sums = std::int64_t{shape.k} * shape.out_h() * shape.out_w();
  for_each_part_of_batch(shape.n, image_sums, [&](std::int64_t first, int images) {
    Conv2dShape part = shape;
    part.n = images;
    launch_conv2d_tiled_step(input + first * image_in, weight, bias, output + first * image_out,
                             part, relu, pool, stream);
  });
}

}  // namespace cnn_engine::cuda
