// conv2d_nhwc with what is multiplied as float32, in three parts of bfloat16.
#include "cuda/sm80/conv2d_nhwc.cuh"

namespace cnn_engine::cuda::nhwc {
CNN_ENGINE_OPERANDS(Split)
}  // namespace cnn_engine::cuda::nhwc
