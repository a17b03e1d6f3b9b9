// Pointers as integers, which both bindings modules take.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace cnn_engine::bindings {

namespace py = pybind11;

// Python checks arrays (cnn_engine/ops) and passes their addresses: one convention for NumPy,
// CuPy and anything else, and a call that costs well under a microsecond.
using Address = std::uintptr_t;

template <typename T = float>
inline const T* in(Address address) {
  return reinterpret_cast<const T*>(address);
}
inline float* out(Address address) { return reinterpret_cast<float*>(address); }

}  // namespace cnn_engine::bindings
