// conv2d_nhwc_depthwise on CUDA: no product of matrices, but as many bytes as sums.
//
// A thread makes `Columns` outputs beside each other of `Width` neighbouring channels, so that a
// column of the image, once read, serves all of them; neighbouring threads make neighbouring
// channels. With Side > 0: square kernels without dilation and with equal strides of Stride,
// compiled in. As many loads as registers allow are under way at once: the weights before the
// kernel waits for its inputs, the window before its first product; what takes as long as a small
// batch is the way to the second-level cache and back. Side = 0: any kernel, stride and dilation,
// one output a thread.
#include "cuda/activation.cuh"
#include "cuda/channels.cuh"
#include "cuda/launch.cuh"
#include "cuda/strided.cuh"
#include "ops/conv2d_nhwc_depthwise.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 64;
// Threads that keep every multiprocessor of a large GPU busy: with fewer, a thread makes one
// output.
constexpr std::int64_t kManyThreads = 132 * 512;
// Threads of four channels below which a thread makes two.
constexpr std::int64_t kFewThreads = 132 * 256;

template <typename T>
struct Depthwise {
  const T* input;
  const T* packed;
  const float* bias;
  const T* residual;
  T* output;
  Conv2dPitches pitches;
  Overflow overflow;
  Activation activation;
  unsigned runs;                        // of columns in a row of outputs
  Divisor by_groups, by_runs, by_rows;  // groups of channels, runs, rows of outputs
};

// Registers that the window of a thread, and its weights beside those of several outputs, may take.
constexpr int kMostWindow = 100, kMostWeights = 60;

template <typename T, int Side, int Stride, int Columns, int Width>
__global__ void __launch_bounds__(kThreads)
    conv2d_nhwc_depthwise_kernel(const __grid_constant__ Depthwise<T> d,
                                 const __grid_constant__ Conv2dShape p) {
  using Run = Channels<Width>;
  using Raw = Neighbours<T, Width>;
  constexpr int kRead = Side > 0 ? (Columns - 1) * Stride + Side : 1;
  constexpr int kWords = (Width * static_cast<int>(sizeof(T)) + 3) / 4;  // of a run
  constexpr bool kHoldsWeights =
      Side > 0 && Side * Side * kWords <= (Columns > 1 ? kMostWeights : kMostWindow);
  constexpr int kRows = Side * kRead * kWords <= kMostWindow ? Side : 1;  // read at once
  let_successors_start();
  const std::int64_t thread = grid_thread();
  const unsigned groups = d.by_groups.value;
  if (thread >= static_cast<std::int64_t>(p.n) * p.out_h() * d.runs * groups) {
    return wait_for_inputs();
  }
  const unsigned index = static_cast<unsigned>(thread);
  const unsigned place = d.by_groups.quotient(index);
  const int c = static_cast<int>(index - place * groups) * Width;
  const unsigned row = d.by_runs.quotient(place);
  const int first = static_cast<int>(place - row * d.runs) * Columns;
  const unsigned n = d.by_rows.quotient(row);
  const int i = static_cast<int>(row - n * p.out_h());
  const int top = i * (Side > 0 ? Stride : p.stride_h) - p.pad_top;
  const int left = first * (Side > 0 ? Stride : p.stride_w) - p.pad_left;
  const T* weight = d.packed + c;
  Raw held[kHoldsWeights ? Side * Side : 1];
  if constexpr (kHoldsWeights) {
#pragma unroll
    for (int t = 0; t < Side * Side; ++t) {
      held[t] = *reinterpret_cast<const Raw*>(weight + t * p.c);
    }
  } else {
    for (int t = 0; t < p.r * p.s; ++t) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + static_cast<std::int64_t>(t) * p.c));
    }
  }
  const Run bias = d.bias != nullptr ? Run::load(d.bias + c) : Run::all(0.0f);
  wait_for_inputs();

  const T* image = d.input + static_cast<std::int64_t>(n) * p.h * p.w * d.pitches.x + c;
  Run sum[Columns];
