// conv2d_nhwc with what is multiplied as float32, in two parts of tf32.
#include "cuda/conv2d_nhwc.cuh"

namespace cnn_engine::cuda::nhwc {
CNN_ENGINE_OPERANDS(Split)
}  // namespace cnn_engine::cuda::nhwc
