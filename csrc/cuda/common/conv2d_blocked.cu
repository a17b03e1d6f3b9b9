// conv2d_blocked on CUDA: packing, and the choice between products and one channel a group.
#include "cuda/common/conv2d_blocked.cuh"
#include "cuda/common/conv2d_depthwise.cuh"
#include "ops/conv2d_blocked.h"

namespace cnn_engine::cuda {
namespace {

// One thread makes one packed value.
__global__ void conv2d_pack_kernel(const float* __restrict__ weight,  // [K, C / groups, R, S]
                                   float* __restrict__ packed,  // [groups][panels][depth][rows]
                                   const Conv2dShape p) {
  const std::int64_t index = grid_thread();
  if (index >= p.packed_size()) return;
  if (p.depthwise()) {
    packed[index] = weight[index];
    return;
  }
  const Panels panels = p.panels();
  const int row = static_cast<int>(index % panels.rows);
  const std::int64_t position = index / panels.rows;
  const int t = static_cast<int>(position % panels.depth);
  const int panel = static_cast<int>(position / panels.depth % panels.panels);
  const int group = static_cast<int>(position / panels.depth / panels.panels);
  const int filter = panel * panels.rows + row;
  const std::int64_t k = static_cast<std::int64_t>(group) * p.group_filters() + filter;
  packed[index] = filter < p.group_filters() ? weight[k * panels.depth + t] : 0.0f;
}

// Calls body(first image, part of the shape) for parts whose outputs 32 bits can count.
template <typename Body>
void for_each_part(const Conv2dShape& shape, const Body& body) {
  const std::int64_t image_out = std::int64_t{shape.k} * shape.out_h() * shape.out_w();
  for_each_part_of_batch(shape.n, image_out, [&](std::int64_t first, int images) {
    Conv2dShape part = shape;
    part.n = images;
    body(first, part);
  });
}

}  // namespace

void conv2d_pack(const float* weight, float* packed, const Conv2dShape& shape, Stream stream) {
  conv2d_pack_kernel<<<blocks_for(shape.packed_size()), kBlockThreads, 0, stream>>>(weight, packed,
                                                                                    shape);
  CUDA_CHECK_LAUNCH("conv2d_pack_kernel");
}

std::int64_t conv2d_blocked_workspace(const Conv2dShape& shape, const Target& target) {
  std::int64_t most = 0;
  if (shape.depthwise()) return most;
  for_each_part(shape, [&](std::int64_t, const Conv2dShape& part) {
    const std::int64_t bytes = 4 * ConvPlan(part, target).workspace_floats(part);
    most = bytes > most ? bytes : most;
  });
  return most;
}

void conv2d_blocked(const float* input, const float* packed, const float* bias,
                    const float* residual, float* output, void* workspace, const Conv2dShape& shape,
                    float lowest, float highest, Stream stream) {
  if (reinterpret_cast<std::uintptr_t>(packed) % 16 != 0) {
    throw std::invalid_argument("packed weights: expected an address that is a multiple of 16");
  }
  const std::int64_t image_in = std::int64_t{shape.c} * shape.h * shape.w;
  const std::int64_t image_out = std::int64_t{shape.k} * shape.out_h() * shape.out_w();
  for_each_part(shape, [&](std::int64_t first, const Conv2dShape& part) {
    const Epilogue epilogue = {bias, residual ? residual + first * image_out : nullptr, lowest,
                               highest};
    const float* x = input + first * image_in;
    float* y = output + first * image_out;
    if (shape.depthwise()) {
      launch_conv2d_depthwise(x, packed, epilogue, y, part, stream);
    } else {
      launch_conv2d_blocked(x, packed, epilogue, y, static_cast<float*>(workspace), part, stream);
    }
  });
}

}  // namespace cnn_engine::cuda
