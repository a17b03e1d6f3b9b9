// conv2d and linear as direct.cpp has them, with inputs and weights rounded to bfloat16 and pairs
// of products summed into float32 by VDPBF16PS. Compiled once, for AVX-512 with AVX512-BF16.
#include <immintrin.h>

#include "cpu/fused/activation.h"
#include "cpu/fused/block.h"
#include "cpu/fused/multiply.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

using Bits = std::uint16_t;  // one bfloat16

// To the nearest, ties to even, 32 at a time; `count` is rounded up to that and both sides have
// room.
void round_row(const float* from, std::size_t count, Bits* to) {
  for (std::size_t i = 0; i < count; i += 32) {
    const __m512bh pair =
        _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    __builtin_memcpy(to + i, &pair, sizeof pair);
  }
}

Bits round_one(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return static_cast<Bits>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

CNN_ENGINE_INLINE void dot_pairs(Vec<16>& acc, Vec<16> a, std::uint32_t pair) {
  acc = reinterpret_cast<Vec<16>>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(a),
                       reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair))));
}

CNN_ENGINE_INLINE void dot_pairs(Vec<8>& acc, Vec<8> a, std::uint32_t pair) {
  acc = reinterpret_cast<Vec<8>>(
      _mm256_dpbf16_ps(reinterpret_cast<__m256>(acc), reinterpret_cast<__m256bh>(a),
                       reinterpret_cast<__m256bh>(_mm256_set1_epi32(pair))));
}

CNN_ENGINE_INLINE std::uint32_t load_pair(const Bits* from) {
  std::uint32_t pair;
  __builtin_memcpy(&pair, from, sizeof pair);
  return pair;
}

// acc[t][b] += the products of `pairs` pairs; a vector of weights is W channels of two.
template <int W, int B, int T>
CNN_ENGINE_INLINE void accumulate_pairs(Vec<W> (&acc)[T][B], const Bits* x, std::size_t t_stride,
                                        const float* w, int pairs) {
  for (int p = 0; p < pairs; ++p, x += 2, w += B * W) {
    Vec<W> weights[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) weights[b] = load<W>(w + b * W);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      const std::uint32_t pair = load_pair(x + t * t_stride);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) dot_pairs(acc[t][b], weights[b], pair);
    }
  }
}

