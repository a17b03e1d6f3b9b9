// max_pool2d_nhwc and average_pool2d_nhwc on the CPU: channels on SIMD lanes.
#include "ops/pool2d_nhwc.h"

#include "cpu/channels.h"
#include "ops/window.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// What lies inside the image of the window of one output.
struct Window {
  const float* corner;
  int rows, columns;
  std::int64_t row, column;  // floats from one to the next
};

struct Maximum {
  static constexpr float kStart = -__builtin_inff();
  template <typename V>
  static CNN_ENGINE_INLINE V take(V best, V x) {
    return (x > best) | (x != x) ? x : best;  // a NaN wins and, as best, stays
  }
};

struct Total {
  static constexpr float kStart = 0.0f;
  template <typename V>
  static CNN_ENGINE_INLINE V take(V sum, V x) {
    return sum + x;
  }
};

// V vectors of W channels; finish makes the output of what was taken.
template <typename Kind, int W, int V, typename Finish>
CNN_ENGINE_INLINE void pool_vectors(const Window& window, int c, float* to, const Finish& finish) {
  Vec<W> value[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) value[v] = splat<W>(Kind::kStart);
  for (int i = 0; i < window.rows; ++i) {
    const float* from = window.corner + i * window.row + c;
    for (int j = 0; j < window.columns; ++j, from += window.column) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) value[v] = Kind::take(value[v], load<W>(from + v * W));
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) store<W>(to + c + v * W, finish(value[v]));
}

template <typename Kind, typename Finish>
void pool_window(const Window& window, int channels, float* to, const Finish& finish) {
  constexpr int kTogether = 4;
  int c = 0;
  for (; c + kTogether * kWide <= channels; c += kTogether * kWide) {
    pool_vectors<Kind, kWide, kTogether>(window, c, to, finish);
  }
  if (c == channels) return;
  if (c > 0 && channels - c < kWide) {  // a last vector that begins earlier
    return pool_vectors<Kind, kWide, 1>(window, channels - kWide, to, finish);
  }
  Window rest = window;
  rest.corner += c;
  for_channels(channels - c, [&](auto width, int at) {
    pool_vectors<Kind, decltype(width)::value, 1>(rest, at, to + c, finish);
  });
}

// Calls body(window, the output's first channel, the window's first row and column).
template <typename Shape, typename Body>
void for_windows(const float* input, float* output, const Shape& shape, int x_pitch, int y_pitch,
                 int threads, const Body& body) {
  const Shape p = shape;
  const int out_h = p.out_h(), out_w = p.out_w();
  const std::int64_t cost = std::int64_t{out_w} * p.r * p.s * p.c / 4;
  parallel_for(std::int64_t{p.n} * out_h, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      const float* image = input + index / out_h * p.h * p.w * x_pitch;
      const int top = static_cast<int>(index % out_h) * p.stride_h - p.pad_top;
      const int y = first_inside(top, p.dilation_h);
      const int y_end = end_inside(top, p.r, p.dilation_h, p.h);
      Window window;
      window.rows = y_end > y ? (y_end - y + p.dilation_h - 1) / p.dilation_h : 0;
      window.row = std::int64_t{p.dilation_h} * p.w * x_pitch;
      window.column = std::int64_t{p.dilation_w} * x_pitch;
      for (int j = 0; j < out_w; ++j) {
        const int left = j * p.stride_w - p.pad_left;
        const int x = first_inside(left, p.dilation_w);
        const int x_end = end_inside(left, p.s, p.dilation_w, p.w);
        window.columns = x_end > x ? (x_end - x + p.dilation_w - 1) / p.dilation_w : 0;
        window.corner = image + (std::int64_t{y} * p.w + x) * x_pitch;
        body(window, output + (index * out_w + j) * y_pitch, top, left);
      }
    }
  });
}

}  // namespace

void max_pool2d_nhwc(const float* input, float* output, const MaxPool2dShape& shape, int x_pitch,
                     int y_pitch, int threads) {
  for_windows(input, output, shape, x_pitch, y_pitch, threads,
              [c = shape.c](const Window& window, float* to, int, int) {
                pool_window<Maximum>(window, c, to, [](auto best) { return best; });
              });
}

void average_pool2d_nhwc(const float* input, float* output, const AveragePool2dShape& shape,
                         int x_pitch, int y_pitch, bool count_include_pad, int threads) {
  const AveragePool2dShape p = shape;
  for_windows(input, output, p, x_pitch, y_pitch, threads,
              [&](const Window& window, float* to, int top, int left) {
                const float divisor = p.divisor(top, left, count_include_pad);
                pool_window<Total>(window, p.c, to, [=](auto sum) { return sum / divisor; });
              });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
