// In the place of csrc/runtime/device.h: the driver's functions are the emulator's.
#pragma once

#include <cuda.h>

#include <cstring>
#include <type_traits>

#include "runtime/check.h"

namespace cnn_engine::cuda {

template <typename Function>
Function driver_function(const char*, unsigned) {
  if constexpr (std::is_same_v<Function, decltype(&cuTensorMapEncodeTiled)>) {
    return &cuTensorMapEncodeTiled;
  } else {
    return &cuTensorMapEncodeIm2col;
  }
}

}  // namespace cnn_engine::cuda
