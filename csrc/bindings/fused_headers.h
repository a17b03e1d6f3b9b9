// The headers that programs of fused networks are compiled from at first use; CMakeLists.txt writes
// their text into a file of its own.
#pragma once

namespace cnn_engine::bindings {

struct FusedHeader {
  const char *name, *text;
};

extern const FusedHeader kFusedHeaders[];  // up to one without a name

}  // namespace cnn_engine::bindings
