// copy on the CPU: a part a thread, each by memcpy, which knows the machine's best instructions.
#include "ops/copy.h"

#include <cstring>

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void copy(const void* input, void* output, std::int64_t nbytes, int threads) {
  parallel_for(nbytes, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(static_cast<char*>(output) + begin, static_cast<const char*>(input) + begin,
                static_cast<std::size_t>(end - begin));
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
