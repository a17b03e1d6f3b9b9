// The first half of planning: which layers run together, and how each convolution is computed.
#pragma once

#include <vector>

#include "cpu/fused/plan.h"
#include "ops/conv2d.h"
#include "ops/max_pool2d.h"

namespace cnn_engine::cpu::fused {

// A step before its memory is laid out.
struct Operation {
  StepKind kind;
  const LayerDescription* layer;  // null: flatten at the end
  int c, h, w;                    // input
  int out_c, out_h, out_w;        // output
  int conv_h = 0, conv_w = 0;     // conv2d, before a pool
  Activation activation = Activation::none;
  bool pool = false;
  int tile_h = 0, tile_w = 0;
  TileBound bound{};
  std::vector<int> layers{};  // that it computes, by index; none: it belongs to the one before it
};

template <typename T>
T round_up(T value, T multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int pick_lanes(int channels, const FusedKernels& kernels);

// Whether the step reads what a linear layer would: values of a whole image, without rows and
// columns.
bool is_tail(StepKind kind);

Conv2dShape conv_shape(const LayerDescription& layer, int c, int h, int w);
MaxPool2dShape pool_shape(const LayerDescription& layer, int c, int h, int w);

// The layers as operations: activations and pools join what comes before them where they can.
std::vector<Operation> operations_of(const NetworkDescription& description, bool bfloat16,
                                     const FusedKernels& kernels);

}  // namespace cnn_engine::cpu::fused
