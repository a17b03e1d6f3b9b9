// copy: y = x, byte by byte, on several threads. stage: the same, for memory that a GPU copies
// next: written past the caches, from where the bus would be slower to read it. Both on the CPU
// only.
#pragma once

#include <cstdint>

namespace cnn_engine::cpu {
void copy(const void* input,  // [nbytes]
          void* output,       // [nbytes], not overlapping
          std::int64_t nbytes, int threads);
void stage(const void* input, void* output, std::int64_t nbytes, int threads);
}  // namespace cnn_engine::cpu
