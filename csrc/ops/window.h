// Which positions of a window lie inside an image's rows or columns.
#pragma once

#include "runtime/shape.h"

namespace cnn_engine {

// The first position `start + i * dilation`, i >= 0, that is at least 0.
CNN_ENGINE_INLINE int first_inside(int start, int dilation) {
  return start >= 0 ? start : start + (dilation - 1 - start) / dilation * dilation;
}

// Past the last of `count` positions from `start` that is below `size`.
CNN_ENGINE_INLINE int end_inside(int start, int count, int dilation, int size) {
  const std::int64_t end = start + std::int64_t{count - 1} * dilation + 1;
  return end < size ? static_cast<int>(end) : size;
}

}  // namespace cnn_engine
