// Arrays as kernels read and write them: an address, and how the values lie there.
//
// Python passes the members of each struct one after another.
#pragma once

#include "ops/types.h"
#include "runtime/shape.h"

namespace cnn_engine {

// Images whose channels are last, [N, H, W, pitch]; the first C values of each pixel are meant.
template <typename Void>
struct ImagesOf {
  static constexpr bool kPassedByMember = true;

  Void* data;           // [N, H, W, pitch]; null: there are none
  int pitch;            // values from one pixel to the next; at least C
  ElementType storage;  // of the values in memory

  void validate() const { require_at_least("pitch", pitch, 0); }
};

using Images = ImagesOf<void>;
using ConstImages = ImagesOf<const void>;

// Values of one type without any between them.
template <typename Void>
struct ValuesOf {
  static constexpr bool kPassedByMember = true;

  Void* data;
  ElementType storage;  // of the values in memory
};

using Values = ValuesOf<void>;
using ConstValues = ValuesOf<const void>;

}  // namespace cnn_engine
