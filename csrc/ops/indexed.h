// gather_at and scatter_at: runs of x that rows of computed indices name. Row i, of the dimensions
// `dims`, names the run of x from start(i) + sum over k of index[position(i) + k] * strides[k] on;
// start and position are dot products of i with `starts` and `steps`. Gathering along an axis,
// elements of an axis, and slices by rows of indices are all this.
//
//   gather_at   y[i, r] = x[run of i, r]
//   scatter_at  y = x, then y[run of i, r] = join(y[run of i, r], updates[i, r]), row after row
//
// Layouts: y of gather_at and updates [dims, run], C-contiguous; indices int32 or int64, from
// -sizes[k] on, below sizes[k]; another one throws std::invalid_argument. Items of 1, 2, 4 or 8
// bytes; what is joined is float32. y of scatter_at may be x.
#pragma once

#include "ops/strided.h"

namespace cnn_engine {

enum class ScatterJoin { none, add, mul, max, min };

inline const char* name_of(ScatterJoin join) {
  constexpr const char* kNames[] = {"none", "add", "mul", "max", "min"};
  return static_cast<int>(join) < 5 ? kNames[static_cast<int>(join)] : nullptr;
}

struct IndexedShape {
  int itemsize;           // bytes
  int index_bytes;        // 4 or 8
  int columns;            // of a row of indices
  std::int64_t elements;  // of x
  std::int64_t run;       // elements
  std::int64_t dims[kMaxDims];
  std::int64_t starts[kMaxDims];
  std::int64_t steps[kMaxDims];
  std::int64_t sizes[kMaxDims];    // of the columns; 1 after them
  std::int64_t strides[kMaxDims];  // likewise

  void validate() const {
    if (itemsize != 1 && itemsize != 2 && itemsize != 4 && itemsize != 8) {
      throw std::invalid_argument("itemsize: expected 1, 2, 4 or 8, found " +
                                  std::to_string(itemsize));
    }
    if (index_bytes != 4 && index_bytes != 8) {
      throw std::invalid_argument("indices: expected 4 or 8 bytes, found " +
                                  std::to_string(index_bytes));
    }
    if (columns < 1 || columns > kMaxDims) {
      throw std::invalid_argument("columns: expected 1 to 8, found " + std::to_string(columns));
    }
    require_dims(dims);
    if (run < 0 || elements < 0) {
      throw std::invalid_argument("run: expected at least 0, found " + std::to_string(run));
    }
  }
};

namespace cpu {
// Throws std::invalid_argument for an index outside of its dimension. It is compiled without a
// wider instruction set, since what makes its text are weak symbols of the standard library.
[[noreturn]] void refuse_index(std::int64_t index, std::int64_t size);

void gather_at(const void* x, const void* indices, void* y, const IndexedShape& shape, int threads);
void scatter_at(const void* x, const void* indices, const void* updates, void* y,
                const IndexedShape& shape, ScatterJoin join, int threads);
}  // namespace cpu
}  // namespace cnn_engine
