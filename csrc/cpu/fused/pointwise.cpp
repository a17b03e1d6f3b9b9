// What the fused network does beside convolutions and linear: images in, pools and activations that
// are not part of a convolution, the end of the network; and the table of this build's kernels.
#include <limits>
#include <type_traits>

#include "cpu/fused/activation.h"
#include "cpu/window_bound.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr int kLanes = kNarrow;

void planar_row(const std::uint8_t* from, const Pixels& pixels, int w, int pitch, float* to) {
  int word = 0;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  // Four pixels are one 32-bit word: shifting a vector of words deals the phases out.
  for (; (word + kLanes) * 4 <= w; word += kLanes) {
    typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));
    Words words;
    __builtin_memcpy(&words, from + word * 4, sizeof words);
#pragma GCC unroll 4
    for (int phase = 0; phase < 4; ++phase) {
      const IntVec<kLanes> bytes = reinterpret_cast<IntVec<kLanes>>((words >> (8 * phase)) & 255u);
      const Vec<kLanes> value = __builtin_convertvector(bytes, Vec<kLanes>);
      store<kLanes>(to + phase * pitch + word, value * pixels.scale + pixels.offset);
    }
  }
#endif
  for (int x = word * 4; x < w; ++x) {
    to[(x % 4) * pitch + x / 4] = from[x] * pixels.scale + pixels.offset;
  }
}

void planar_row(const float* from, int w, int pitch, float* to) {
  int x = 0;
  for (; x + 4 <= w; x += 4) {
    for (int phase = 0; phase < 4; ++phase) to[phase * pitch + x / 4] = from[x + phase];
  }
  for (; x < w; ++x) to[(x % 4) * pitch + x / 4] = from[x];
}

// The lanes of two vectors by turns, the first half of them or the second.
template <int W, bool second, int... lane>
CNN_ENGINE_INLINE Vec<W> interleaved(Vec<W> a, Vec<W> b, std::integer_sequence<int, lane...>) {
  constexpr IntVec<W> from = {((second ? W / 2 : 0) + lane / 2 + lane % 2 * W)...};
  return __builtin_shuffle(a, b, from);
}

template <int W>
CNN_ENGINE_INLINE void interleave(Vec<W> a, Vec<W> b, Vec<W>& first, Vec<W>& second) {
  constexpr auto lanes = std::make_integer_sequence<int, W>();
  first = interleaved<W, false>(a, b, lanes);
  second = interleaved<W, true>(a, b, lanes);
}

// Stores two rows by columns.
template <int W>
CNN_ENGINE_INLINE void store_pairs(Vec<W> a, Vec<W> b, float* to) {
  Vec<W> first = a, second = b;
  if constexpr (W > 1) interleave<W>(a, b, first, second);
  store<W>(to, first);
  store<W>(to + W, second);
}

// Stores [4, W] by columns.
template <int W>
CNN_ENGINE_INLINE void store_columns(const Vec<W> (&rows)[4], float* to) {
  if constexpr (W == 1) {
    for (int i = 0; i < 4; ++i) store<W>(to + i, rows[i]);
    return;
  }
  Vec<W> even[2], odd[2], all[4];
  interleave<W>(rows[0], rows[2], even[0], even[1]);
  interleave<W>(rows[1], rows[3], odd[0], odd[1]);
  interleave<W>(even[0], odd[0], all[0], all[1]);
  interleave<W>(even[1], odd[1], all[2], all[3]);
  for (int i = 0; i < 4; ++i) store<W>(to + i * W, all[i]);
}

