// A kernel that does nothing for a while. Queued before work that is timed, it keeps the GPU busy
// until the host has queued all of it, so that the events around a kernel do not count the host's
// time to launch it. In tests, it is the known delay that a timer must see.
#pragma once

#include <cstdint>

#include "runtime/stream.h"

namespace cnn_engine::cuda {

// Occupies `stream` for about `nanoseconds` (at most one second) from when it starts.
void delay(std::int64_t nanoseconds, Stream stream);

}  // namespace cnn_engine::cuda
