// dense_layer on CUDA: the convolution of 3x3 that ends a layer of a dense block, and the one of
// 1x1 that the next layer begins with:
//
//   y = inner(conv3x3(e) + b1);  z = outer(conv1x1(max(floor, [x, y] * scale + shift)) + b2)
//
// [x, y] are the channels of the block so far and those of y. The shape is the 3x3 convolution's,
// of 128 channels and 32 filters, of stride 1, with one pixel of zeros around. The functions
// are clamps: none, relu or clip. Sums are float32, in a fixed order: the same bits in every run.
//
// Layouts: e [N,H,W,128], x [N,H,W,before], y [N,H,W,32], z [N,H,W,128], float16 or bfloat16 as the
// weights are packed; x, y and z may be columns of wider rows, whose pitches are multiples of 8. b1
// [32] and b2 [128] may be null; scale and shift [before + 32]; float32.
//
// The scale and shift are [before + 32], for all images; overflow is the last epilogue's. Of a
// Launch the ready channels and what holds are heeded.
#pragma once

#include <array>

#include "ops/conv2d_nhwc.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

struct DenseLayerShape {
  static constexpr bool kPassedByMember = true;

  Conv2dShape window;   // the convolution of 3x3
  int before, filters;  // channels of x, and of z
};

struct DenseLayerImages {
  static constexpr bool kPassedByMember = true;

  ConstImages x;  // [N, H, W], before channels
  const void* e;  // [N, H, W, 128]
  Images y;       // [N, H, W], 32 channels
  Images z;       // [N, H, W], 128 channels
};

// 1 where a GPU makes both sooner as one kernel: GPUs of compute capability 9.0,
// as few images as two such kernels have room for at once.
std::int64_t dense_layer_takes(const DenseLayerShape& shape, const Target& target);
std::int64_t dense_layer_packed(const DenseLayerShape& shape, ElementType, int);  // bytes
void dense_layer_pack(const float* first,                                         // [32, 128, 3, 3]
                      const float* next,  // [128, before + 32]
                      void* packed,       // [dense_layer_packed]
                      const DenseLayerShape& shape, ElementType compute_type, Stream stream);
void dense_layer(const DenseLayerImages& images,
                 const void* packed,  // [dense_layer_packed]
                 const DenseLayerShape& shape, ElementType compute_type, const Prologue& prologue,
                 const std::array<Epilogue, 2>& epilogues, const Launch& launch);

}  // namespace cnn_engine::cuda