// Sums over channels of a row's |x| and x^2 (PlanarLayout); `row` is its first position.
template <int W>
void measure_row(const PlanarLayout& p, const float* row, float* sizes) {
  const int positions = (p.w + 3) / 4;
  for (int first = 0; first < positions; first += W) {
    const int at = first + W > positions ? positions - W : first;
    Vec<W> size[4], square[4];
#pragma GCC unroll 4
    for (int phase = 0; phase < 4; ++phase) {
      const float* from = row + phase * p.pitch + at;
      size[phase] = square[phase] = Vec<W>{};
      for (int c = 0; c < p.c; ++c, from += p.plane()) {
        const Vec<W> value = load<W>(from);
        size[phase] += absolute(value);
        square[phase] += value * value;
      }
      square[phase] = at_least<W>(square[phase], size[phase]);
    }
    if (p.sums_step == 1) {
      store_columns<W>(size, sizes + p.left + 4 * at);
      store_columns<W>(square, sizes + p.squares() + p.left + 4 * at);
      continue;
    }
#pragma GCC unroll 2
    for (int phase = 0; phase < 2; ++phase) {
      const int x = p.left + phase;
      float* to = sizes + x % 2 * p.sums_pitch + x / 2 + 2 * at;
      store_pairs<W>(size[phase], size[phase + 2], to);
      store_pairs<W>(square[phase], square[phase + 2], to + p.squares());
    }
  }
}

void to_planar(const void* image, const Pixels& pixels, const PlanarLayout& p, float* out,
               int begin, int end) {
  for (int c = 0; c < p.c; ++c) {
    for (int y = begin; y < end; ++y) {
      const std::size_t from = (std::size_t(c) * p.h + y) * p.w;
      const std::size_t row = std::size_t(c) * p.rows + y + p.top;
      float* to = out + row * 4 * p.pitch + p.margin;
      float* plain = out + p.plain() + row * p.plain_pitch() + p.left;
      if (pixels.is_uint8) {
        const auto* values = static_cast<const std::uint8_t*>(image) + from;
        planar_row(values, pixels, p.w, p.pitch, to);
        for (int x = 0; x < p.w; ++x) plain[x] = values[x] * pixels.scale + pixels.offset;
      } else {
        const auto* values = static_cast<const float*>(image) + from;
        planar_row(values, p.w, p.pitch, to);
        __builtin_memcpy(plain, values, p.w * sizeof(float));
      }
    }
  }
  for (int y = begin; y < end; ++y) {
    const float* row = out + std::size_t(y + p.top) * 4 * p.pitch + p.margin;
    float* sizes = out + p.sums_at(y + p.top);
    if (p.w > 4 * (kLanes - 1)) {
      measure_row<kLanes>(p, row, sizes);
    } else if (p.w > 12) {
      measure_row<4>(p, row, sizes);
    } else {
      measure_row<1>(p, row, sizes);
    }
  }
}

void to_channels_last(const void* image, const Pixels& pixels, const Layout& p, float* out,
                      int begin, int end) {
  for (int y = begin; y < end; ++y) {
    for (int c = 0; c < p.c; ++c) {
      const std::size_t from = (std::size_t(c) * p.h + y) * p.w;
      float* to = out + p.at(y, 0) + c;
      if (pixels.is_uint8) {
        const std::uint8_t* row = static_cast<const std::uint8_t*>(image) + from;
        for (int x = 0; x < p.w; ++x)
          to[std::size_t(x) * p.pitch] = row[x] * pixels.scale + pixels.offset;
      } else {
        const float* row = static_cast<const float*>(image) + from;
        for (int x = 0; x < p.w; ++x) to[std::size_t(x) * p.pitch] = row[x];
      }
    }
  }
}

void max_pool(const PoolStep& s, const float* in, float* out, int begin, int end) {
  for (int i = begin; i < end; ++i) {
    const int top = i * s.stride_h - s.pad_h;
    const int y_begin = top < 0 ? 0 : top;
    const int y_end = top + s.r < s.in.h ? top + s.r : s.in.h;
    for (int j = 0; j < s.out.w; ++j) {
      const int left = j * s.stride_w - s.pad_w;
      const int x_begin = left < 0 ? 0 : left;
      const int x_end = left + s.s < s.in.w ? left + s.s : s.in.w;
      for (int c = 0; c < s.in.pitch; c += kLanes) {
        Vec<kLanes> best = load<kLanes>(in + s.in.at(y_begin, x_begin) + c);
        for (int y = y_begin; y < y_end; ++y) {
          for (int x = x_begin; x < x_end; ++x) {
            best = maximum(best, load<kLanes>(in + s.in.at(y, x) + c));
          }
        }
        store<kLanes>(out + s.out.at(i, j) + c, activated<kLanes>(s.activation, best));
      }
    }
  }
}

