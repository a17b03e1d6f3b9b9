// The module cnn_engine._cpu: shapes (used by both devices), CPU operators, instruction sets.
#include "bindings/operators.h"
#include "cpu/kernels.h"

namespace cnn_engine::bindings {

void add_fused(py::module_& module);  // fused_cpu.cpp

namespace {

void add_shapes(py::module_& module) {
#define CNN_ENGINE_SHAPE(Name) bind_shape<Name>(module, #Name);
#define CNN_ENGINE_ENUM(Name) bind_enum<Name>(module, #Name);
#include "ops/operators.def"
}

void add_operators(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
#define CNN_ENGINE_CPU_OPERATOR(name)                             \
  bind<NoGil>(                                                    \
      module, #name, [] { return cpu::selected_kernels().name; }, \
      static_cast<decltype(cpu::Kernels::name)>(nullptr));
#include "ops/operators.def"
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
