// Compiled once for each instruction set: the table of this build's kernels.
#include "cpu/kernels.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

// Declared here by name only: their types come from the contracts, and a mismatch does not link.
#define CNN_ENGINE_CPU_OPERATOR(name) extern decltype(cpu::name) name;
#include "ops/operators.def"

extern const Kernels kernels = {
#define CNN_ENGINE_CPU_OPERATOR(name) name,
#include "ops/operators.def"
};

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
