// The interpreter's lock: given back while a function works, and taken by what calls Python.
//
// Before 3.14 Python ends a daemon thread that wants the lock of an interpreter that is being
// finalised with pthread_exit, which unwinds the thread's stack as an exception of its own kind:
// `catch (...)` that keeps it and destructors that it may not pass abort the process, and others
// would touch objects without the lock. So such a thread stays where it is, as 3.14 has it, until
// the process ends.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace cnn_engine::bindings {

namespace py = pybind11;

// Returns what body() does; a thread that Python ends in it stays. For all that may take the lock.
template <typename Body>
decltype(auto) or_stay(const Body& body) {
#if defined(__GLIBCXX__)
  try {
    return body();
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();
  }
#else
  return body();
#endif
}

// As pybind11's gil_scoped_release, but for daemon threads.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

  ~NoGil() {
    or_stay([&] { PyEval_RestoreThread(state_); });
  }

  // Calls body() with the lock, on the thread that gave it back. By the state that it had: to look
  // for one, as pybind11's gil_scoped_acquire does, needs an interpreter that is still there.
  template <typename Body>
  void with_lock(const Body& body) {
    or_stay([&] { PyEval_RestoreThread(state_); });
    body();
    state_ = PyEval_SaveThread();
  }

 private:
  PyThreadState* state_;
};

// Calls a Python function of whole numbers, with the lock held. Until it has returned there is
// nothing on this frame that would have to be destroyed.
template <typename... Numbers>
void call_python(py::handle function, Numbers... numbers) {
  PyObject* const arguments[] = {PyLong_FromUnsignedLongLong(numbers)...};
  PyObject* result = nullptr;
  or_stay([&] {
    result = PyObject_Vectorcall(function.ptr(), arguments, sizeof...(numbers), nullptr);
  });
  for (PyObject* argument : arguments) Py_XDECREF(argument);
  if (result == nullptr) throw py::error_already_set();
  Py_DECREF(result);
}

}  // namespace cnn_engine::bindings
