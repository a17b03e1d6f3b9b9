// conv2d_nhwc with what is multiplied as bfloat16.
#include "cuda/sm80/conv2d_nhwc.cuh"

namespace cnn_engine::cuda::nhwc {
CNN_ENGINE_OPERANDS(Bfloat16)
}  // namespace cnn_engine::cuda::nhwc
