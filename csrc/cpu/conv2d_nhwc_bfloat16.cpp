// conv2d_nhwc_bfloat16: the direct method with what is multiplied rounded to bfloat16, and pairs of
// products summed into float32 by VDPBF16PS. Compiled once, for AVX-512 with AVX512-BF16.
#include "cpu/conv2d_nhwc_direct.h"
#include "cpu/kernels.h"
#include "cpu/nhwc_tiles.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

void unary(const float* input, float* output, std::int64_t size, UnaryFunction function,
           float alpha, float beta, int threads) {
  avx512::kernels.unary(input, output, size, function, alpha, beta, threads);
}

namespace {

// Two channels in a unit.
struct Bfloat16 : Float32 {
  static constexpr int kChannels = 2;
  static constexpr bool kWritten = true;

  CNN_ENGINE_INLINE static float packed(const float* weight, int channels, int area) {
    Vec<4> pair{};
    for (int i = 0; i < 2 && i < channels; ++i) pair[i] = weight[i * area];
    const __m128bh rounded = _mm_cvtneps_pbh(pair);
    float both;
    __builtin_memcpy(&both, &rounded, sizeof both);
    return both;
  }
  CNN_ENGINE_INLINE static void multiply_add(Vec<16>& sum, Vec<16> weights, float value) {
    sum =
        (Vec<16>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_ps(value));
  }
  CNN_ENGINE_INLINE static void multiply_add(Vec<8>& sum, Vec<8> weights, float value) {
    sum = (Vec<8>)_mm256_dpbf16_ps((__m256)sum, (__m256bh)weights, (__m256bh)_mm256_set1_ps(value));
  }
};

constexpr TilesOf<Bfloat16> kTiles = make_tiles<Bfloat16>();
inline const TilesOf<Bfloat16>& tiles_of(Bfloat16) { return kTiles; }

// The prologue, with what it gives rounded.
struct Bfloat16Prologue : Prologue {
  CNN_ENGINE_INLINE Bfloat16Prologue of_image(std::int64_t n, int channels) const {
    return {Prologue::of_image(n, channels)};
  }
  CNN_ENGINE_INLINE void write(const float* from, float* to, int channels, int first) const {
    constexpr int W = 16;
    const Vec<W> lowest = splat<W>(floor);
    for (int c = 0; c < channels; c += W) {
      const int count = channels - c;
      Vec<W> value = load_some<W>(from + c, count);
      if (scale) value *= load_some<W>(scale + first + c, count);
      if (shift) value += load_some<W>(shift + first + c, count);
      const __m256bh rounded = _mm512_cvtneps_pbh(raised(lowest, value));
      const int bytes = 4 * units<Bfloat16>(count < W ? count : W);
      __builtin_memcpy(to + c / 2, &rounded, bytes);
    }
  }
};

}  // namespace

std::int64_t conv2d_nhwc_bfloat16_packed(const Conv2dShape& shape) {
  return direct_packed<Bfloat16>(shape);
}

void conv2d_nhwc_bfloat16_pack(const float* weight, float* packed, const Conv2dShape& shape) {
  direct_pack<Bfloat16>(weight, packed, shape);
}

std::int64_t conv2d_nhwc_bfloat16_workspace(const Conv2dShape& shape, int threads) {
  return Scratch::bytes(threads, direct_scratch<Bfloat16>(shape));
}

void conv2d_nhwc_bfloat16(const float* input, const float* packed, const float* bias,
                          const float* residual, const float* scale, const float* shift,
                          float* output, void* workspace, const Conv2dShape& shape,
                          const Conv2dPitches& pitches, bool scale_per_image, float floor,
                          UnaryFunction activation, float alpha, float beta, int threads) {
  if (shape.n == 0) return;
  const Scratch scratch(workspace, threads, direct_scratch<Bfloat16>(shape));
  const Activation function{activation, alpha, beta};
  const DirectOf<Bfloat16, Bfloat16Prologue> call{input,
                                                  packed,
                                                  residual,
                                                  {{scale, shift, scale_per_image, floor}},
                                                  output,
                                                  pitches,
                                                  function.epilogue(bias),
                                                  function};
  if (is_pointwise(shape)) return pointwise(call, scratch, shape, threads);
  banded(call, scratch, shape, false, threads);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
