// What the compiler said of the directives when the module was built, kept in the module.
#pragma once

namespace cnn_engine::openacc {

// One source file with directives. `mapping` and `offload_mapping` are lines `file:line:column:
// text` of the compiler, for the host and for what it offloads to ("" where it does not).
struct Listing {
  const char* file;
  const char* source;
  const char* mapping;
  const char* offload_mapping;
};

extern const Listing listings[];
extern const int listing_count;

}  // namespace cnn_engine::openacc
