// Arithmetic of tensors of 8-bit integers on CUDA: a thread makes four neighbouring numbers where
// all tensors have them at multiples of four, maxima sixteen, else one.
#include "cuda/common/binary.cuh"
#include "cuda/common/elements.cuh"
#include "cuda/common/requantize.cuh"
#include "cuda/common/strided.cuh"
#include "ops/quantized_pointwise.h"
#include "ops/window.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

using Byte = std::uint8_t;

__device__ inline Byte rounded(float v, const Steps& y) {
  return static_cast<Byte>(to_integer(v, y.zero, y.low, y.high));
}
__device__ inline int steps_of(Byte q, const Steps& of) { return integer_of(q, of.type) - of.zero; }

// ---- functions of one number ----

struct Quantize {
  Steps steps;
  __device__ Byte operator()(float x) const { return rounded(__fdiv_rn(x, steps.scale), steps); }
};
struct Dequantize {
  Steps steps;
  __device__ float operator()(Byte q) const { return scaled(steps_of(q, steps), steps.scale); }
};
template <typename Entry>
struct Lookup {
  const Entry* table;
  __device__ Entry operator()(Byte q) const { return table[q]; }
};

template <int Width, typename X, typename Y, typename Function>
__global__ void quantized_unary_kernel(const X* x, Y* y, std::int64_t size,
                                       const Function function) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = grid_thread(); i < size; i += threads) {
    const auto given = reinterpret_cast<const Neighbours<X, Width>*>(x)[i];
    Neighbours<Y, Width> made;
#pragma unroll
    for (int e = 0; e < Width; ++e) made.value[e] = function(given.value[e]);
    reinterpret_cast<Neighbours<Y, Width>*>(y)[i] = made;
  }
}

template <typename X, typename Y, typename Function>
void launch_unary(const X* x, Y* y, std::int64_t size, const Function& function, Stream stream) {
  if (size == 0) return;
  const bool fours = size % 4 == 0 && is_aligned(x, 4 * sizeof(X)) && is_aligned(y, 4 * sizeof(Y));
  const std::int64_t groups = fours ? size / 4 : size;
  launch(
      "quantized_unary_kernel",
      fours ? quantized_unary_kernel<4, X, Y, Function> : quantized_unary_kernel<1, X, Y, Function>,
      blocks_for(groups), kBlockThreads, 0, stream, 1, x, y, groups, function);
}

// ---- functions of two numbers, broadcast ----

struct Sum {
  Steps a, b;
  __device__ float operator()(Byte x, Byte y) const {
    return __fadd_rn(scaled(steps_of(x, a), a.scale), scaled(steps_of(y, b), b.scale));
  }
};
struct Product {
  Steps a, b;
  float scale;
  __device__ float operator()(Byte x, Byte y) const {
    return scaled(steps_of(x, a) * steps_of(y, b), scale);
  }
};

// `walk` is over groups of Width; its strides are of groups' first numbers.
template <int Width, typename Index, typename Function>
__global__ void quantized_binary_kernel(const Byte* a, const Byte* b, Byte* y, const Walk<3> walk,
                                        const Function function, const Steps steps) {
  wait_for_inputs();
  let_successors_start();
  using Run = Neighbours<Byte, Width>;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const auto load = [&](const Byte* from, [[maybe_unused]] int operand) {
    if constexpr (Width > 1) {
      if (walk.strides[operand][walk.rank - 1] == 0) {
        Run run;
#pragma unroll
        for (int e = 0; e < Width; ++e) run.value[e] = *from;
        return run;
      }
    }
    return *reinterpret_cast<const Run*>(from);
  };
  for (std::int64_t i = grid_thread(); i < walk.size; i += threads) {
    std::int64_t at[3];
    walk.position(static_cast<Index>(i), at);
    const Run x = load(a + at[1], 1), other = load(b + at[2], 2);
    Run made;
#pragma unroll
    for (int e = 0; e < Width; ++e) {
      made.value[e] = rounded(function(x.value[e], other.value[e]), steps);
    }
    *reinterpret_cast<Run*>(y + at[0]) = made;
  }
}

template <typename Function>
void launch_binary(const void* a, const void* b, void* y, const BinaryShape& shape,
                   const Function& function, const Steps& steps, Stream stream) {
  Strided<3> walk = walk_of(shape);
  if (walk.size == 0) return;
  const bool fours = take_fours(walk, {is_aligned(y, 4), is_aligned(a, 4), is_aligned(b, 4)});
  with_index(walk.size, [&](auto index) {
    using Index = decltype(index);
    launch("quantized_binary_kernel",
           fours ? quantized_binary_kernel<4, Index, Function>
                 : quantized_binary_kernel<1, Index, Function>,
           blocks_for(walk.size), kBlockThreads, 0, stream, 1, static_cast<const Byte*>(a),
           static_cast<const Byte*>(b), static_cast<Byte*>(y), Walk<3>(walk), function, steps);
  });
}

// ---- means and maxima ----

constexpr int kMeanThreads = 512;

// A block sums `columns` (a power of two) neighbouring numbers; the threads of one share the count.
__global__ __launch_bounds__(kMeanThreads) void quantized_mean_kernel(
    const Byte* x, Byte* y, const MeanShape p, const Steps x_steps, const Steps y_steps,
    const int columns, const std::int64_t blocks_an_outer) {
  __shared__ int sums[kMeanThreads];
  wait_for_inputs();
  let_successors_start();
  const int thread = static_cast<int>(threadIdx.x), row = thread / columns;
  const std::int64_t outer = blockIdx.x / blocks_an_outer;
  const std::int64_t inner =
      (blockIdx.x - outer * blocks_an_outer) * columns + (thread - row * columns);
  const int rows = kMeanThreads / columns;
  int total = 0;
  if (inner < p.inner) {
    const Byte* const from = x + outer * p.count * p.inner + inner;
#pragma unroll 8
    for (std::int64_t i = row; i < p.count; i += rows) {
      total += steps_of(from[i * p.inner], x_steps);
    }
  }
  sums[thread] = total;
  for (int half = rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) sums[thread] += sums[thread + half * columns];
  }
  if (row == 0 && inner < p.inner) {
    y[outer * p.inner + inner] = rounded(scaled(sums[thread], x_steps.scale), y_steps);
  }
}

