// cnn_engine._cuda.FusedNetwork: a network described by Python, its weights taken from host memory.
#include "ops/fused_cuda.h"

#include "bindings/description.h"
#include "bindings/no_gil.h"
#include "runtime/device.h"
#include "runtime/floating_point.h"

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

int limit_or_none(const py::object& limit) {
  return limit.is_none() ? cuda::FusedNetwork::kNoLimit : limit.cast<int>();
}

// Without a device given: the current one.
int device_or_current(const py::object& device) {
  return device.is_none() ? cuda::current_device() : device.cast<int>();
}

}  // namespace

void add_fused(py::module_& module) {
  using cuda::FusedNetwork;
  py::class_<FusedNetwork>(module, "FusedNetwork")
      .def(py::init([](const py::sequence& input, float scale, float offset,
                       const py::sequence& layers, const std::string& dtype,
                       const py::object& device, const py::object& shared_limit,
                       const py::bytes& program) {
             const FloatingPointMode mode;  // in which weights are packed on the host
             return FusedNetwork(describe(input, scale, offset, layers), dtype_of(dtype),
                                 device_or_current(device), limit_or_none(shared_limit), program);
           }),
           py::arg("shape"), py::arg("scale"), py::arg("offset"), py::arg("layers"),
           py::arg("dtype"), py::arg("device") = py::none(), py::arg("_shared_limit") = py::none(),
           py::arg("program") = py::bytes())
      .def_static(
          "why_not",
          [](const py::sequence& input, float scale, float offset, const py::sequence& layers,
             const std::string& dtype, const py::object& device, const py::object& shared_limit,
             const py::bytes& program) {
            return FusedNetwork::why_not(describe(input, scale, offset, layers), dtype_of(dtype),
                                         device_or_current(device), limit_or_none(shared_limit),
                                         program);
          },
          py::arg("shape"), py::arg("scale"), py::arg("offset"), py::arg("layers"),
          py::arg("dtype"), py::arg("device") = py::none(), py::arg("_shared_limit") = py::none(),
          py::arg("program") = py::bytes())
      .def_static(
          "source",
          [](const py::sequence& input, float scale, float offset, const py::sequence& layers,
             const std::string& dtype, const py::object& device) {
            return FusedNetwork::source(
                describe(input, scale, offset, layers), dtype_of(dtype),
                device.is_none() ? FusedNetwork::kNoDevice : device.cast<int>());
          },
          py::arg("shape"), py::arg("scale"), py::arg("offset"), py::arg("layers"),
          py::arg("dtype"), py::arg("device") = py::none(),
          "The CUDA source of the network's program, \"\" if it is compiled in for the device.")
      .def("instrument",
           [](FusedNetwork& network, const py::bytes& program) { network.instrument(program); })
      .def_property_readonly("is_instrumented", &FusedNetwork::is_instrumented)
      .def("run",
           [](const FusedNetwork& network, Address images, bool is_uint8, int n, Address output,
              Address stream) {
             network.run(in<void>(images), is_uint8, n, out(output),
                         reinterpret_cast<Stream>(stream));
           })
      .def("run_timed",
           [](const FusedNetwork& network, Address images, bool is_uint8, int n, Address output,
              Address stream, Address ticks) {
             network.run_timed(in<void>(images), is_uint8, n, out(output),
                               reinterpret_cast<Stream>(stream),
                               reinterpret_cast<unsigned long long*>(ticks));
           })
      .def_property_readonly("parts",
                             [](const FusedNetwork& network) { return tuples(network.parts()); })
      .def_property_readonly("outputs", &FusedNetwork::outputs)
      .def_property_readonly("instantiation", &FusedNetwork::instantiation)
      .def_property_readonly("shared_bytes", &FusedNetwork::shared_bytes);
  // float32 multiply-adds a second that the current device reaches when it does nothing else.
  module.def("measure_fma_peak", &cuda::measure_fma_peak, py::call_guard<NoGil>());
}

}  // namespace cnn_engine::bindings
