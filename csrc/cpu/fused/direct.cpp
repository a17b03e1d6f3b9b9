// conv2d + activation for any kernel and stride, and linear + activation: SIMD lanes are output
// channels, several outputs share each vector of weights.
#include "cpu/fused/activation.h"
#include "cpu/fused/block.h"
#include "cpu/fused/multiply.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// `T` outputs side by side in row y, the vectors of channels from k.
template <int W, int B, int T>
void convolve(const ConvStep& s, const float* in, float* out, const float* weight, int k, int y,
              int x) {
  const int pitch = s.in.pitch;
  const std::size_t row = std::size_t(s.in.cols) * pitch;
  const float* corner =
      in + std::size_t(y) * s.stride_h * row + std::size_t(x) * s.stride_w * pitch;
  // Channels without a gap make a row of the kernel one long sum.
  const int runs = pitch == s.c ? 1 : s.s;
  const int count = pitch == s.c ? s.s * s.c : s.c;
  Vec<W> acc[T][B] = {};
  for (int r = 0; r < s.r; ++r) {
    for (int run = 0; run < runs; ++run) {
      accumulate<W, B, T>(acc, corner + r * row + std::size_t(run) * pitch,
                          std::size_t(s.stride_w) * pitch, 1, weight, count);
      weight += std::size_t(count) * B * W;
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      store<W>(out + s.out.at(y, x + t) + k + b * W,
               activated<W>(s.activation, acc[t][b] + load<W>(s.bias + k + b * W)));
    }
  }
}

template <int W, int B>
void convolve_row(const ConvStep& s, const float* in, float* out, const float* weight, int k,
                  int y) {
  constexpr int most = kMostRows<B>;
  int x = 0;
  for (; x + most <= s.conv_w; x += most) convolve<W, B, most>(s, in, out, weight, k, y, x);
  for (; most > 4 && x + 4 <= s.conv_w; x += 4) convolve<W, B, 4>(s, in, out, weight, k, y, x);
  for (; x < s.conv_w; ++x) convolve<W, B, 1>(s, in, out, weight, k, y, x);
}

template <int W>
void convolve_rows(const ConvStep& s, const float* in, float* out, int begin, int end) {
  const float* weight = s.weight;
  for (int k = 0; k < s.k_pitch;) {
    const int block = block_size((s.k_pitch - k) / W);
    for (int y = begin; y < end; ++y) {
      if (block == 3) convolve_row<W, 3>(s, in, out, weight, k, y);
      if (block == 2) convolve_row<W, 2>(s, in, out, weight, k, y);
      if (block == 1) convolve_row<W, 1>(s, in, out, weight, k, y);
    }
    weight += std::size_t(s.r) * s.s * s.c * block * W;
    k += block * W;
  }
}

// An output's sum is four sums over a quarter of the inputs each, so that a single image has enough
// independent additions; the same for every number of images.
template <int W, int B, int T>
void dot(const LinearStep& s, const float* in, std::size_t in_stride, float* out,
         std::size_t out_stride, const float* weight, int k) {
  constexpr int quarters = 4;
  const int count = s.in_pitch / quarters;
  Vec<W> acc[T][quarters][B] = {};
  for (int c = 0; c < count; ++c) {
#pragma GCC unroll 4
    for (int q = 0; q < quarters; ++q) {
      const std::size_t position = std::size_t(q) * count + c;
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const Vec<W> weights = load<W>(weight + (position * B + b) * W);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) acc[t][q][b] += weights * in[t * in_stride + position];
      }
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const Vec<W> sum = (acc[t][0][b] + acc[t][1][b]) + (acc[t][2][b] + acc[t][3][b]);
      store<W>(out + t * out_stride + k + b * W,
               activated<W>(s.activation, sum + load<W>(s.bias + k + b * W)));
    }
  }
}

// The same for many images, a quarter after the other, so that weights are read once for all.
template <int W, int B, int T>
void dot_many(const LinearStep& s, const float* in, std::size_t in_stride, float* out,
              std::size_t out_stride, const float* weight, int k) {
  constexpr int quarters = 4;
  const int count = s.in_pitch / quarters;
  Vec<W> sum[quarters][T][B];
  for (int q = 0; q < quarters; ++q) {
    const std::size_t position = std::size_t(q) * count;
    Vec<W> acc[T][B] = {};
    accumulate<W, B, T>(acc, in + position, in_stride, 1, weight + position * B * W, count);
    for (int t = 0; t < T; ++t) {
      for (int b = 0; b < B; ++b) sum[q][t][b] = acc[t][b];
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int b = 0; b < B; ++b) {
      const Vec<W> all = (sum[0][t][b] + sum[1][t][b]) + (sum[2][t][b] + sum[3][t][b]);
      store<W>(out + t * out_stride + k + b * W,
               activated<W>(s.activation, all + load<W>(s.bias + k + b * W)));
    }
  }
}

template <int W, int B>
void dot_images(const LinearStep& s, const float* in, std::size_t in_stride, float* out,
                std::size_t out_stride, int n, const float* weight, int k) {
  constexpr int most = kRegisters == 32 ? (B == 1 ? 4 : 2) : (B == 1 ? 2 : 1);
  constexpr int many = kMostRows<B> < 8 ? kMostRows<B> : 8;
  int i = 0;
  for (; i + many <= n; i += many) {
    dot_many<W, B, many>(s, in + i * in_stride, in_stride, out + i * out_stride, out_stride, weight,
                         k);
  }
  for (; i + most <= n; i += most)
    dot<W, B, most>(s, in + i * in_stride, in_stride, out + i * out_stride, out_stride, weight, k);
  for (; i < n; ++i)
    dot<W, B, 1>(s, in + i * in_stride, in_stride, out + i * out_stride, out_stride, weight, k);
}

template <int W>
void linear(const LinearStep& s, const float* in, std::size_t in_stride, float* out,
            std::size_t out_stride, int n, int begin, int end) {
  const float* weight = s.weight;
  int index = 0;
  for (int k = 0; k < s.out_pitch; ++index) {
    const int block = block_size((s.out_pitch - k) / W);
    if (index >= begin && index < end) {
      if (block == 3) dot_images<W, 3>(s, in, in_stride, out, out_stride, n, weight, k);
      if (block == 2) dot_images<W, 2>(s, in, in_stride, out, out_stride, n, weight, k);
      if (block == 1) dot_images<W, 1>(s, in, in_stride, out, out_stride, n, weight, k);
    }
    weight += std::size_t(s.in_pitch) * block * W;
    k += block * W;
  }
}

}  // namespace

void fused_direct(const ConvStep& s, const float* in, float* out, float*, int begin, int end) {
  if (s.lanes == kWide) return convolve_rows<kWide>(s, in, out, begin, end);
  convolve_rows<kNarrow>(s, in, out, begin, end);
}

void fused_linear(const LinearStep& s, const float* in, std::size_t in_stride, float* out,
                  std::size_t out_stride, float*, int n, int begin, int end) {
  if (s.lanes == kWide) return linear<kWide>(s, in, in_stride, out, out_stride, n, begin, end);
  linear<kNarrow>(s, in, in_stride, out, out_stride, n, begin, end);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
