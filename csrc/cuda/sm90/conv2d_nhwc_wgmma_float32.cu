// conv2d_nhwc_wgmma with what is multiplied as float32, in two parts of float16.
#include "cuda/sm90/conv2d_nhwc_wgmma_forms.cuh"

namespace cnn_engine::cuda::wgmma {
CNN_ENGINE_MULTIPLIED(float)
}  // namespace cnn_engine::cuda::wgmma