#pragma unroll
  for (int j = 0; j < Columns; ++j) sum[j] = Run::all(0.0f);
  const auto take = [](Run& sum, const Run& x, const Run& w) {
#pragma unroll
    for (int v = 0; v < Width; ++v) sum.value[v] = fmaf(x.value[v], w.value[v], sum.value[v]);
  };
  const auto widen = [](const Raw& raw) {
    Run run;
#pragma unroll
    for (int v = 0; v < Width; ++v) run.value[v] = widened(raw.value[v]);
    return run;
  };
  if constexpr (Side > 0) {
    // Places outside are read at the image's edge, and then taken as 0: a load that may be left out
    // would wait for its own turn.
    int columns[kRead];
#pragma unroll
    for (int s = 0; s < kRead; ++s) columns[s] = min(max(left + s, 0), p.w - 1) * d.pitches.x;
#pragma unroll
    for (int begin = 0; begin < Side; begin += kRows) {
      Raw x[kRows][kRead];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int y = min(max(top + begin + r, 0), p.h - 1);
        const T* line = image + static_cast<std::int64_t>(y) * p.w * d.pitches.x;
#pragma unroll
        for (int s = 0; s < kRead; ++s) x[r][s] = *reinterpret_cast<const Raw*>(line + columns[s]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int y = top + begin + r;
        const bool row_inside = y >= 0 && y < p.h;
        Run run[kRead];
#pragma unroll
        for (int s = 0; s < kRead; ++s) {
          const bool inside = row_inside && left + s >= 0 && left + s < p.w;
          run[s] = inside ? widen(x[r][s]) : Run::all(0.0f);
        }
#pragma unroll
        for (int s = 0; s < Side; ++s) {
          const int tap = (begin + r) * Side + s;
          const Run w = kHoldsWeights ? widen(held[tap]) : Run::load(weight + tap * p.c);
#pragma unroll
          for (int j = 0; j < Columns; ++j) take(sum[j], run[j * Stride + s], w);
        }
      }
    }
  } else {
    for (int r = 0; r < p.r; ++r) {
      const int y = top + r * p.dilation_h;
      if (y < 0 || y >= p.h) continue;
      for (int s = 0; s < p.s; ++s) {
        const int x = left + s * p.dilation_w;
        if (x < 0 || x >= p.w) continue;
        take(sum[0], Run::load(image + (static_cast<std::int64_t>(y) * p.w + x) * d.pitches.x),
             Run::load(weight + (static_cast<std::int64_t>(r) * p.s + s) * p.c));
      }
    }
  }

  const std::int64_t at = static_cast<std::int64_t>(row) * p.out_w() + first;
#pragma unroll
  for (int j = 0; j < Columns; ++j) {
    if (first + j >= p.out_w()) break;
    Run y = sum[j];
#pragma unroll
    for (int v = 0; v < Width; ++v) y.value[v] += bias.value[v];
    if (d.residual != nullptr) {
      const Run added = Run::load(d.residual + (at + j) * d.pitches.residual + c);
#pragma unroll
      for (int v = 0; v < Width; ++v) y.value[v] += added.value[v];
    }
#pragma unroll
    for (int v = 0; v < Width; ++v) y.value[v] = d.activation(y.value[v]);
    y.store(d.output + (at + j) * d.pitches.y + c, d.overflow);
  }
}

template <typename T>
__global__ void conv2d_nhwc_depthwise_pack_kernel(const float* __restrict__ weight,  // [C, R, S]
                                                  T* __restrict__ packed,            // [R, S, C]
                                                  int channels, int taps) {
  const std::int64_t index = grid_thread();
  if (index >= static_cast<std::int64_t>(channels) * taps) return;
  const std::int64_t tap = index / channels;
  packed[index] = narrowed<T>(weight[(index - tap * channels) * taps + tap]);
}

template <int Side, int Stride, int Columns, int Width, typename T>
void launch_depthwise(Depthwise<T> d, const Conv2dShape& p, Stream stream) {
  d.runs = (p.out_w() + Columns - 1) / Columns;
  d.by_groups = Divisor(p.c / Width);
  d.by_runs = Divisor(d.runs);
  d.by_rows = Divisor(p.out_h());
  const std::int64_t threads = std::int64_t{p.n} * p.out_h() * d.runs * (p.c / Width);
  launch("launch of conv2d_nhwc_depthwise_kernel",
         conv2d_nhwc_depthwise_kernel<T, Side, Stride, Columns, Width>,
         static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream, 1, d, p);
}

