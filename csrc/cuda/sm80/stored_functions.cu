// Functions of tensors in 16 bits on CUDA. T is that type; each tensor is float32 or T.
#include <cooperative_groups.h>

#include <algorithm>

#include "cuda/common/activation.cuh"
#include "cuda/common/binary.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/normalize_rows.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/channels.cuh"
#include "ops/stored_functions.h"

namespace cnn_engine::cuda {
namespace {

// A tensor of float32, or of T where it is rounded.
template <typename T>
struct Tensor {
  void* at;
  bool rounded;

  Tensor(const void* at, ElementType storage)
      : at(const_cast<void*>(at)), rounded(storage != ElementType::float32) {}

  template <int width>
  __device__ Channels<width> load(std::int64_t offset) const {
    if (rounded) return Channels<width>::load(static_cast<const T*>(at) + offset);
    return Channels<width>::load(static_cast<const float*>(at) + offset);
  }
  template <int width>
  __device__ void store(std::int64_t offset, const Channels<width>& x,
                        const Overflow& overflow) const {
    if (rounded) return x.store(static_cast<T*>(at) + offset, overflow);
    x.store(static_cast<float*>(at) + offset);
  }

  bool in_runs(int width) const { return is_aligned(at, width * (rounded ? sizeof(T) : 4)); }
};

// Calls body(a null pointer to the type of 16 bits that the tensors have).
template <typename Body>
void with_rounded(const Body& body, ElementType a, ElementType b,
                  ElementType c = ElementType::float32) {
  ElementType found = ElementType::float32;
  for (const ElementType storage : {a, b, c}) {
    if (storage == ElementType::float32) continue;
    if (found != ElementType::float32 && found != storage) {
      throw std::invalid_argument(std::string("stored: expected one type beside float32, found ") +
                                  name_of(found) + " and " + name_of(storage));
    }
    found = storage;
  }
  if (found == ElementType::bfloat16) return body(static_cast<__nv_bfloat16*>(nullptr));
  body(static_cast<__half*>(nullptr));
}

// ---- element by element ----

// A result that is no number, or infinite, of numbers that are finite: at a pole that float16 led
// to, such as the reciprocal of what became 0, it stands for none that float32 has.
__device__ inline bool is_born(float result, bool finite) { return finite && !isfinite(result); }

template <typename T, int width>
__global__ void unary_stored_kernel(const Tensor<T> x, const Tensor<T> y, std::int64_t groups,
                                    const Activation function, const Overflow overflow) {
  let_successors_start();
  wait_for_inputs();
  const std::int64_t i = grid_thread();
  if (i >= groups) return;
  Channels<width> run = x.template load<width>(i * width);
  bool born = false;
#pragma unroll
  for (int v = 0; v < width; ++v) {
    const bool finite = isfinite(run.value[v]);
    run.value[v] = apply(function, run.value[v]);
    born |= is_born(run.value[v], finite);
  }
  if (born) tell(overflow);
  y.store(i * width, run, overflow);
}

// One thread makes a group of `width` elements; `walk` is over groups, its strides are of groups'
// first elements. An operand whose last stride is 0 is repeated over them.
template <typename T, int width, typename Index>
__global__ void binary_stored_kernel(const Tensor<T> x, const Tensor<T> y, const Tensor<T> out,
                                     const Walk<3> walk, const BinaryFunction function,
                                     const Overflow overflow) {
  let_successors_start();
  wait_for_inputs();
  const std::int64_t i = grid_thread();
  if (i >= walk.size) return;
  std::int64_t at[3];
  walk.position(static_cast<Index>(i), at);
  const auto load = [&](const Tensor<T>& from, int k) {
    if (width == 1 || walk.strides[k][walk.rank - 1] != 0) return from.template load<width>(at[k]);
    return Channels<width>::all(from.template load<1>(at[k]).value[0]);
  };
  Channels<width> a = load(x, 1);
  const Channels<width> b = load(y, 2);
  bool born = false;
#pragma unroll
  for (int v = 0; v < width; ++v) {
    const bool finite = isfinite(a.value[v]) && isfinite(b.value[v]);
    a.value[v] = binary_of(function, a.value[v], b.value[v]);
    born |= is_born(a.value[v], finite);
  }
  if (born) tell(overflow);
  out.store(at[0], a, overflow);
}

template <typename T, int width>
__global__ void affine_channel_stored_kernel(const Tensor<T> x, const float* center,
                                             const float* scale, const float* shift,
                                             const Tensor<T> y, int channels, std::int64_t groups,
                                             const Overflow overflow) {
  let_successors_start();
  wait_for_inputs();
  const std::int64_t i = grid_thread();
  if (i >= groups) return;
  const int c = static_cast<int>(i * width % channels);
  Channels<width> run = x.template load<width>(i * width);
  const auto middle =
      center != nullptr ? Channels<width>::load(center + c) : Channels<width>::all(0.0f);
  const auto factor = Channels<width>::load(scale + c), above = Channels<width>::load(shift + c);
#pragma unroll
  for (int v = 0; v < width; ++v) {
    run.value[v] = (run.value[v] - middle.value[v]) * factor.value[v] + above.value[v];
  }
  y.store(i * width, run, overflow);
}

// ---- rows ----

constexpr int kRowThreads = 128;

// A warp makes a row that is not in runs, one channel of a lane after another, in three walks.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    normalize_rows_stored_kernel(const Tensor<T> x, const float* scale, const float* shift,
                                 const Tensor<T> y, const NormalizeRowsShape p,
                                 const Overflow overflow) {
  const int lane = threadIdx.x % kWarpThreads, channels = static_cast<int>(p.channels);
  const std::int64_t row = grid_thread() / kWarpThreads, first = row * channels;
  let_successors_start();
  wait_for_inputs();
  if (row >= p.rows) return;
  const auto at = [&](int c) {
    return x.template load<1>(first + c).value[0];
  };
  float sum = 0.0f, squares = 0.0f;
  for (int c = lane; c < channels; c += kWarpThreads) sum += at(c);
  const float mean = p.centered ? warp_sum(sum) / channels : 0.0f;
  for (int c = lane; c < channels; c += kWarpThreads) {
    squares = fmaf(at(c) - mean, at(c) - mean, squares);
  }
  const float factor = rsqrtf(warp_sum(squares) / channels + p.epsilon);
  if (isinf(factor)) tell(overflow);
  for (int c = lane; c < channels; c += kWarpThreads) {
    const float wide = scale != nullptr ? scale[c] : 1.0f;
    const float above = shift != nullptr ? shift[c] : 0.0f;
    y.store(first + c, Channels<1>{{(at(c) - mean) * factor * wide + above}}, overflow);
  }
}

// ---- means of columns ----

constexpr int kMeanThreads = 256;
constexpr int kMeanRuns = 8;  // of a block, side by side, at most
constexpr int kMeanParts = 8;

// The blocks of a cluster share the rows of `runs` runs of `width` columns; so do the threads of a
// block. Sums are added in the order of threads and then of blocks.
template <typename T, int width>
__global__ void __launch_bounds__(kMeanThreads)
    mean_stored_kernel(const Tensor<T> x, const Tensor<T> y, const AxisShape p, int runs_log2,
                       const Overflow overflow) {
  __shared__ float accumulators[kMeanThreads * width];
  let_successors_start();
  wait_for_inputs();
  const int runs = 1 << runs_log2, rows = kMeanThreads >> runs_log2;
  const int run = threadIdx.x & (runs - 1), row = threadIdx.x >> runs_log2;
  const int axis = static_cast<int>(p.axis), parts = gridDim.z;
  const std::int64_t column = (static_cast<std::int64_t>(blockIdx.x) * runs + run) * width;
  const bool some = column < p.inner;
  const std::int64_t first = blockIdx.y * p.axis * p.inner + column;
  auto sum = Channels<width>::all(0.0f);
  if (some) {
#pragma unroll 4
    for (int a = blockIdx.z * rows + row; a < axis; a += rows * parts) {
      const auto found = x.template load<width>(first + a * p.inner);
#pragma unroll
      for (int v = 0; v < width; ++v) sum.value[v] += found.value[v];
    }
  }
  const int columns = runs * width;
#pragma unroll
  for (int v = 0; v < width; ++v) accumulators[row * columns + run * width + v] = sum.value[v];
  __syncthreads();
  float all = 0.0f;
  const int own = threadIdx.x;
  if (own < columns) {
#pragma unroll 8
    for (int r = 0; r < rows; ++r) all += accumulators[r * columns + own];
  }
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (parts > 1) {
    if (own < columns) accumulators[own] = all;
    const auto cluster = cooperative_groups::this_cluster();
    cluster.sync();
    if (blockIdx.z == 0 && own < columns) {
      for (int part = 1; part < parts; ++part)
        all += cluster.map_shared_rank(accumulators, part)[own];
    }
    cluster.sync();  // no block ends before its sums were read
  }
#endif
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * columns + own;
  if (blockIdx.z == 0 && own < columns && c < p.inner) {
    y.store(blockIdx.y * p.inner + c, Channels<1>{{all / axis}}, overflow);
  }
}

}  // namespace

