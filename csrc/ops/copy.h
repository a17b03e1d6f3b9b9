// copy: y = x, byte by byte, on several threads: staging for copies to and from a GPU (CPU only).
#pragma once

#include <cstdint>

namespace cnn_engine::cpu {
void copy(const void* input,  // [nbytes]
          void* output,       // [nbytes], not overlapping
          std::int64_t nbytes, int threads);
}  // namespace cnn_engine::cpu
