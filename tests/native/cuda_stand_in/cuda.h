// Of CUDA's driver what csrc/runtime/device.h calls: one device, whose context is always current.
#pragma once

#include "runtime/stream.h"

enum CUresult { CUDA_SUCCESS };
using CUcontext = struct CUctx_st*;
using CUdevice = int;
using CUstream = cnn_engine::Stream;