// `rounded` is the input from row begin * stride_h on, [rows, cols, pair_pitch].
template <int W, int B, int T>
void convolve(const ConvStep& s, const Bits* rounded, float* out, const float* weight, int k, int y,
              int begin, int x) {
  const std::size_t row = std::size_t(s.in.cols) * s.pair_pitch;
  const Bits* corner = rounded + std::size_t(y - begin) * s.stride_h * row +
                       std::size_t(x) * s.stride_w * s.pair_pitch;
  const int pairs = (s.c + 1) / 2;
  const int runs = s.pair_pitch == 2 * pairs ? 1 : s.s;
  const int count = s.pair_pitch == 2 * pairs ? s.s * pairs : pairs;
  Vec<W> acc[T][B] = {};
  for (int r = 0; r < s.r; ++r) {
    for (int run = 0; run < runs; ++run) {
      accumulate_pairs<W, B, T>(acc, corner + r * row + std::size_t(run) * s.pair_pitch,
                                std::size_t(s.stride_w) * s.pair_pitch, weight, count);
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
void convolve_row(const ConvStep& s, const Bits* rounded, float* out, const float* weight, int k,
                  int y, int begin) {
  constexpr int most = kMostRows<B>;
  int x = 0;
  for (; x + most <= s.conv_w; x += most)
    convolve<W, B, most>(s, rounded, out, weight, k, y, begin, x);
  for (; most > 4 && x + 4 <= s.conv_w; x += 4)
    convolve<W, B, 4>(s, rounded, out, weight, k, y, begin, x);
  for (; x < s.conv_w; ++x) convolve<W, B, 1>(s, rounded, out, weight, k, y, begin, x);
}

void round_rows(const ConvStep& s, const float* in, Bits* to, int begin, int end) {
  const std::size_t first = std::size_t(begin) * s.stride_h * s.in.cols;
  const std::size_t pixels = (std::size_t(end - 1 - begin) * s.stride_h + s.r) * s.in.cols;
  if (s.pair_pitch == s.in.pitch)
    return round_row(in + first * s.in.pitch, pixels * s.in.pitch, to);
  for (std::size_t p = 0; p < pixels; ++p) {
    for (int c = 0; c < s.pair_pitch; ++c) {
      to[p * s.pair_pitch + c] = c < s.c ? round_one(in[(first + p) * s.in.pitch + c]) : Bits{0};
    }
  }
}

template <int W>
void convolve_rows(const ConvStep& s, const Bits* rounded, float* out, int begin, int end) {
  const float* weight = s.weight;
  for (int k = 0; k < s.k_pitch;) {
    const int block = block_size((s.k_pitch - k) / W);
    for (int y = begin; y < end; ++y) {
      if (block == 3) convolve_row<W, 3>(s, rounded, out, weight, k, y, begin);
      if (block == 2) convolve_row<W, 2>(s, rounded, out, weight, k, y, begin);
      if (block == 1) convolve_row<W, 1>(s, rounded, out, weight, k, y, begin);
    }
    weight += std::size_t(s.r) * s.s * ((s.c + 1) / 2) * block * W;
    k += block * W;
  }
}

// As in direct.cpp: four sums over a quarter of the inputs each, in any number of images.
template <int W, int B, int T>
void dot(const LinearStep& s, const Bits* in, float* out, std::size_t out_stride,
         const float* weight, int k) {
  constexpr int quarters = 4;
  const int pairs = s.in_pitch / 2 / quarters;
  Vec<W> acc[T][quarters][B] = {};
  for (int p = 0; p < pairs; ++p) {
#pragma GCC unroll 4
    for (int q = 0; q < quarters; ++q) {
      const std::size_t position = std::size_t(q) * pairs + p;
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const Vec<W> weights = load<W>(weight + (position * B + b) * W);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          dot_pairs(acc[t][q][b], weights,
                    load_pair(in + std::size_t(t) * s.rounded_pitch + 2 * position));
        }
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

template <int W, int B>
void dot_images(const LinearStep& s, const Bits* in, float* out, std::size_t out_stride, int n,
                const float* weight, int k) {
  constexpr int most = B == 1 ? 4 : 2;
  int i = 0;
  for (; i + most <= n; i += most)
    dot<W, B, most>(s, in + std::size_t(i) * s.rounded_pitch, out + i * out_stride, out_stride,
                    weight, k);
  for (; i < n; ++i)
    dot<W, B, 1>(s, in + std::size_t(i) * s.rounded_pitch, out + i * out_stride, out_stride, weight,
                 k);
}

template <int W>
void dot_blocks(const LinearStep& s, const Bits* in, float* out, std::size_t out_stride, int n,
                int begin, int end) {
  const float* weight = s.weight;
  int index = 0;
  for (int k = 0; k < s.out_pitch; ++index) {
    const int block = block_size((s.out_pitch - k) / W);
    if (index >= begin && index < end) {
      if (block == 3) dot_images<W, 3>(s, in, out, out_stride, n, weight, k);
      if (block == 2) dot_images<W, 2>(s, in, out, out_stride, n, weight, k);
      if (block == 1) dot_images<W, 1>(s, in, out, out_stride, n, weight, k);
    }
    weight += std::size_t(s.in_pitch) / 2 * block * W;
    k += block * W;
  }
}

}  // namespace

void fused_direct_bfloat16(const ConvStep& s, const float* in, float* out, float* scratch,
                           int begin, int end) {
  Bits* rounded = reinterpret_cast<Bits*>(scratch);
  round_rows(s, in, rounded, begin, end);
  if (s.lanes == kWide) return convolve_rows<kWide>(s, rounded, out, begin, end);
  convolve_rows<kNarrow>(s, rounded, out, begin, end);
}

void fused_linear_bfloat16(const LinearStep& s, const float* in, std::size_t in_stride, float* out,
                           std::size_t out_stride, float* scratch, int n, int begin, int end) {
  Bits* rounded = reinterpret_cast<Bits*>(scratch);
  for (int i = 0; i < n; ++i) {
    round_row(in + i * in_stride, s.in_pitch, rounded + std::size_t(i) * s.rounded_pitch);
  }
  if (s.lanes == kWide) return dot_blocks<kWide>(s, rounded, out, out_stride, n, begin, end);
  dot_blocks<kNarrow>(s, rounded, out, out_stride, n, begin, end);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
