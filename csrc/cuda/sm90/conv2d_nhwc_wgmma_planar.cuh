// How a first layer's filters are packed, four channels of up to eight columns a row
// (conv2d_nhwc_wgmma_planar.cu).
#pragma once

#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda::wgmma {

constexpr int kColumnsOfFilter = 8, kPlanes = 4;  // with those whose weights are 0

// Of 16 bits: units of so many rows of filters, and where a row lies in them.
constexpr int kFilterRowBytes = kColumnsOfFilter * kPlanes * 2;
__host__ __device__ constexpr int weight_units(int filter_rows) {
  return (filter_rows * kFilterRowBytes + kRowBytes - 1) / kRowBytes;
}
__device__ inline int filter_row_at(int row) {
  constexpr int kRowsAUnit = kRowBytes / kFilterRowBytes;
  return row / kRowsAUnit * kUnitBytes + row % kRowsAUnit * kFilterRowBytes;
}

// Bytes behind the last row of pieces: memcheck takes the rows of a matrix for apart, and sees so
// much more read.
__host__ __device__ constexpr int beyond(int next_columns) { return 1792 + next_columns; }

}  // namespace cnn_engine::cuda::wgmma
