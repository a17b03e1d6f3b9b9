// A network as Python gives it, as both fused variants take it.
#pragma once

#include <iterator>
#include <string>
#include <vector>

#include "bindings/address.h"
#include "ops/network.h"

namespace cnn_engine::bindings {

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

// `input`: channels, height, width. Layers: kind, out_channels, kernel_h, kernel_w, stride_h,
// stride_w, pad_h, pad_w, weight, bias (0: none). Sequences, one by one: pybind11's own conversions
// of such types take as long to compile as a kernel.
inline NetworkDescription describe(const py::sequence& input, float scale, float offset,
                                   const py::sequence& layers) {
  const auto expect = [](const char* what, const py::sequence& values, std::size_t count) {
    if (values.size() == count) return;
    throw py::type_error(std::string(what) + ": expected " + std::to_string(count) +
                         " values, found " + std::to_string(values.size()));
  };
  expect("shape", input, 3);
  NetworkDescription network{
      input[0].cast<int>(), input[1].cast<int>(), input[2].cast<int>(), scale, offset, {}};
  for (const py::handle layer : layers) {
    const auto from = layer.cast<py::sequence>();
    expect("layer", from, 10);
    LayerDescription to;
    to.kind = kind_of(from[0].cast<std::string>());
    int* const sizes[] = {&to.out_channels, &to.kernel_h, &to.kernel_w, &to.stride_h,
                          &to.stride_w,     &to.pad_h,    &to.pad_w};
    for (std::size_t i = 0; i < std::size(sizes); ++i) *sizes[i] = from[1 + i].cast<int>();
    to.weight = in(from[8].cast<Address>());
    to.bias = in(from[9].cast<Address>());
    network.layers.push_back(to);
  }
  return network;
}

// As tuples of numbers.
inline py::list tuples(const std::vector<std::vector<int>>& rows) {
  py::list all;
  for (const std::vector<int>& row : rows) {
    py::tuple one(row.size());
    for (std::size_t i = 0; i < row.size(); ++i) one[i] = row[i];
    all.append(one);
  }
  return all;
}

}  // namespace cnn_engine::bindings
