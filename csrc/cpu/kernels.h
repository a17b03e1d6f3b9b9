// The CPU kernels are compiled once for each instruction set, each time into a namespace of its own
// (the macro CNN_ENGINE_ISA). This table is how the rest of the program reaches one such build.
#pragma once

#include "ops/conv2d.h"
#include "ops/elementwise.h"
#include "ops/linear.h"
#include "ops/max_pool2d.h"
#include "ops/pad2d.h"
#include "ops/softmax.h"

namespace cnn_engine::cpu {

struct Kernels {
  decltype(&cpu::conv2d) conv2d;
  decltype(&cpu::pad2d) pad2d;
  decltype(&cpu::relu) relu;
  decltype(&cpu::tanh) tanh;
  decltype(&cpu::normalize) normalize;
  decltype(&cpu::max_pool2d) max_pool2d;
  decltype(&cpu::linear) linear;
  decltype(&cpu::softmax) softmax;
};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

// The instruction sets that were compiled in and that this CPU has, narrowest first.
struct InstructionSet {
  const char* name;
  const Kernels* kernels;
};
int instruction_sets(const InstructionSet** sets);

// Selects by name the kernels that the operators use from now on; throws std::invalid_argument for
// a name that was not built or that this CPU lacks. Not to be called while an operator runs.
void select_instruction_set(const char* name);
const char* selected_instruction_set();

}  // namespace cnn_engine::cpu
