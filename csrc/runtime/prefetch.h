// Asks a GPU's second-level cache for memory that kernels read later, while these compute and the
// memory has nothing to do.
#pragma once

#include <cstdint>

#include "runtime/stream.h"

namespace cnn_engine::cuda {

// Queues the request for pieces of 4,096 bytes of `rows` rows of `row_bytes` each: those whose
// position in its row and whose group of `together` rows add up to a multiple of `every`. The
// address and row_bytes are multiples of 16. It is over when all has been asked for, not when all
// has come.
void prefetch(const void* memory, std::int64_t rows, std::int64_t row_bytes, int together,
              int every, Stream stream);

}  // namespace cnn_engine::cuda
