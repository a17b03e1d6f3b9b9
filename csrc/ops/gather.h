// gather: output[i0, i1, ..., r] = input[t0[i0] + t1[i1] + ... + r], with a table of offsets t for
// each dimension; the fill value where any of the offsets is negative. Gathering along an axis,
// padding (constant, reflected, repeated or wrapped), tiling and nearest neighbours are all this.
//
// Layouts: output C-contiguous, [dims, run]; input of any, in elements; tables int64, one after the
// other, [sum of dims], where the device can read them: what they add up to has been checked.
#pragma once

#include "ops/strided.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct GatherShape {
  int itemsize;                 // bytes: 1, 2, 4 or 8
  int rank;                     // dimensions that are used, from 1, and so the tables
  std::int64_t dims[kMaxDims];  // 1 after them
  std::int64_t run;             // elements that lie one after the other in input and output
  std::int64_t fill;            // the fill value's bits

  void validate() const {
    if (itemsize != 1 && itemsize != 2 && itemsize != 4 && itemsize != 8) {
      throw std::invalid_argument("itemsize: expected 1, 2, 4 or 8, found " +
                                  std::to_string(itemsize));
    }
    require_dims(dims);
    if (rank < 1 || rank > kMaxDims) {
      throw std::invalid_argument("rank: expected 1 to " + std::to_string(kMaxDims) + ", found " +
                                  std::to_string(rank));
    }
    for (int d = rank; d < kMaxDims; ++d) {
      if (dims[d] != 1) throw std::invalid_argument("dimensions: expected 1 past the rank");
    }
    if (run < 0)
      throw std::invalid_argument("run: expected at least 0, found " + std::to_string(run));
  }
};

namespace cpu {
void gather(const void* input, const std::int64_t* tables, void* output, const GatherShape& shape,
            int threads);
}
namespace cuda {
void gather(const void* input, const std::int64_t* tables, void* output, const GatherShape& shape,
            Stream stream);
}
}  // namespace cnn_engine