void unary_stored(const ConstValues& input, const Values& output, std::int64_t size,
                  const Activation& activation, const Overflow& overflow, Stream stream) {
  if (size <= 0) return;
  with_rounded(
      [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const Tensor<T> x(input.data, input.storage), y(output.data, output.storage);
        const bool fours = size % 4 == 0 && x.in_runs(4) && y.in_runs(4);
        const std::int64_t groups = fours ? size / 4 : size;
        launch("launch of unary_stored_kernel",
               fours ? unary_stored_kernel<T, 4> : unary_stored_kernel<T, 1>, blocks_for(groups),
               kBlockThreads, 0, stream, 1, x, y, groups, activation, overflow);
      },
      input.storage, output.storage);
}

void binary_stored(const ConstValues& x, const ConstValues& y, const Values& out,
                   const BinaryShape& shape, BinaryFunction function, const Overflow& overflow,
                   Stream stream) {
  Strided<3> walk = walk_of(shape);
  if (walk.size == 0) return;
  with_rounded(
      [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const Tensor<T> result(out.data, out.storage), a(x.data, x.storage), b(y.data, y.storage);
        const bool fours = take_fours(walk, {result.in_runs(4), a.in_runs(4), b.in_runs(4)});
        with_index(walk.size, [&](auto index) {
          using Index = decltype(index);
          launch("launch of binary_stored_kernel",
                 fours ? binary_stored_kernel<T, 4, Index> : binary_stored_kernel<T, 1, Index>,
                 blocks_for(walk.size), kBlockThreads, 0, stream, 1, a, b, result, Walk<3>(walk),
                 function, overflow);
        });
      },
      x.storage, y.storage, out.storage);
}

