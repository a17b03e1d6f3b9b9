// conv2d_nhwc_wgmma with what is multiplied as tf32.
#include "cuda/sm90/conv2d_nhwc_wgmma_forms.cuh"

namespace cnn_engine::cuda::wgmma {
CNN_ENGINE_MULTIPLIED(Tf32)
}  // namespace cnn_engine::cuda::wgmma
