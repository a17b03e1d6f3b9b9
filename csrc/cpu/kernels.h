// The CPU kernels are compiled once for each instruction set, each time into a namespace of its own
// (the macro CNN_ENGINE_ISA). This table is how the rest of the program reaches one such build.
#pragma once

#include <string>

#include "cpu/fused/steps.h"
#include "ops/operators.h"

namespace cnn_engine::cpu {

// The contracts declare cpu::name; what is defined is cpu::avx2::name and its like.
struct Kernels {
#define CNN_ENGINE_CPU_OPERATOR(name) decltype(&cpu::name) name;
#include "ops/operators.def"
};

// Of 8-bit integers, for each set of instructions that multiplies them.
struct IntegerKernels {
#define CNN_ENGINE_INTEGER_OPERATOR(name) decltype(&cpu::name) name;
#include "ops/operators.def"
};

namespace baseline {
extern const Kernels kernels;
extern const fused::FusedKernels fused_kernels;
extern const IntegerKernels integer_kernels;
}  // namespace baseline
namespace avx2 {
extern const Kernels kernels;
extern const fused::FusedKernels fused_kernels;
extern const IntegerKernels integer_kernels;
}  // namespace avx2
namespace avx512 {
extern const Kernels kernels;
extern const fused::FusedKernels fused_kernels;
extern const IntegerKernels integer_kernels;
}  // namespace avx512

namespace avx_vnni {
extern const IntegerKernels integer_kernels;
}
namespace avx512_vnni {
extern const IntegerKernels integer_kernels;
}
namespace amx {
extern const IntegerKernels integer_kernels;
}

namespace avx512bf16 {  // for CPUs with AVX512-BF16 too
#define CNN_ENGINE_BFLOAT16_OPERATOR(name) extern decltype(cpu::name) name;
#include "ops/operators.def"
void fused_direct_bfloat16(const fused::ConvStep& s, const float* in, float* out, float* scratch,
                           int begin, int end);
void fused_linear_bfloat16(const fused::LinearStep& s, const float* in, std::size_t in_stride,
                           float* out, std::size_t out_stride, float* scratch, int n, int begin,
                           int end);
}  // namespace avx512bf16

// The instruction sets that were compiled in and that this CPU has, narrowest first.
struct InstructionSet {
  const char* name;
  const Kernels* kernels;
  const fused::FusedKernels* fused;
};
int instruction_sets(const InstructionSet** sets);

// The same of what multiplies 8-bit integers: those instruction sets, and more with instructions
// for it. The widest is used that the selected instruction set has, until another is selected.
struct IntegerInstructions {
  const char* name;
  const char* instruction_set;  // that it belongs to
  const IntegerKernels* kernels;
};
int integer_instructions(const IntegerInstructions** all);
const IntegerInstructions& selected_integer_instructions();
void select_integer_instructions(const char* name);

// What is used until another is selected: the widest, or the one that the environment variable
// CNN_ENGINE_CPU_ISA names. It is read once; what it names but this CPU lacks is an error, thrown
// by every use.
const InstructionSet& selected_set();
inline const Kernels& selected_kernels() { return *selected_set().kernels; }

// Why nothing can be multiplied in bfloat16, by this CPU with the selected set; empty where it can.
std::string bfloat16_why_not();

// Selects by name the kernels that the operators use from now on; throws std::invalid_argument for
// a name that was not built or that this CPU lacks. Not to be called while an operator runs.
void select_instruction_set(const char* name);
const char* selected_instruction_set();

}  // namespace cnn_engine::cpu