template <int Side, int Stride, typename T>
void launch_square(const Depthwise<T>& d, const Conv2dShape& p, Stream stream) {
  // Two channels a thread leave more registers to a window of 7x7, and have twice the threads.
  constexpr int kColumns = 4, kNarrow = sizeof(T) == 4 ? 4 : 2, kWide = Side == 7 ? kNarrow : 4;
  const std::int64_t lines = std::int64_t{p.n} * p.out_h();
  const std::int64_t runs = (p.out_w() + kColumns - 1) / kColumns;
  if (lines * runs * (p.c / kWide) >= kManyThreads) {
    return launch_depthwise<Side, Stride, kColumns, kWide>(d, p, stream);
  }
  if (lines * p.out_w() * (p.c / 4) >= kFewThreads) {
    return launch_depthwise<Side, Stride, 1, kWide>(d, p, stream);
  }
  launch_depthwise<Side, Stride, 1, kNarrow>(d, p, stream);
}

}  // namespace

void conv2d_nhwc_depthwise_pack(const float* weight, void* packed, const Conv2dShape& shape,
                                Stored stored, Stream stream) {
  with_stored(stored, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    conv2d_nhwc_depthwise_pack_kernel<T>
        <<<blocks_for(shape.weight_size()), kBlockThreads, 0, stream>>>(
            weight, static_cast<T*>(packed), shape.c, shape.r * shape.s);
    CUDA_CHECK_LAUNCH("conv2d_nhwc_depthwise_pack_kernel");
  });
}

void conv2d_nhwc_depthwise(const void* input, const void* packed, const float* bias,
                           const void* residual, void* output, const Conv2dShape& shape,
                           const Conv2dPitches& pitches, Stored stored, const Overflow& overflow,
                           UnaryFunction activation, float alpha, float beta, Stream stream) {
  const std::int64_t image_in = std::int64_t{shape.h} * shape.w;
  const std::int64_t image_out = std::int64_t{shape.out_h()} * shape.out_w();
  const bool fours = in_fours(input, shape.c, pitches.x, stored) &&
                     in_fours(output, shape.c, pitches.y, stored) &&
                     in_fours(residual, shape.c, pitches.residual, stored) &&
                     in_fours(packed, shape.c, 0, stored) && in_fours(bias, shape.c, 0);
  with_stored(stored, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_each_part_of_batch(shape.n, image_out * shape.c, [&](std::int64_t first, int images) {
      Conv2dShape p = shape;
      p.n = images;
      Depthwise<T> d{};
      d.input = static_cast<const T*>(input) + first * image_in * pitches.x;
      d.packed = static_cast<const T*>(packed);
      d.bias = bias;
      if (residual) {
        d.residual = static_cast<const T*>(residual) + first * image_out * pitches.residual;
      }
      d.output = static_cast<T*>(output) + first * image_out * pitches.y;
      d.pitches = pitches;
      d.overflow = overflow;
      d.activation = {activation, alpha, beta};
      if (!fours) return launch_depthwise<0, 1, 1, 1>(d, p, stream);
      const bool square =
          p.r == p.s && p.stride_h == p.stride_w && p.dilation_h == 1 && p.dilation_w == 1;
      const int side = square ? p.s : 0, stride = p.stride_h;
      if (side == 3 && stride == 1) return launch_square<3, 1>(d, p, stream);
      if (side == 3 && stride == 2) return launch_square<3, 2>(d, p, stream);
      if (side == 5 && stride == 1) return launch_square<5, 1>(d, p, stream);
      if (side == 5 && stride == 2) return launch_square<5, 2>(d, p, stream);
      if (side == 7 && stride == 1) return launch_square<7, 1>(d, p, stream);
      launch_depthwise<0, 1, 1, 4>(d, p, stream);
    });
  });
}

}  // namespace cnn_engine::cuda
