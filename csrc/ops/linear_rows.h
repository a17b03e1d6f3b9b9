// linear_rows on CUDA: linear (linear.h) of a few rows, bound by how fast the weights are read,
// with a function at its end:
//
//   y[n,m] = activation(b[m] + sum over f of x[n,f] * w[m,f])
//
// Layouts: x [N,F], b [M] or null, y [N,M]; float32, x and y also in the weights' type;
// C-contiguous; weights packed [M,F] as float16 or bfloat16, else as float32 (tf32 too). x is not
// rounded, sums are float32, of one row in an
// order that depends on F alone. The activation is a function of unary.h with its alpha and beta.
#pragma once

#include "ops/conv2d_nhwc.h"
#include "ops/linear.h"

namespace cnn_engine::cuda {

std::int64_t linear_rows_packed(const LinearShape& shape, ElementType compute_type, int);  // bytes
void linear_rows_pack(const float* weight,                                                 // [M, F]
                      void* packed,  // [linear_rows_packed]
                      const LinearShape& shape, ElementType compute_type, Stream stream);
void linear_rows(const ConstValues& input,  // [N, F]
                 const void* packed,        // [linear_rows_packed]
                 const Values& output,      // [N, M]
                 const LinearShape& shape, ElementType compute_type, const Epilogue& epilogue,
                 Stream stream);

}  // namespace cnn_engine::cuda
