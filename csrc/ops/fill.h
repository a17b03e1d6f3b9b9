// fill: output[i] = value; float32, C-contiguous.
#pragma once

#include <cstdint>

#include "runtime/stream.h"

namespace cnn_engine {

namespace cpu {
void fill(float* output,  // [size]
          std::int64_t size, float value, int threads);
}
namespace cuda {
void fill(float* output,  // [size]
          std::int64_t size, float value, Stream stream);
}
}  // namespace cnn_engine
