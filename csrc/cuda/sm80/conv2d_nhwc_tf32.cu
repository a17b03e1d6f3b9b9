// conv2d_nhwc with what is multiplied as tf32.
#include "cuda/sm80/conv2d_nhwc.cuh"

namespace cnn_engine::cuda::nhwc {
CNN_ENGINE_OPERANDS(Tf32)
}  // namespace cnn_engine::cuda::nhwc
