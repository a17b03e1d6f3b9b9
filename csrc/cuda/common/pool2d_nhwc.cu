// max_pool2d_nhwc and average_pool2d_nhwc on CUDA: a thread makes one output of four neighbouring
// channels where all lie at 16 bytes, else of one; neighbouring threads make neighbouring channels.
#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/channels.cuh"
#include "ops/pool2d_nhwc.h"
#include "ops/window.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 128;

struct Maximum {
  static constexpr float kStart = -INFINITY;
  // A NaN wins and, as best, stays.
  __device__ static float take(float best, float x) { return x > best || x != x ? x : best; }
  __device__ float finish(float best, const MaxPool2dShape&, int, int) const { return best; }
};

struct Average {
  bool count_include_pad;
  static constexpr float kStart = 0.0f;
  __device__ static float take(float sum, float x) { return sum + x; }
  __device__ float finish(float sum, const AveragePool2dShape& p, int top, int left) const {
    return sum / p.divisor(top, left, count_include_pad);
  }
};

struct Positions {
  int x_pitch, y_pitch;
  Divisor by_groups, by_columns, by_rows;  // groups of channels; columns and rows of outputs
};

// Side > 0: square windows without dilation, whose positions are all read before any is taken;
// those outside the image at its edge.
template <typename T, int Side, int Width, typename Kind, typename Shape>
__global__ void __launch_bounds__(kThreads)
    pool2d_nhwc_kernel(const T* input,  // [N, H, W, x_pitch]
                       T* output,       // [N, OH, OW, y_pitch]
                       const __grid_constant__ Shape p, const __grid_constant__ Positions positions,
                       const Kind kind) {
  let_successors_start();
  wait_for_inputs();
  const std::int64_t thread = grid_thread();
  const unsigned groups = positions.by_groups.value;
  if (thread >= static_cast<std::int64_t>(p.n) * p.out_h() * p.out_w() * groups) return;
  const unsigned index = static_cast<unsigned>(thread);
  const unsigned position = positions.by_groups.quotient(index);
  const int c = static_cast<int>(index - position * groups) * Width;
  const unsigned row = positions.by_columns.quotient(position);
  const unsigned n = positions.by_rows.quotient(row);
  const int top = static_cast<int>(row - n * p.out_h()) * p.stride_h - p.pad_top;
  const int left = static_cast<int>(position - row * p.out_w()) * p.stride_w - p.pad_left;
  const T* image = input + static_cast<std::int64_t>(n) * p.h * p.w * positions.x_pitch + c;
  auto value = Channels<Width>::all(Kind::kStart);
  const auto take = [&](const Channels<Width>& x) {
#pragma unroll
    for (int v = 0; v < Width; ++v) value.value[v] = Kind::take(value.value[v], x.value[v]);
  };
  if constexpr (Side > 0) {
    Channels<Width> x[Side][Side];
#pragma unroll
    for (int i = 0; i < Side * Side; ++i) {
      const int y = min(max(top + i / Side, 0), p.h - 1);
      const int column = min(max(left + i % Side, 0), p.w - 1);
      const std::int64_t at = static_cast<std::int64_t>(y) * p.w + column;
      x[i / Side][i % Side] = Channels<Width>::load(image + at * positions.x_pitch);
    }
#pragma unroll
    for (int i = 0; i < Side * Side; ++i) {
      const int y = top + i / Side, column = left + i % Side;
      if (y >= 0 && y < p.h && column >= 0 && column < p.w) take(x[i / Side][i % Side]);
    }
  } else {
    const int y_end = end_inside(top, p.r, p.dilation_h, p.h);
    const int x_first = first_inside(left, p.dilation_w);
    const int x_end = end_inside(left, p.s, p.dilation_w, p.w);
    for (int y = first_inside(top, p.dilation_h); y < y_end; y += p.dilation_h) {
      const T* line = image + static_cast<std::int64_t>(y) * p.w * positions.x_pitch;
#pragma unroll 4
      for (int x = x_first; x < x_end; x += p.dilation_w) {
        take(Channels<Width>::load(line + static_cast<std::int64_t>(x) * positions.x_pitch));
      }
    }
  }
#pragma unroll
  for (int v = 0; v < Width; ++v) value.value[v] = kind.finish(value.value[v], p, top, left);
  value.store(output + static_cast<std::int64_t>(position) * positions.y_pitch + c);
}

template <typename Shape, typename Kind>
void launch_pool(const void* input, void* output, const Shape& shape, int x_pitch, int y_pitch,
                 const Kind& kind, ElementType storage, Stream stream) {
  const std::int64_t image_in = std::int64_t{shape.h} * shape.w * x_pitch;
  const std::int64_t image_out = std::int64_t{shape.out_h()} * shape.out_w();
  const bool fours =
      in_fours(input, shape.c, x_pitch, storage) && in_fours(output, shape.c, y_pitch, storage);
  with_element_type(storage, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_each_part_of_batch(shape.n, image_out * shape.c, [&](std::int64_t first, int images) {
      Shape p = shape;
      p.n = images;
      const int groups = fours ? p.c / 4 : p.c;
      const Positions positions{x_pitch, y_pitch, Divisor(groups), Divisor(p.out_w()),
                                Divisor(p.out_h())};
      const std::int64_t threads = images * image_out * groups;
      const bool square = p.r == p.s && p.dilation_h == 1 && p.dilation_w == 1;
      const int side = fours && square && (p.r == 2 || p.r == 3) ? p.r : 0;
      launch("launch of pool2d_nhwc_kernel",
             side == 3   ? pool2d_nhwc_kernel<T, 3, 4, Kind, Shape>
             : side == 2 ? pool2d_nhwc_kernel<T, 2, 4, Kind, Shape>
             : fours     ? pool2d_nhwc_kernel<T, 0, 4, Kind, Shape>
                         : pool2d_nhwc_kernel<T, 0, 1, Kind, Shape>,
             static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream, 1,
             static_cast<const T*>(input) + first * image_in,
             static_cast<T*>(output) + first * image_out * y_pitch, p, positions, kind);
    });
  });
}

}  // namespace

void max_pool2d_nhwc(const void* input, void* output, const MaxPool2dShape& shape, int x_pitch,
                     int y_pitch, ElementType storage, Stream stream) {
  launch_pool(input, output, shape, x_pitch, y_pitch, Maximum{}, storage, stream);
}

void average_pool2d_nhwc(const void* input, void* output, const AveragePool2dShape& shape,
                         int x_pitch, int y_pitch, bool count_include_pad, ElementType storage,
                         Stream stream) {
  launch_pool(input, output, shape, x_pitch, y_pitch, Average{count_include_pad}, storage, stream);
}

}  // namespace cnn_engine::cuda
