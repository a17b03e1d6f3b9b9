// Which instruction set's build of the kernels is used.
#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu/kernels.h"

namespace cnn_engine::cpu {
namespace {

struct Supported {
  InstructionSet sets[3];
  int count = 0;

  Supported() {
    sets[count++] = {"baseline", &baseline::kernels, &baseline::fused_kernels};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      sets[count++] = {"avx2", &avx2::kernels, &avx2::fused_kernels};
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) {
        sets[count++] = {"avx512", &avx512::kernels, &avx512::fused_kernels};
      }
    }
#endif
  }
};

const Supported& supported() {
  static const Supported instance;
  return instance;
}

const InstructionSet* find(const char* what, const char* name) {
  std::string known;
  for (int i = 0; i < supported().count; ++i) {
    if (std::strcmp(supported().sets[i].name, name) == 0) return &supported().sets[i];
    known += (i ? ", " : "") + std::string(supported().sets[i].name);
  }
  throw std::invalid_argument(std::string(what) + ": expected one that this CPU has (" + known +
                              "), found '" + name + "'");
}

const InstructionSet* initial() {
  const char* name = std::getenv("CNN_ENGINE_CPU_ISA");
  return name ? find("CNN_ENGINE_CPU_ISA", name) : &supported().sets[supported().count - 1];
}

const InstructionSet*& selected() {
  static const InstructionSet* set = initial();
  return set;
}

}  // namespace

int instruction_sets(const InstructionSet** sets) {
  *sets = supported().sets;
  return supported().count;
}

void select_instruction_set(const char* name) { selected() = find("instruction set", name); }

const InstructionSet& selected_set() { return *selected(); }

const char* selected_instruction_set() { return selected()->name; }

void refuse_index(std::int64_t index, std::int64_t size) {
  throw std::invalid_argument("indices: expected positions of " + std::to_string(size) +
                              ", found " + std::to_string(index));
}

std::string bfloat16_why_not() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512bf16")) {
    return "bfloat16: expected a CPU with AVX512-BF16, found one without";
  }
#endif
  if (std::strcmp(selected_set().name, "avx512") != 0) {
    return std::string("bfloat16: expected the instruction set avx512, found ") +
           selected_set().name;
  }
  return "";
}

}  // namespace cnn_engine::cpu
