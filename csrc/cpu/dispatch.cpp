// The operators' cpu:: entries: each calls the build of its kernel for the selected instruction
// set.
#include <cstdlib>
#include <cstring>

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

const Kernels& kernels() { return *selected()->kernels; }

}  // namespace

int instruction_sets(const InstructionSet** sets) {
  *sets = supported().sets;
  return supported().count;
}

void select_instruction_set(const char* name) { selected() = find("instruction set", name); }

const InstructionSet& selected_set() { return *selected(); }

const char* selected_instruction_set() { return selected()->name; }

void conv2d(const float* input, const float* weight, const float* bias, float* output,
            const Conv2dShape& shape, Conv2dVariant variant, bool reduction, int threads) {
  kernels().conv2d(input, weight, bias, output, shape, variant, reduction, threads);
}

void pad2d(const float* input, float* output, const Pad2dShape& shape, int threads) {
  kernels().pad2d(input, output, shape, threads);
}

void relu(const float* input, float* output, const ElementwiseShape& shape, int threads) {
  kernels().relu(input, output, shape, threads);
}

void tanh(const float* input, float* output, const ElementwiseShape& shape, int threads) {
  kernels().tanh(input, output, shape, threads);
}

void normalize(const std::uint8_t* input, float* output, const ElementwiseShape& shape, float scale,
               float offset, int threads) {
  kernels().normalize(input, output, shape, scale, offset, threads);
}

void max_pool2d(const float* input, float* output, const MaxPool2dShape& shape, int threads) {
  kernels().max_pool2d(input, output, shape, threads);
}

void linear(const float* input, const float* weight, const float* bias, float* output,
            const LinearShape& shape, bool reduction, int threads) {
  kernels().linear(input, weight, bias, output, shape, reduction, threads);
}

void softmax(const float* input, float* output, const SoftmaxShape& shape, bool reduction,
             int threads) {
  kernels().softmax(input, output, shape, reduction, threads);
}

}  // namespace cnn_engine::cpu
