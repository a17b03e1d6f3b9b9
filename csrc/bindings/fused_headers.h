// The headers that programs of fused networks are compiled from at first use; CMakeLists.txt writes
// their text into a file of its own.
#pragma once

namespace cnn_engine::bindings {

struct FusedHeader {
  const char *name, *text;
};

constexpr int kFusedHeaderCount = 11;
extern const FusedHeader kFusedHeaders[kFusedHeaderCount];

}  // namespace cnn_engine::bindings
