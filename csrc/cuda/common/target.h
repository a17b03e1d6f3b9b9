// The Target of a device that is here: asked once per device.
#pragma once

#include "runtime/target.h"

namespace cnn_engine::cuda {

// Of a device by its number. It asks the device for the largest cluster that it has room for, so
// that a context is made there.
const Target& target_of(int device);

// Of the current device, for launches, which then pass it to what decides.
const Target& target_here();

}  // namespace cnn_engine::cuda
