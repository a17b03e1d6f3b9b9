// The module cnn_engine._cpu: shapes (used by both devices), CPU operators, instruction sets.
#include "bindings/shapes.h"
#include "cpu/kernels.h"
#include "ops/copy.h"

namespace cnn_engine::bindings {

void add_fused(py::module_& module);  // fused_cpu.cpp

namespace {

// Adds what every shape has; its constructor validates, so that no kernel meets an impossible
// shape.
template <typename Shape, typename... Arguments>
py::class_<Shape> add_shape(py::module_& module, const char* name, Shape (*make)(Arguments...)) {
  return py::class_<Shape>(module, name)
      .def(py::init([make](Arguments... arguments) {
        const Shape shape = make(arguments...);
        shape.validate();
        return shape;
      }))
      .def_property_readonly("flops", &Shape::flops)
      .def_property_readonly("bytes", &Shape::bytes);
}

void add_shapes(py::module_& module) {
  add_shape(
      module, "Conv2dShape",
      +[](int n, int c, int h, int w, int k, int r, int s, int stride_h, int stride_w, int pad_h,
          int pad_w) { return Conv2dShape{n, c, h, w, k, r, s, stride_h, stride_w, pad_h, pad_w}; })
      .def_property_readonly("out_h", &Conv2dShape::out_h)
      .def_property_readonly("out_w", &Conv2dShape::out_w);
  add_shape(
      module, "Pad2dShape",
      +[](int n, int c, int h, int w, int pad_h, int pad_w) {
        return Pad2dShape{n, c, h, w, pad_h, pad_w};
      })
      .def_property_readonly("out_h", &Pad2dShape::out_h)
      .def_property_readonly("out_w", &Pad2dShape::out_w);
  add_shape(
      module, "MaxPool2dShape",
      +[](int n, int c, int h, int w, int r, int s, int stride_h, int stride_w, int pad_h,
          int pad_w) { return MaxPool2dShape{n, c, h, w, r, s, stride_h, stride_w, pad_h, pad_w}; })
      .def_property_readonly("out_h", &MaxPool2dShape::out_h)
      .def_property_readonly("out_w", &MaxPool2dShape::out_w);
  add_shape(
      module, "LinearShape", +[](int n, int in_features, int out_features) {
        return LinearShape{n, in_features, out_features};
      });
  add_shape(module, "SoftmaxShape", +[](int n, int classes) { return SoftmaxShape{n, classes}; });
  add_shape(
      module, "ElementwiseShape", +[](std::int64_t size, int input_itemsize) {
        return ElementwiseShape{size, input_itemsize};
      });
  py::enum_<Conv2dVariant>(module, "Conv2dVariant")
      .value("direct", Conv2dVariant::direct)
      .value("pad", Conv2dVariant::pad)
      .value("tiled", Conv2dVariant::tiled);
}

void add_operators(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def(
      "conv2d",
      [](Address input, Address weight, Address bias, Address output, const Conv2dShape& shape,
         Conv2dVariant variant, bool reduction, int threads) {
        cpu::conv2d(in(input), in(weight), in(bias), out(output), shape, variant, reduction,
                    threads);
      },
      NoGil());
  module.def(
      "pad2d",
      [](Address input, Address output, const Pad2dShape& shape, int threads) {
        cpu::pad2d(in(input), out(output), shape, threads);
      },
      NoGil());
  module.def(
      "copy",
      [](Address input, Address output, std::int64_t nbytes, int threads) {
        cpu::copy(in<void>(input), reinterpret_cast<void*>(output), nbytes, threads);
      },
      NoGil());
  module.def(
      "relu",
      [](Address input, Address output, const ElementwiseShape& shape, int threads) {
        cpu::relu(in(input), out(output), shape, threads);
      },
      NoGil());
  module.def(
      "tanh",
      [](Address input, Address output, const ElementwiseShape& shape, int threads) {
        cpu::tanh(in(input), out(output), shape, threads);
      },
      NoGil());
  module.def(
      "normalize",
      [](Address input, Address output, const ElementwiseShape& shape, float scale, float offset,
         int threads) {
        cpu::normalize(in<std::uint8_t>(input), out(output), shape, scale, offset, threads);
      },
      NoGil());
  module.def(
      "max_pool2d",
      [](Address input, Address output, const MaxPool2dShape& shape, int threads) {
        cpu::max_pool2d(in(input), out(output), shape, threads);
      },
      NoGil());
  module.def(
      "linear",
      [](Address input, Address weight, Address bias, Address output, const LinearShape& shape,
         bool reduction, int threads) {
        cpu::linear(in(input), in(weight), in(bias), out(output), shape, reduction, threads);
      },
      NoGil());
  module.def(
      "softmax",
      [](Address input, Address output, const SoftmaxShape& shape, bool reduction, int threads) {
        cpu::softmax(in(input), out(output), shape, reduction, threads);
      },
      NoGil());
}

}  // namespace

PYBIND11_MODULE(_cpu, module) {
  module.doc() =
      "Shapes, CPU operators and instruction sets; called by cnn_engine.ops, which checks.";
  add_shapes(module);
  add_operators(module);
  add_fused(module);
  module.attr("commit") = CNN_ENGINE_COMMIT;
  module.attr("compiler") = CNN_ENGINE_CXX_COMPILER;
  module.def(
      "instruction_sets",
      [] {
        const cpu::InstructionSet* sets = nullptr;
        const int count = cpu::instruction_sets(&sets);
        py::list names;
        for (int i = 0; i < count; ++i) names.append(sets[i].name);
        return names;
      },
      "The instruction sets built in that this CPU has, narrowest first.");
  module.def("select_instruction_set",
             [](const std::string& name) { cpu::select_instruction_set(name.c_str()); });
  module.def("selected_instruction_set", &cpu::selected_instruction_set);
}

}  // namespace cnn_engine::bindings
