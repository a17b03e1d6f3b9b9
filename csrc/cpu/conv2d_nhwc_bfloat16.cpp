// conv2d_nhwc_bfloat16: the direct method with what is multiplied rounded to bfloat16, and pairs of
// products summed into float32 by VDPBF16PS. Compiled once, for AVX-512 with AVX512-BF16.
#define CNN_ENGINE_PAIRS

#include "cpu/conv2d_nhwc_direct.h"
#include "cpu/kernels.h"
#include "cpu/nhwc_tiles.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void unary(const float* input, float* output, std::int64_t size, UnaryFunction function,
           float alpha, float beta, int threads) {
  avx512::kernels.unary(input, output, size, function, alpha, beta, threads);
}

std::int64_t conv2d_nhwc_bfloat16_packed(const Conv2dShape& shape) {
  return direct_packed(shape, Conv2dMethod::direct);
}

void conv2d_nhwc_bfloat16_pack(const float* weight, float* packed, const Conv2dShape& shape) {
  direct_pack(weight, packed, shape, Conv2dMethod::direct);
}

std::int64_t conv2d_nhwc_bfloat16_workspace(const Conv2dShape& shape, int threads) {
  return Scratch::bytes(threads, direct_scratch(shape, Conv2dMethod::direct));
}

void conv2d_nhwc_bfloat16(const float* input, const float* packed, const float* bias,
                          const float* residual, const float* scale, const float* shift,
                          float* output, void* workspace, const Conv2dShape& shape,
                          const Conv2dPitches& pitches, bool scale_per_image, float floor,
                          UnaryFunction activation, float alpha, float beta, int threads) {
  if (shape.n == 0) return;
  const Scratch scratch(workspace, threads, direct_scratch(shape, Conv2dMethod::direct));
  const Direct call{input,
                    packed,
                    bias,
                    residual,
                    {scale, shift, scale_per_image, floor},
                    output,
                    pitches,
                    {activation, alpha, beta}};
  if (is_pointwise(shape)) return pointwise(call, scratch, shape, threads);
  banded(call, scratch, shape, false, threads);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
