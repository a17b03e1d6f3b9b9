// The two kernels of mlp (ops/mlp.h): of 16 bits (conv2d_nhwc_wgmma_mlp.cuh), and of float32, by
// clusters of blocks (conv2d_nhwc_wgmma_mlp_cluster.cuh).
#pragma once

#include "cuda/sm90/conv2d_nhwc_wgmma_epilogue.cuh"
#include "ops/mlp.h"

namespace cnn_engine::cuda {

// What mlp is asked for.
struct MlpCall {
  const void *x, *packed;
  const float *first_bias, *second_bias;
  const void* residual;
  void* y;
  Conv2dShape shape;
  int outputs;
  wgmma::Clamp outer;
  Overflow overflow;
  Stream stream;
};

namespace mlp_clusters {

// What it does not take, or null.
const char* why_not(const Conv2dShape& shape, int outputs);
// What a launch takes, in microseconds; infinite where no cluster finds room.
double time_of(const Conv2dShape& shape, const Target& target);
std::int64_t packed_bytes(const Conv2dShape& shape, int outputs);
void pack(const float* first, const float* second, void* packed, const Conv2dShape& shape,
          int outputs, Stream stream);
void run(const MlpCall& call);

}  // namespace mlp_clusters
}  // namespace cnn_engine::cuda
