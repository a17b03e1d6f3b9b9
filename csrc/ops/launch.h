// How a kernel is launched on CUDA, beside its operands.
#pragma once

#include "runtime/stream.h"

namespace cnn_engine {

// Python passes the members one after another, the stream last.
struct Launch {
  static constexpr bool kPassedByMember = true;

  void* workspace;  // as many bytes as the kernel's _workspace function says; null: none
  int ready;        // the first channels of x that no earlier kernel still writes: they may be read
                    // before those kernels end
  bool holds;       // the next kernel starts only after this one has waited for those before it
  int rank;         // tile and split of the sums: 0 the fastest by the model of times, 1 the next;
                    // from the number of choices on, the last
  Stream stream;
};

}  // namespace cnn_engine
