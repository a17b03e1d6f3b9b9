// Which instruction set's build of the kernels is used.
#include <cstdlib>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

#if defined(__x86_64__)
// Whether CPUID's leaf 7, sub-leaf `sub`, has all of these bits of EAX and EDX.
bool has_leaf7(int sub, unsigned eax, unsigned edx) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, sub, &a, &b, &c, &d) && (a & eax) == eax && (d & edx) == edx;
}

// AMX's tiles of 8-bit integers, for which a process asks the system.
bool has_tiles() {
  constexpr unsigned kTiles = 1u << 24, kInt8 = 1u << 25;
  if (!has_leaf7(0, 0, kTiles | kInt8)) return false;
#if defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

struct SupportedIntegers {
  IntegerInstructions all[6];
  int count = 0;

  SupportedIntegers() {
    const int sets = supported().count;
    all[count++] = {"baseline", "baseline", &baseline::integer_kernels};
#if defined(__x86_64__)
    if (sets > 1) {
      all[count++] = {"avx2", "avx2", &avx2::integer_kernels};
      if (has_leaf7(1, 1u << 4, 0)) {
        all[count++] = {"avx_vnni", "avx2", &avx_vnni::integer_kernels};
      }
    }
    if (sets > 2) {
      all[count++] = {"avx512", "avx512", &avx512::integer_kernels};
      if (__builtin_cpu_supports("avx512vnni")) {
        all[count++] = {"avx512_vnni", "avx512", &avx512_vnni::integer_kernels};
        if (has_tiles()) all[count++] = {"amx", "avx512", &amx::integer_kernels};
      }
    }
#endif
    static_cast<void>(sets);
  }
};

const SupportedIntegers& supported_integers() {
  static const SupportedIntegers instance;
  return instance;
}

// The widest of an instruction set.
const IntegerInstructions* widest_integers(const InstructionSet& set) {
  const IntegerInstructions* found = nullptr;
  for (int i = 0; i < supported_integers().count; ++i) {
    const IntegerInstructions& one = supported_integers().all[i];
    if (std::strcmp(one.instruction_set, set.name) == 0) found = &one;
  }
  return found;
}

template <typename One>
const One* find(const char* what, const One* all, int count, const char* name) {
  std::string known;
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(all[i].name, name) == 0) return &all[i];
    known += (i ? ", " : "") + std::string(all[i].name);
  }
  throw std::invalid_argument(std::string(what) + ": expected one that this CPU has (" + known +
                              "), found '" + name + "'");
}

const InstructionSet* find(const char* what, const char* name) {
  return find(what, supported().sets, supported().count, name);
}

const InstructionSet* initial() {
  const char* name = std::getenv("CNN_ENGINE_CPU_ISA");
  return name ? find("CNN_ENGINE_CPU_ISA", name) : &supported().sets[supported().count - 1];
}

const InstructionSet*& selected() {
  static const InstructionSet* set = initial();
  return set;
}

const IntegerInstructions*& selected_integers() {
  static const IntegerInstructions* one = widest_integers(*selected());
  return one;
}

}  // namespace

int instruction_sets(const InstructionSet** sets) {
  *sets = supported().sets;
  return supported().count;
}

void select_instruction_set(const char* name) {
  selected() = find("instruction set", name);
  selected_integers() = widest_integers(*selected());
}

int integer_instructions(const IntegerInstructions** all) {
  *all = supported_integers().all;
  return supported_integers().count;
}

const IntegerInstructions& selected_integer_instructions() { return *selected_integers(); }

void select_integer_instructions(const char* name) {
  selected_integers() =
      find("integer instructions", supported_integers().all, supported_integers().count, name);
}

const InstructionSet& selected_set() { return *selected(); }

const char* selected_instruction_set() { return selected()->name; }

void refuse_index(std::int64_t index, std::int64_t size) {
  throw std::invalid_argument("indices: expected positions of " + std::to_string(size) +
                              ", found " + std::to_string(index));
}

void refuse_step(int index) {
  throw std::invalid_argument("steps: expected a function of what is known before step " +
                              std::to_string(index));
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