void activate(Activation activation, float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLanes) {
    store<kLanes>(values + i, activated<kLanes>(activation, load<kLanes>(values + i)));
  }
}

// A line of each plane at a time: what is read for it stays in the first-level cache.
void flatten(const Layout& p, const float* in, float* out) {
  constexpr int kColumns = 16;
  const std::size_t plane = std::size_t(p.h) * p.w;
  for (int y = 0; y < p.h; ++y) {
    for (int x = 0; x < p.w; x += kColumns) {
      const int count = p.w - x < kColumns ? p.w - x : kColumns;
      const float* from = in + p.at(y, x);
      float* to = out + std::size_t(y) * p.w + x;
      for (int c = 0; c < p.c; ++c, to += plane) {
        for (int i = 0; i < count; ++i) to[i] = from[std::size_t(i) * p.pitch + c];
      }
    }
  }
}

void softmax(const float* in, float* out, int classes) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int m = 0; m < classes; ++m) largest = in[m] > largest ? in[m] : largest;
  double sum = 0.0;  // a float of many classes is large beside each
  for (int m = 0; m < classes; m += kLanes) {
    const int count = classes - m < kLanes ? classes - m : kLanes;
    float lanes[kLanes] = {};
    for (int i = 0; i < count; ++i) lanes[i] = in[m + i];
    store<kLanes>(lanes, exponential<kLanes>(load<kLanes>(lanes) - largest));
    for (int i = 0; i < count; ++i) {
      out[m + i] = lanes[i];
      sum += lanes[i];
    }
  }
  const float whole = static_cast<float>(sum);
  for (int m = 0; m < classes; ++m) out[m] /= whole;
}

bool finite(const float* values, std::size_t count) {
  Vec<kLanes> zero = {};  // x - x is 0 for a number, NaN for an infinity or a NaN
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec<kLanes> x = load<kLanes>(values + i);
    zero += x - x;
  }
  float sum = 0.0f;
  for (; i < count; ++i) sum += values[i] - values[i];
  for (int lane = 0; lane < kLanes; ++lane) sum += zero[lane];
  return sum == 0.0f;
}

// The ceiling of arithmetic: as many independent chains of multiply-adds as hide their latency.
double fma_burst(std::int64_t iterations) {
  constexpr int chains = kRegisters == 32 ? 24 : 12;
  Vec<kWide> acc[chains];
  for (int i = 0; i < chains; ++i) acc[i] = Vec<kWide>{} + static_cast<float>(i);
  Vec<kWide> factor = Vec<kWide>{} + 0.999f, term = Vec<kWide>{} + 1e-3f;
  __asm__ volatile("" : "+m"(factor), "+m"(term));  // not known when compiled
  for (std::int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 24
    for (int i = 0; i < chains; ++i) acc[i] = acc[i] * factor + term;
  }
  for (int i = 0; i < chains; ++i) __asm__ volatile("" : : "m"(acc[i]));  // and used
  return 2.0 * kWide * chains * static_cast<double>(iterations);
}

}  // namespace

// In winograd.cpp and direct.cpp.
void fused_winograd(const ConvStep& s, const float* in, float* out, float* scratch, int begin,
                    int end);
void fused_direct(const ConvStep& s, const float* in, float* out, float* scratch, int begin,
                  int end);
void fused_linear(const LinearStep& s, const float* in, std::size_t in_stride, float* out,
                  std::size_t out_stride, float* scratch, int n, int begin, int end);

extern const FusedKernels fused_kernels = {
    kWide,          kNarrow,      kLanes,   kProductRounding, to_planar,    to_channels_last,
    fused_winograd, fused_direct, max_pool, activate,         fused_linear, flatten,
    softmax,        finite,       fma_burst};

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
