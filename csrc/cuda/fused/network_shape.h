// What a chain of layers is to the fused kernels, known at run time; and its program's source.
#pragma once

#include <string>
#include <vector>

#include "cuda/fused/interface.h"
#include "ops/network.h"

namespace cnn_engine::cuda::fused {

// A convolution with its activation and its 2x2 pooling, as Conv in geometry.cuh has them.
struct LayerShape {
  int channels, filters, kernel, pad, stride;
  LayerKind activation;  // relu, tanh, or conv2d: none
  bool pool;
};

struct NetworkShape {
  int c, h, w, classes;  // classes: of the linear layer and softmax at the end, 0: there are none
  int features;          // that the convolutions end with, of an image
  std::vector<LayerShape> layers;
};

// Reads a description. Returns "", or why no kernel here runs it; what `parts` become are the
// description's layers that each timed part of a kernel covers (ticks.cuh).
std::string read(const NetworkDescription& description, NetworkShape& network_shape,
                 std::vector<int>& parts);

bool same(const NetworkShape& a, const NetworkShape& b);

// The program of program.cuh for a chain: values of `parts` parts of the format `format` (mma.cuh).
std::string source_of(const NetworkShape& network_shape, const char* format, int parts);

}  // namespace cnn_engine::cuda::fused
