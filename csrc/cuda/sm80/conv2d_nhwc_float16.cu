// conv2d_nhwc with what is multiplied as float16.
#include "cuda/sm80/conv2d_nhwc.cuh"

namespace cnn_engine::cuda::nhwc {
CNN_ENGINE_OPERANDS(Float16)
}  // namespace cnn_engine::cuda::nhwc
