// Tensors seen through strides: up to 8 dimensions, in which each operand has a stride of its own,
// in elements; 0 repeats an element (broadcasting), a negative one walks backwards. An operand's
// pointer is to the element at index 0 of every dimension.
#pragma once

#include <cstdint>

#include "runtime/shape.h"

namespace cnn_engine {

constexpr int kMaxDims = 8;

// The same walk over elements in as few dimensions as describe it; made by collapse().
template <int compute_type>
struct Strided {
  int rank;           // 0: one element
  std::int64_t size;  // elements
  std::int64_t dims[kMaxDims];
  std::int64_t strides[compute_type][kMaxDims];
};

// Throws std::invalid_argument for a negative dimension, or more elements than can be counted.
inline void require_dims(const std::int64_t (&dims)[kMaxDims]) {
  constexpr std::int64_t highest = std::numeric_limits<std::int64_t>::max() / 16;
  std::int64_t size = 1;
  for (const std::int64_t dim : dims) {
    if (dim < 0) {
      throw std::invalid_argument("dimensions: expected at least 0, found " + std::to_string(dim));
    }
    if (dim > 0 && size > highest / dim) {
      throw std::invalid_argument("dimensions: expected at most " + std::to_string(highest) +
                                  " elements, found more");
    }
    size *= dim > 0 ? dim : 1;
  }
}

// Leaves out dimensions of 1, orders the others by the steps of operand 0, longest first (elements
// do not depend on one another), and joins those that one stride describes. Always inlined, as
// shapes are: see runtime/shape.h.
template <int compute_type>
inline __attribute__((always_inline)) Strided<compute_type> collapse(
    const std::int64_t (&dims)[kMaxDims], const std::int64_t (&strides)[compute_type][kMaxDims]) {
  Strided<compute_type> made{};
  made.size = 1;
  int order[kMaxDims];
  int count = 0;
  for (int d = 0; d < kMaxDims; ++d) {
    made.size *= dims[d];
    if (dims[d] == 1) continue;
    const std::int64_t step = strides[0][d] < 0 ? -strides[0][d] : strides[0][d];
    int position = count++;
    for (; position > 0; --position) {  // stable: equal steps stay in their order
      const std::int64_t other = strides[0][order[position - 1]];
      if ((other < 0 ? -other : other) >= step) break;
      order[position] = order[position - 1];
    }
    order[position] = d;
  }
  for (int i = 0; i < count; ++i) {
    const int d = order[i];
    bool joined = made.rank > 0;
    for (int k = 0; k < compute_type && joined; ++k) {
      joined = made.strides[k][made.rank - 1] == strides[k][d] * dims[d];
    }
    if (!joined) made.rank += 1;
    made.dims[made.rank - 1] = joined ? made.dims[made.rank - 1] * dims[d] : dims[d];
    for (int k = 0; k < compute_type; ++k) made.strides[k][made.rank - 1] = strides[k][d];
  }
  return made;
}

// The strides of a row-major tensor of `dims`.
inline __attribute__((always_inline)) void row_major(const std::int64_t (&dims)[kMaxDims],
                                                     std::int64_t (&strides)[kMaxDims]) {
  std::int64_t step = 1;
  for (int d = kMaxDims - 1; d >= 0; --d) {
    strides[d] = step;
    step *= dims[d];
  }
}

}  // namespace cnn_engine
