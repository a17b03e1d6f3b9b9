// The CUDA stream type, named without CUDA's headers so that contracts compile on a CPU-only
// machine.
#pragma once

struct CUstream_st;

namespace cnn_engine {
using Stream = CUstream_st*;  // the same type as cudaStream_t
}
