// cnn_engine._cpu.FusedNetwork.
#include "ops/fused_cpu.h"

#include <exception>

#include "bindings/description.h"
#include "bindings/no_gil.h"
#include "runtime/thread_pool.h"

namespace cnn_engine::bindings {
namespace {

cpu::FusedDtype dtype_of(const std::string& name) {
  if (name == "float32") return cpu::FusedDtype::float32;
  if (name == "bfloat16") return cpu::FusedDtype::bfloat16;
  throw std::invalid_argument("dtype: expected float32 or bfloat16, found '" + name + "'");
}

}  // namespace

void add_fused(py::module_& module) {
  using cpu::FusedNetwork;
  py::class_<FusedNetwork>(module, "FusedNetwork",
                           "A whole network in one call: csrc/ops/fused_cpu.h.")
      .def(py::init([](const Input& shape, float scale, float offset,
                       const std::vector<Layer>& layers, const std::string& dtype) {
             return FusedNetwork(describe(shape, scale, offset, layers), dtype_of(dtype));
           }),
           py::arg("shape"), py::arg("scale"), py::arg("offset"), py::arg("layers"),
           py::arg("dtype"))
      .def_static(
          "why_not",
          [](const Input& shape, float scale, float offset, const std::vector<Layer>& layers,
             const std::string& dtype) {
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
          py::call_guard<NoGil>())
      .def(
          "run_timed",
          [](const FusedNetwork& network, Address images, bool is_uint8, int n,
             Address probabilities, int threads, Address seconds) {
            network.run_timed(in<char>(images), is_uint8, n, out(probabilities), threads,
                              reinterpret_cast<double*>(seconds));
          },
          py::call_guard<NoGil>(),
          "As run; adds each part's seconds to the float64 array [len(parts)] at the last address.")
      .def_property_readonly(
          "parts",
          [](const FusedNetwork& network) {
            py::list parts;
            for (const auto& layers : network.parts()) parts.append(py::tuple(py::cast(layers)));
            return parts;
          },
          "Tuples of the indices of the layers that are timed together, in order.")
      .def_property_readonly("outputs", &FusedNetwork::outputs)
      .def_property_readonly("instruction_set", &FusedNetwork::instruction_set)
      .def_property_readonly("multiply_adds", &FusedNetwork::multiply_adds);
  module.def(
      "on_threads",
      [](int threads, const py::function& body) {
        struct Call {
          const py::function& body;
          std::exception_ptr error;  // the first; under the interpreter's lock
        } call{body, nullptr};
        {
          const NoGil released;
          run_on_threads(
              threads,
              [](void* context, int index) {
                Call& mine = *static_cast<Call*>(context);
                const py::gil_scoped_acquire acquire;
                try {
                  mine.body(index);
                } catch (...) {
                  if (!mine.error) mine.error = std::current_exception();
                }
              },
              &call);
        }
        if (call.error) std::rethrow_exception(call.error);
      },
      py::arg("threads"), py::arg("body"),
      "Calls body(0) here and at the same time, as threads of the pool come, body(index) for "
      "others "
      "below `threads`; work is to be claimed in it. Raises what the first of them raised.");
  module.def("measure_fma_peak", &cpu::measure_fma_peak, py::arg("seconds"),
             py::call_guard<NoGil>(), "FLOP/s of one core with the selected instruction set.");
}

}  // namespace cnn_engine::bindings