void affine_channel_stored(const ConstValues& x, const float* center, const float* scale,
                           const float* shift, const Values& y, const ChannelShape& shape,
                           const Overflow& overflow, Stream stream) {
  const std::int64_t size = shape.outer * shape.channels;
  if (size == 0) return;
  with_rounded(
      [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const Tensor<T> from(x.data, x.storage), to(y.data, y.storage);
        const bool fours = shape.channels % 4 == 0 && from.in_runs(4) && to.in_runs(4) &&
                           is_aligned(center, 16) && is_aligned(scale, 16) && is_aligned(shift, 16);
        const std::int64_t groups = fours ? size / 4 : size;
        launch("launch of affine_channel_stored_kernel",
               fours ? affine_channel_stored_kernel<T, 4> : affine_channel_stored_kernel<T, 1>,
               blocks_for(groups), kBlockThreads, 0, stream, 1, from, center, scale, shift, to,
               static_cast<int>(shape.channels), groups, overflow);
      },
      x.storage, y.storage);
}

void normalize_rows_stored(const ConstValues& x, const float* scale, const float* shift,
                           const Values& y, const NormalizeRowsShape& shape,
                           const Overflow& overflow, Stream stream) {
  if (shape.groups != 1 || shape.span != 1 || shape.channels > kMostRowChannels) {
    throw std::invalid_argument("rows: expected one group, a span of 1 and at most " +
                                std::to_string(kMostRowChannels) + " channels");
  }
  if (shape.rows * shape.channels == 0) return;
  with_rounded(
      [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const Tensor<T> from(x.data, x.storage), to(y.data, y.storage);
        const auto held = [&](auto* in, auto* out) {
          return normalize_held_rows(in, scale, shift, out, shape, overflow, stream);
        };
        const auto held_from = [&](auto* in) {
          return to.rounded ? held(in, static_cast<T*>(y.data))
                            : held(in, static_cast<float*>(y.data));
        };
        if (from.rounded ? held_from(static_cast<const T*>(x.data))
                         : held_from(static_cast<const float*>(x.data))) {
          return;
        }
        const std::int64_t threads = shape.rows * kWarpThreads;
        launch("launch of normalize_rows_stored_kernel", normalize_rows_stored_kernel<T>,
               static_cast<unsigned>((threads + kRowThreads - 1) / kRowThreads), kRowThreads, 0,
               stream, 1, from, scale, shift, to, shape, overflow);
      },
      x.storage, y.storage);
}

void mean_stored(const ConstValues& x, const Values& y, const AxisShape& shape,
                 const Overflow& overflow, Stream stream) {
  if (shape.outer * shape.inner == 0) return;
  constexpr std::int64_t kMostImages = 65535;  // of a launch
  if (shape.axis > std::numeric_limits<int>::max() / 2) {
    throw std::invalid_argument("mean: expected means of at most 2^30 numbers");
  }
  with_rounded(
      [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const bool fours = shape.inner % 4 == 0 && Tensor<T>(x.data, x.storage).in_runs(4);
        const int width = fours ? 4 : 1;
        int runs_log2 = 0;
        while ((1 << runs_log2) < 4 * kMeanRuns / width && (width << runs_log2) < shape.inner) {
          ++runs_log2;
        }
        const int rows = kMeanThreads >> runs_log2;
        int parts = 1;
        while (waits_in_kernels() && parts < kMeanParts && shape.axis >= 4 * rows * parts) {
          parts *= 2;
        }
        const std::int64_t columns = width << runs_log2;
        for (std::int64_t first = 0; first < shape.outer; first += kMostImages) {
          const Tensor<T> part(element(x.data, x.storage, first * shape.axis * shape.inner),
                               x.storage),
              means(element(y.data, y.storage, first * shape.inner), y.storage);
          const dim3 grid(static_cast<unsigned>((shape.inner + columns - 1) / columns),
                          static_cast<unsigned>(std::min(kMostImages, shape.outer - first)), parts);
          launch("launch of mean_stored_kernel",
                 fours ? mean_stored_kernel<T, 4> : mean_stored_kernel<T, 1>, grid, kMeanThreads, 0,
                 stream, parts, part, means, shape, runs_log2, overflow);
        }
      },
      x.storage, y.storage);
}

}  // namespace cnn_engine::cuda
