// The interpreter's lock, given back while a function works. As pybind11's gil_scoped_release, but
// for how a daemon thread ends that comes back when the interpreter is being finalised.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace cnn_engine::bindings {

class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

  ~NoGil() {
    // Before 3.14 Python ends such a thread with pthread_exit, which unwinds its stack: through
    // destructors that may not throw, which aborts the process, and through others that would touch
    // objects without the lock. So it stays here, as 3.14 has it, until the process ends.
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace cnn_engine::bindings