template <int Width>
__global__ void quantized_max_pool2d_kernel(const Byte* x,  // [N, H, W, C]
                                            Byte* y,        // [N, OH, OW, C]
                                            const MaxPool2dShape p, const ElementType type,
                                            const std::int64_t size, const int groups) {
  wait_for_inputs();
  let_successors_start();
  using Run = Neighbours<Byte, Width>;
  const std::int64_t index = grid_thread();
  if (index >= size) return;
  std::int64_t position = index / groups;
  const int channel = static_cast<int>(index - position * groups) * Width;
  const int out_h = p.out_h(), out_w = p.out_w();
  const int left = static_cast<int>(position % out_w) * p.stride_w - p.pad_left;
  position /= out_w;
  const int top = static_cast<int>(position % out_h) * p.stride_h - p.pad_top;
  const Byte* const image = x + position / out_h * p.h * p.w * p.c + channel;
  int best[Width];
#pragma unroll
  for (int e = 0; e < Width; ++e) best[e] = -128;
  const int y_end = end_inside(top, p.r, p.dilation_h, p.h);
  const int x_end = end_inside(left, p.s, p.dilation_w, p.w);
  for (int i = first_inside(top, p.dilation_h); i < y_end; i += p.dilation_h) {
    for (int j = first_inside(left, p.dilation_w); j < x_end; j += p.dilation_w) {
      const auto run = *reinterpret_cast<const Run*>(image + (std::int64_t{i} * p.w + j) * p.c);
#pragma unroll
      for (int e = 0; e < Width; ++e) best[e] = max(best[e], integer_of(run.value[e], type));
    }
  }
  Run made;
#pragma unroll
  for (int e = 0; e < Width; ++e) made.value[e] = static_cast<Byte>(best[e]);
  reinterpret_cast<Run*>(y)[index] = made;
}

}  // namespace

void quantize_linear(const float* x, void* y, std::int64_t size, const Steps& steps,
                     Stream stream) {
  launch_unary(x, static_cast<Byte*>(y), size, Quantize{steps}, stream);
}

void dequantize_linear(const void* q, float* y, std::int64_t size, const Steps& steps,
                       Stream stream) {
  launch_unary(static_cast<const Byte*>(q), y, size, Dequantize{steps}, stream);
}

void lookup(const void* q, const void* table, void* y, std::int64_t size, int entry_bytes,
            Stream stream) {
  const auto each = [&](auto* entries) {
    using Entry = std::remove_pointer_t<decltype(entries)>;
    const Lookup<Entry> function{static_cast<const Entry*>(table)};
    launch_unary(static_cast<const Byte*>(q), static_cast<Entry*>(y), size, function, stream);
  };
  if (entry_bytes == 1) return each(static_cast<Byte*>(nullptr));
  each(static_cast<std::uint32_t*>(nullptr));
}

void quantized_add(const void* a, const void* b, void* y, const BinaryShape& shape,
                   const Steps& a_steps, const Steps& b_steps, const Steps& y_steps,
                   Stream stream) {
  launch_binary(a, b, y, shape, Sum{a_steps, b_steps}, y_steps, stream);
}

void quantized_mul(const void* a, const void* b, void* y, const BinaryShape& shape,
                   const Steps& a_steps, const Steps& b_steps, const Steps& y_steps,
                   Stream stream) {
  launch_binary(a, b, y, shape, Product{a_steps, b_steps, y_steps.scale}, y_steps, stream);
}

void quantized_mean(const void* x, void* y, const MeanShape& shape, const Steps& x_steps,
                    const Steps& y_steps, Stream stream) {
  if (shape.outer * shape.inner == 0) return;
  int columns = 1;
  while (columns < 32 && columns < shape.inner) columns *= 2;
  const std::int64_t blocks_an_outer = (shape.inner + columns - 1) / columns;
  launch("quantized_mean_kernel", quantized_mean_kernel,
         static_cast<unsigned>(shape.outer * blocks_an_outer), kMeanThreads, 0, stream, 1,
         static_cast<const Byte*>(x), static_cast<Byte*>(y), shape, x_steps, y_steps, columns,
         blocks_an_outer);
}

void quantized_max_pool2d(const void* x, void* y, const MaxPool2dShape& shape, ElementType type,
                          Stream stream) {
  const auto in_runs = [&](int run) {
    return shape.c % run == 0 && is_aligned(x, run) && is_aligned(y, run);
  };
  const int width = in_runs(16) ? 16 : in_runs(4) ? 4 : 1, groups = shape.c / width;
  const std::int64_t size = std::int64_t{shape.n} * shape.out_h() * shape.out_w() * groups;
  if (size == 0) return;
  launch("quantized_max_pool2d_kernel",
         width == 16  ? quantized_max_pool2d_kernel<16>
         : width == 4 ? quantized_max_pool2d_kernel<4>
                      : quantized_max_pool2d_kernel<1>,
         blocks_for(size), kBlockThreads, 0, stream, 1, static_cast<const Byte*>(x),
         static_cast<Byte*>(y), shape, type, size, groups);
}

}  // namespace cnn_engine::cuda
