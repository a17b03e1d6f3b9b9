// The module cnn_engine._cpu: shapes (used by both devices), CPU operators, instruction sets.
#include "bindings/built.h"
#include "bindings/operators.h"
#include "cpu/kernels.h"
#include "ops/conv2d_tiles.h"
#include "runtime/file_mapping.h"

namespace cnn_engine::bindings {

void add_fused(py::module_& module);  // fused_cpu.cpp

namespace {

void add_shapes(py::module_& module) {
#define CNN_ENGINE_SHAPE(Name) bind_shape<Name>(module, #Name);
#define CNN_ENGINE_ENUM(Name) bind_enum<Name>(module, #Name);
#include "ops/operators.def"
}

void add_operators(py::module_& module) {
#define CNN_ENGINE_CPU_OPERATOR(name) \
  bind<OnHost>(module, #name, +[] { return cpu::selected_kernels().name; });
#if defined(__x86_64__)
#define CNN_ENGINE_BFLOAT16_OPERATOR(name)                        \
  bind<OnHost>(                                                   \
      module, #name, +[] {                                        \
        const std::string reason = cpu::bfloat16_why_not();       \
        if (!reason.empty()) throw std::invalid_argument(reason); \
        return &cpu::avx512bf16::name;                            \
      });
#endif
#define CNN_ENGINE_INTEGER_OPERATOR(name) \
  bind<OnHost>(module, #name, +[] { return cpu::selected_integer_instructions().kernels->name; });
#include "ops/operators.def"
}

}  // namespace

// The first byte's address of a C-contiguous array: what __array_interface__ says, at a tenth of
// its cost, which predict on one image would feel; so would it pybind11's own dispatch.
PyObject* address_of(PyObject*, PyObject* array) {
  Py_buffer view;
  if (PyObject_GetBuffer(array, &view, PyBUF_SIMPLE) != 0) return nullptr;
  PyObject* address = PyLong_FromVoidPtr(view.buf);
  PyBuffer_Release(&view);
  return address;
}

PyMethodDef address_of_method = {"address_of", address_of, METH_O,
                                 "The address of a C-contiguous array's first byte."};

void add_file_mapping(py::module_& module) {
  py::class_<FileMapping>(module, "FileMapping", py::buffer_protocol(),
                          "Bytes of a file, mapped for reading; other processes may cut it.")
      .def(py::init<int, off_t, std::size_t>(), py::arg("descriptor"), py::arg("offset"),
           py::arg("nbytes"))
      .def_property_readonly("was_cut", &FileMapping::was_cut,
                             "Whether a read met a page that was gone: it has found zeros.")
      .def_buffer([](const FileMapping& mapping) {
        return py::buffer_info(static_cast<const std::uint8_t*>(mapping.data()),
                               static_cast<py::ssize_t>(mapping.nbytes()));
      });
}

PYBIND11_MODULE(_cpu, module) {
  module.doc() =
      "Shapes, CPU operators and instruction sets; called by cnn_engine.ops, which checks.";
  add_shapes(module);
  add_operators(module);
  add_fused(module);
  add_file_mapping(module);
  py::reinterpret_borrow<py::class_<Activation>>(module.attr("Activation"))
      .def_readonly("function", &Activation::function)
      .def_readonly("alpha", &Activation::alpha)
      .def_readonly("beta", &Activation::beta);
  py::object named = py::str("cnn_engine._cpu");
  module.attr("address_of") = py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&address_of_method, nullptr, named.ptr()));
  module.attr("commit") = kCommit;
  module.attr("compiler") = kCompiler;
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
  module.def(
      "integer_instructions",
      [] {
        const cpu::IntegerInstructions* all = nullptr;
        const int count = cpu::integer_instructions(&all);
        py::list names;
        for (int i = 0; i < count; ++i) names.append(all[i].name);
        return names;
      },
      "What multiplies 8-bit integers, built in and on this CPU, narrowest first.");
  module.def(
      "selected_integer_instructions", [] { return cpu::selected_integer_instructions().name; },
      "What multiplies 8-bit integers now.");
  module.def("select_integer_instructions", &cpu::select_integer_instructions,
             "Selects by name what multiplies 8-bit integers; packed weights are for one alone.");
  module.def("bytes_of", &bytes_of, "Bytes of one element of a type in memory.");
  module.attr("floating_point_mode") = FloatingPointMode::usual();
  module.def("exchange_floating_point_mode", &FloatingPointMode::exchange,
             "Sets the calling thread's floating-point mode; returns the one before.");
  module.def("bfloat16_why_not", &cpu::bfloat16_why_not,
             "Why nothing can be multiplied in bfloat16 here, or an empty text.");
  module.def(
      "bfloat16_pays",
      [] {
#if defined(__x86_64__)
        return !__builtin_cpu_is("intel");
#else
        return false;
#endif
      },
      "Whether a pair of products in bfloat16 is faster than two in float32: on Intel's CPUs, "
      "whose "
      "VDPBF16PS has a quarter of the rate of multiply-adds, it is not "
      "(docs/explanation/performance.md).");
  module.def("fits_conv2d_tiled", &fits_conv2d_tiled,
             "Whether a tile of a convolution fits into the shared memory that any GPU has.");
  module.attr("tiled_shared_bytes") = kTiledSharedBytes;
  module.def("select_instruction_set",
             [](const std::string& name) { cpu::select_instruction_set(name.c_str()); });
  module.def("selected_instruction_set", &cpu::selected_instruction_set);
}

}  // namespace cnn_engine::bindings
