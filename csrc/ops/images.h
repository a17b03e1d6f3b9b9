// Images whose channels lie side by side, [N, H, W, pitch], as kernels read and write them.
#pragma once

#include "ops/types.h"
#include "runtime/shape.h"

namespace cnn_engine {

// The first C values of each pixel are the image's. Python passes the members one after another.
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

}  // namespace cnn_engine
