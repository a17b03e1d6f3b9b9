// average_pool2d and lp_pool2d on CUDA: one thread makes one output element.
#include "cuda/common/launch.cuh"
#include "ops/average_pool2d.h"
#include "ops/window.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

struct Average {
  bool count_include_pad;
  __device__ float add(float sum, float x) const { return sum + x; }
  __device__ float finish(float sum, const AveragePool2dShape& p, int top, int left) const {
    return sum / p.divisor(top, left, count_include_pad);
  }
};

struct Norm1 {
  __device__ float add(float sum, float x) const { return sum + fabsf(x); }
  __device__ float finish(float sum, const AveragePool2dShape&, int, int) const { return sum; }
};

struct Norm2 {
  __device__ float add(float sum, float x) const { return sum + x * x; }
  __device__ float finish(float sum, const AveragePool2dShape&, int, int) const {
    return sqrtf(sum);
  }
};

struct NormP {
  float p;
  __device__ float add(float sum, float x) const { return sum + powf(fabsf(x), p); }
  __device__ float finish(float sum, const AveragePool2dShape&, int, int) const {
    return powf(sum, 1.0f / p);
  }
};

template <typename Function>
__global__ void average_pool2d_kernel(const float* __restrict__ input,  // [N, C, H, W]
                                      float* __restrict__ output,       // [N, C, OH, OW]
                                      const AveragePool2dShape p, const Function function) {
  const std::int64_t thread = grid_thread();
  if (thread >= p.output_size()) return;
  const unsigned index = static_cast<unsigned>(thread);
  const unsigned out_w = p.out_w(), out_h = p.out_h();
  const unsigned row = index / out_w, map = row / out_h;
  const int top = static_cast<int>(row - map * out_h) * p.stride_h - p.pad_top;
  const int left = static_cast<int>(index - row * out_w) * p.stride_w - p.pad_left;
  const float* image = input + static_cast<std::int64_t>(map) * (p.h * p.w);
  const int y_end = end_inside(top, p.r, p.dilation_h, p.h);
  const int x_end = end_inside(left, p.s, p.dilation_w, p.w);
  float sum = 0.0f;
  for (int y = first_inside(top, p.dilation_h); y < y_end; y += p.dilation_h) {
    for (int x = first_inside(left, p.dilation_w); x < x_end; x += p.dilation_w) {
      sum = function.add(sum, image[y * p.w + x]);
    }
  }
  output[index] = function.finish(sum, p, top, left);
}

template <typename Function>
void launch_average_pool2d(const float* input, float* output, const AveragePool2dShape& shape,
                           Function function, Stream stream) {
  const std::int64_t image_in = std::int64_t{shape.c} * shape.h * shape.w;
  const std::int64_t image_out = std::int64_t{shape.c} * shape.out_h() * shape.out_w();
  for_each_part_of_batch(shape.n, image_out, [&](std::int64_t first, int images) {
    AveragePool2dShape part = shape;
    part.n = images;
    average_pool2d_kernel<<<blocks_for(part.output_size()), kBlockThreads, 0, stream>>>(
        input + first * image_in, output + first * image_out, part, function);
    CUDA_CHECK_LAUNCH("average_pool2d_kernel");
  });
}

}  // namespace

void average_pool2d(const float* input, float* output, const AveragePool2dShape& shape,
                    bool count_include_pad, Stream stream) {
  launch_average_pool2d(input, output, shape, Average{count_include_pad}, stream);
}

void lp_pool2d(const float* input, float* output, const AveragePool2dShape& shape, int p,
               Stream stream) {
  if (p == 1) return launch_average_pool2d(input, output, shape, Norm1{}, stream);
  if (p == 2) return launch_average_pool2d(input, output, shape, Norm2{}, stream);
  launch_average_pool2d(input, output, shape, NormP{static_cast<float>(p)}, stream);
}

}  // namespace cnn_engine::cuda
