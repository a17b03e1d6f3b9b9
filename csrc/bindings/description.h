// A network as Python gives it, as both fused variants take it.
#pragma once

#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/address.h"
#include "ops/network.h"

namespace cnn_engine::bindings {

using Input = std::tuple<int, int, int>;  // channels, height, width
// kind, out_channels, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, weight, bias (0: none)
using Layer = std::tuple<std::string, int, int, int, int, int, int, int, Address, Address>;

inline LayerKind kind_of(const std::string& name) {
  if (name == "conv2d" || name == "conv") return LayerKind::conv2d;
  if (name == "relu") return LayerKind::relu;
  if (name == "tanh") return LayerKind::tanh;
  if (name == "max_pool2d" || name == "pool") return LayerKind::max_pool2d;
  if (name == "linear" || name == "fc") return LayerKind::linear;
  if (name == "softmax") return LayerKind::softmax;
  throw std::invalid_argument(
      "kind: expected conv2d, relu, tanh, max_pool2d, linear or softmax, found '" + name + "'");
}

inline NetworkDescription describe(const Input& input, float scale, float offset,
                                   const std::vector<Layer>& layers) {
  NetworkDescription network{
      std::get<0>(input), std::get<1>(input), std::get<2>(input), scale, offset, {}};
  for (const Layer& layer : layers) {
    LayerDescription to;
    Address weight = 0, bias = 0;
    std::string kind;
    std::tie(kind, to.out_channels, to.kernel_h, to.kernel_w, to.stride_h, to.stride_w, to.pad_h,
             to.pad_w, weight, bias) = layer;
    to.kind = kind_of(kind);
    to.weight = in(weight);
    to.bias = in(bias);
    network.layers.push_back(to);
  }
  return network;
}

}  // namespace cnn_engine::bindings
