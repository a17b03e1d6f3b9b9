// cnn_engine._cpu.FusedNetwork.
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings/shapes.h"
#include "ops/fused_cpu.h"

namespace cnn_engine::bindings {
namespace {

// kind, out_channels, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, weight, bias
using LayerTuple = std::tuple<std::string, int, int, int, int, int, int, int, Address, Address>;

LayerKind kind_of(const std::string& name) {
  if (name == "conv2d" || name == "conv") return LayerKind::conv2d;
  if (name == "relu") return LayerKind::relu;
  if (name == "tanh") return LayerKind::tanh;
  if (name == "max_pool2d" || name == "pool") return LayerKind::max_pool2d;
  if (name == "linear" || name == "fc") return LayerKind::linear;
  if (name == "softmax") return LayerKind::softmax;
  throw std::invalid_argument(
      "kind: expected conv2d, relu, tanh, max_pool2d, linear or softmax, found '" + name + "'");
}

cpu::FusedDtype dtype_of(const std::string& name) {
  if (name == "float32") return cpu::FusedDtype::float32;
  if (name == "bfloat16") return cpu::FusedDtype::bfloat16;
  throw std::invalid_argument("dtype: expected float32 or bfloat16, found '" + name + "'");
}

NetworkDescription describe(const std::tuple<int, int, int>& shape, float scale, float offset,
                            const std::vector<LayerTuple>& layers) {
  NetworkDescription description{std::get<0>(shape), std::get<1>(shape), std::get<2>(shape), scale,
                                 offset, {}};
  for (const auto& [kind, out_channels, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w,
                    weight, bias] : layers) {
    description.layers.push_back({kind_of(kind), out_channels, kernel_h, kernel_w, stride_h,
                                  stride_w, pad_h, pad_w, in(weight), in(bias)});
  }
  return description;
}

}  // namespace

void add_fused(py::module_& module) {
  using cpu::FusedNetwork;
  py::class_<FusedNetwork>(module, "FusedNetwork",
                           "A whole network in one call: csrc/ops/fused_cpu.h.")
      .def(py::init([](const std::tuple<int, int, int>& shape, float scale, float offset,
                       const std::vector<LayerTuple>& layers, const std::string& dtype) {
             return FusedNetwork(describe(shape, scale, offset, layers), dtype_of(dtype));
           }),
           py::arg("shape"), py::arg("scale"), py::arg("offset"), py::arg("layers"),
           py::arg("dtype"))
      .def_static(
          "why_not",
          [](const std::tuple<int, int, int>& shape, float scale, float offset,
             const std::vector<LayerTuple>& layers, const std::string& dtype) {
            return FusedNetwork::why_not(describe(shape, scale, offset, layers), dtype_of(dtype));
          },
          py::arg("shape"), py::arg("scale"), py::arg("offset"), py::arg("layers"),
          py::arg("dtype"), "Why this CPU does not run the network, or an empty string.")
      .def(
          "run",
          [](const FusedNetwork& network, Address images, bool is_uint8, int n,
             Address probabilities, int threads) {
            network.run(in<char>(images), is_uint8, n, out(probabilities), threads);
          },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("outputs", &FusedNetwork::outputs)
      .def_property_readonly("instruction_set", &FusedNetwork::instruction_set)
      .def_property_readonly("multiply_adds", &FusedNetwork::multiply_adds);
  module.def("measure_fma_peak", &cpu::measure_fma_peak, py::arg("seconds"),
             py::call_guard<py::gil_scoped_release>(),
             "FLOP/s of one core with the selected instruction set.");
}

}  // namespace cnn_engine::bindings
