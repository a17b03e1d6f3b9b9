// copy_nd: output[output offset + i * output strides] = input[input offset + i * input strides] for
// every index i in [dims]: transpose, slice (backwards too), expand, tile, split, concatenate and
// every mix of them.
//
// Layouts: both through strides (ops/strided.h), of elements of 1, 2, 4 or 8 bytes. No two indices
// share an element of the output, and the output overlaps no input.
#pragma once

#include "ops/strided.h"
#include "runtime/stream.h"

namespace cnn_engine {

struct CopyShape {
  int itemsize;                           // bytes: 1, 2, 4 or 8
  std::int64_t dims[kMaxDims];            // 1 in front where there are fewer
  std::int64_t input_strides[kMaxDims];   // elements
  std::int64_t output_strides[kMaxDims];  // elements
  std::int64_t input_offset;              // elements before index 0
  std::int64_t output_offset;

  void validate() const {
    if (itemsize != 1 && itemsize != 2 && itemsize != 4 && itemsize != 8) {
      throw std::invalid_argument("itemsize: expected 1, 2, 4 or 8, found " +
                                  std::to_string(itemsize));
    }
    require_dims(dims);
    bool empty = false;
    for (const std::int64_t dim : dims) empty = empty || dim == 0;
    for (int d = 0; d < kMaxDims; ++d) {
      if (!empty && dims[d] > 1 && output_strides[d] == 0) {
        throw std::invalid_argument("output strides: expected none to be 0, found one");
      }
    }
  }
};

namespace cpu {
void copy_nd(const void* input, void* output, const CopyShape& shape, int threads);
}
namespace cuda {
void copy_nd(const void* input, void* output, const CopyShape& shape, Stream stream);
}
}  // namespace cnn_engine
