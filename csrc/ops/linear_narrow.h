// linear_narrow on CUDA: linear (linear.h) of many rows and few columns, in tiles of 64 x 48 whose
// sums one block makes whole: where linear_blocked's tiles of 128 columns would be half empty.
#pragma once

#include "ops/linear.h"

namespace cnn_engine::cuda {
void linear_narrow(const float* input,   // [N, F]
                   const float* weight,  // [M, F]
                   const float* bias,    // [M] or null
                   float* output,        // [N, M]
                   const LinearShape& shape, Stream stream);
}  // namespace cnn_engine::cuda
