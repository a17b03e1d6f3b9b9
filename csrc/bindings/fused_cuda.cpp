// cnn_engine._cuda.FusedNetwork: a network described by Python, its weights taken from host memory.
#include "ops/fused_cuda.h"

#include "bindings/description.h"
#include "runtime/device.h"

namespace cnn_engine::bindings {
namespace {

cuda::FusedDtype dtype_of(const std::string& name) {
  if (name == "float32") return cuda::FusedDtype::float32;
  if (name == "tf32") return cuda::FusedDtype::tf32;
  if (name == "float16") return cuda::FusedDtype::float16;
  if (name == "bfloat16") return cuda::FusedDtype::bfloat16;
  throw std::invalid_argument("dtype: expected float32, tf32, float16 or bfloat16, found '" + name +
                              "'");
}

// Without a device given: the current one.
int device_or_current(const py::object& device) {
  return device.is_none() ? cuda::current_device() : device.cast<int>();
}

}  // namespace

void add_fused(py::module_& module) {
  using cuda::FusedNetwork;
  py::class_<FusedNetwork>(module, "FusedNetwork")
      .def(py::init([](const Input& input, float scale, float offset,
                       const std::vector<Layer>& layers, const std::string& dtype,
                       const py::object& device) {
             return FusedNetwork(describe(input, scale, offset, layers), dtype_of(dtype),
                                 device_or_current(device));
           }),
           py::arg("shape"), py::arg("scale"), py::arg("offset"), py::arg("layers"),
           py::arg("dtype"), py::arg("device") = py::none())
      .def_static(
          "why_not",
          [](const Input& input, float scale, float offset, const std::vector<Layer>& layers,
             const std::string& dtype, const py::object& device) {
            return FusedNetwork::why_not(describe(input, scale, offset, layers), dtype_of(dtype),
                                         device_or_current(device));
          },
          py::arg("shape"), py::arg("scale"), py::arg("offset"), py::arg("layers"),
          py::arg("dtype"), py::arg("device") = py::none())
      .def("run",
           [](const FusedNetwork& network, Address images, bool is_uint8, int n, Address output,
              Address stream) {
             network.run(in<void>(images), is_uint8, n, out(output),
                         reinterpret_cast<Stream>(stream));
           })
      .def_property_readonly("outputs", &FusedNetwork::outputs)
      .def_property_readonly("instantiation", &FusedNetwork::instantiation)
      .def_property_readonly("whole", &FusedNetwork::whole);
  // float32 multiply-adds a second that the current device reaches when it does nothing else.
  module.def("measure_fma_peak", &cuda::measure_fma_peak, py::call_guard<py::gil_scoped_release>());
}

}  // namespace cnn_engine::bindings
