// conv2d_nhwc_wgmma with what is multiplied as bfloat16.
#include "cuda/sm90/conv2d_nhwc_wgmma_forms.cuh"

namespace cnn_engine::cuda::wgmma {
CNN_ENGINE_MULTIPLIED(__nv_bfloat16)
}  // namespace cnn_engine::cuda::wgmma
