// linear_mma on CUDA: linear (linear.h) on tensor cores of Turing and later, m16n8k8 of float16,
// with an epilogue (epilogue.h) that has no residual:
//
//   y[n,m] = activation(b[m] + sum over f of x[n,f] * w[m,f])
//
// Layouts: x [N,F], b [M] or null, y [N,M]; float32, C-contiguous; weights packed as float16. x is
// rounded to float16 as it is read; overflow is x's. Sums are float32, of one row in an order that
// depends on F alone.
#pragma once

#include "ops/epilogue.h"
#include "ops/linear.h"

namespace cnn_engine::cuda {

std::int64_t linear_mma_packed(const LinearShape& shape, int);  // bytes
void linear_mma_pack(const float* weight,                       // [M, F]
                     void* packed,                              // [linear_mma_packed]
                     const LinearShape& shape, Stream stream);
void linear_mma(const float* input,  // [N, F]
                const void* packed,  // [linear_mma_packed], at a multiple of 16
                float* output,       // [N, M]
                const LinearShape& shape, const Epilogue& epilogue, Stream stream);

}  // namespace cnn_engine::cuda
