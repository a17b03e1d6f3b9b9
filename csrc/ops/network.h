// A network as data, for kernels that run several layers, or all of them, as one (--variant fused).
//
// A chain of layers over one image [C, H, W]: each reads what the one before it wrote. `linear`
// reads its input flattened in the order channel, row, column. Pixels (uint8) enter as x * scale +
// offset; float32 input enters as it is. The meaning of each layer is its operator's contract in
// this folder.
#pragma once

#include <vector>

#include "runtime/shape.h"

namespace cnn_engine {

enum class LayerKind { conv2d, relu, tanh, max_pool2d, linear, softmax };

inline const char* name_of(LayerKind kind) {
  switch (kind) {
    case LayerKind::conv2d:
      return "conv2d";
    case LayerKind::relu:
      return "relu";
    case LayerKind::tanh:
      return "tanh";
    case LayerKind::max_pool2d:
      return "max_pool2d";
    case LayerKind::linear:
      return "linear";
    case LayerKind::softmax:
      return "softmax";
  }
  return "unknown";
}

struct LayerDescription {
  LayerKind kind;
  int out_channels = 0;            // conv2d: filters; linear: output features
  int kernel_h = 0, kernel_w = 0;  // conv2d, max_pool2d
  int stride_h = 1, stride_w = 1;  // conv2d, max_pool2d
  int pad_h = 0, pad_w = 0;        // conv2d, max_pool2d
  const float* weight = nullptr;   // conv2d [K, C, R, S]; linear [M, F]; host memory
  const float* bias = nullptr;     // [K] or [M], or null; host memory
};

struct NetworkDescription {
  int c, h, w;          // one input image
  float scale, offset;  // of pixels
  std::vector<LayerDescription> layers;
};

}  // namespace cnn_engine
