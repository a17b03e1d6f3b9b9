// linear_rows on CUDA: a warp makes an output feature of up to `Rows` rows. Its first weights are
// on their way before it waits for its inputs. One row of many weights: linear_rows_stream.cuh.
#include "cuda/common/activation.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/channels.cuh"
#include "cuda/sm80/linear_rows_stream.cuh"
#include "cuda/sm80/row_weights.cuh"
#include "ops/linear_rows.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 128;

// Loads of weights in flight: as many as registers beside the rows' sums allow.
template <int Rows>
constexpr int kPrefetch = Rows > 4 ? 4 : 8;

// Blocks: of warps, one per output feature; then groups of rows.
template <typename T, typename X, int width, int Rows>
__global__ void __launch_bounds__(kThreads)
    linear_rows_kernel(const X* input,                  // [N, F]
                       const T* __restrict__ packed,    // [M, F]
                       const float* __restrict__ bias,  // [M] or null
                       void* output,                    // [N, M], as float32 or as T
                       const bool rounds, const Overflow overflow, const LinearShape p,
                       const Activation activation) {
  constexpr int kStep = kWarpThreads * width, kLoads = kPrefetch<Rows>;
  let_successors_start();
  const int m = blockIdx.x * (kThreads / kWarpThreads) + threadIdx.x / kWarpThreads;
  if (m >= p.out_features) return wait_for_inputs();
  const int first_row = blockIdx.y * Rows;
  const int first = threadIdx.x % kWarpThreads * width;
  const T* row = packed + static_cast<std::int64_t>(m) * p.in_features;
  const float added = bias != nullptr ? bias[m] : 0.0f;
  // What lies past the end is read at the last place, and not taken: a load that may be left out
  // would wait for its own turn.
  const int last = p.in_features - width;
  Weights<T, width> weights[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) weights[k].load(row + min(first + k * kStep, last));
  wait_for_inputs();

  const X* x[Rows];
#pragma unroll
  for (int n = 0; n < Rows; ++n) {
    x[n] = input + static_cast<std::int64_t>(min(first_row + n, p.n - 1)) * p.in_features;
  }
  float sum[Rows] = {};
  for (int begin = first; begin - first < p.in_features; begin += kLoads * kStep) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int f = begin + k * kStep, at = min(f, last);
      Channels<width> run[Rows];
#pragma unroll
      for (int n = 0; n < Rows; ++n) run[n] = Channels<width>::load(x[n] + at);
      float w[width];
      weights[k].unpack(w);
      weights[k].load(row + min(f + kLoads * kStep, last));
      if (f <= last) {
#pragma unroll
        for (int n = 0; n < Rows; ++n) {
#pragma unroll
          for (int i = 0; i < width; ++i) {
            sum[n] = fmaf(run[n].value[i], w[i], sum[n]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < Rows; ++n) {
    if (first_row + n >= p.n) break;
    const float total = warp_sum(sum[n]);
    if (threadIdx.x % kWarpThreads == 0) {
      const std::int64_t at = static_cast<std::int64_t>(first_row + n) * p.out_features + m;
      const Channels<1> y{{apply(activation, total + added)}};
      if (rounds) {
        y.store(static_cast<T*>(output) + at, overflow);
      } else {
        y.store(static_cast<float*>(output) + at);
      }
    }
  }
}

template <typename T>
__global__ void linear_rows_pack_kernel(const float* __restrict__ weight, T* __restrict__ packed,
                                        std::int64_t size) {
  const std::int64_t index = grid_thread();
  if (index < size) packed[index] = static_cast<T>(weight[index]);
}

struct Call {
  const void* input;
  const void* packed;
  const float* bias;
  void* output;
  bool rounds;
  Overflow overflow;
  LinearShape shape;
  Activation activation;
};

template <typename T, typename X, int width, int Rows>
void launch_rows(const Call& c, Stream stream) {
  constexpr int kWarps = kThreads / kWarpThreads;
  const LinearShape& p = c.shape;
  const dim3 grid((p.out_features + kWarps - 1) / kWarps, (p.n + Rows - 1) / Rows);
  launch("launch of linear_rows_kernel", linear_rows_kernel<T, X, width, Rows>, grid, kThreads, 0,
         stream, 1, static_cast<const X*>(c.input), static_cast<const T*>(c.packed), c.bias,
         c.output, c.rounds, c.overflow, p, c.activation);
}

template <typename T, typename X, KnownActivation kKnown, typename Way = Usual>
void launch_stream(const Call& c, Stream stream) {
  const int multiprocessors = target_here().multiprocessors;
  const auto kernel = linear_rows_stream_kernel<T, X, kKnown, Way>;
  const int bytes = streamed_bytes<T, X, Way>(c.shape);
  make_ready(kernel, std::min(kRings<Way> + kMostOfRow, target_here().shared_per_block));
  launch("launch of linear_rows_stream_kernel", kernel, multiprocessors,
         kStreamWarps * kWarpThreads, bytes, stream, 1, static_cast<const X*>(c.input),
         static_cast<const T*>(c.packed), c.bias, c.output, c.rounds, c.overflow, c.shape,
         clamps_of(c.activation));
}

template <typename T, typename X, int width>
void launch_width(const Call& c, Stream stream) {
  if (c.shape.n == 1) return launch_rows<T, X, width, 1>(c, stream);
  if (c.shape.n == 2) return launch_rows<T, X, width, 2>(c, stream);
  if (c.shape.n <= 5) return launch_rows<T, X, width, 5>(c, stream);
  launch_rows<T, X, width, 8>(c, stream);
}

}  // namespace

std::int64_t linear_rows_packed(const LinearShape& shape, ElementType compute_type, int) {
  std::int64_t size = 0;
  with_row_type(compute_type, [&](auto* type) { size = shape.weight_size() * sizeof(*type); });
  return size;
}

void linear_rows_pack(const float* weight, void* packed, const LinearShape& shape,
                      ElementType compute_type, Stream stream) {
  with_row_type(compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    linear_rows_pack_kernel<T><<<blocks_for(shape.weight_size()), kBlockThreads, 0, stream>>>(
        weight, static_cast<T*>(packed), shape.weight_size());
    CUDA_CHECK_LAUNCH("linear_rows_pack_kernel");
  });
}

void linear_rows(const ConstValues& input, const void* packed, const Values& output,
                 const LinearShape& shape, ElementType compute_type, const Epilogue& epilogue,
                 Stream stream) {
  if (shape.n == 0) return;
  check_storage("x", input.storage, compute_type);
  check_storage("y", output.storage, compute_type);
  if (epilogue.residual.data) throw std::invalid_argument("linear_rows: expected no residual");
  const Call call{input.data,
                  packed,
                  epilogue.bias,
                  output.data,
                  output.storage != ElementType::float32,
                  epilogue.overflow,
                  shape,
                  epilogue.activation};
  with_row_type(compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const bool wide =
        shape.in_features % kWidth == 0 && is_aligned(packed, 16) && is_aligned(input.data, 16);
    const auto launch_x = [&](auto* x) {
      using X = std::remove_pointer_t<decltype(x)>;
      if (wide && streams<T, X>(shape)) {
        const bool clamps =
            known_activation_of(clamps_of(call.activation)) == KnownActivation::clamps;
        if constexpr (sizeof(T) == 2 && std::is_same_v<X, T>) {
          if (clamps && are_read_once<T>(shape) && streams<T, X, Prefetch>(shape)) {
            return launch_stream<T, X, KnownActivation::clamps, Prefetch>(call, stream);
          }
        }
        if (clamps) {
          return launch_stream<T, X, KnownActivation::clamps>(call, stream);
        }
        return launch_stream<T, X, KnownActivation::any>(call, stream);
      }
      if (wide) return launch_width<T, X, kWidth>(call, stream);
      launch_width<T, X, 1>(call, stream);
    };
    if (input.storage == ElementType::float32) return launch_x(static_cast<float*>(nullptr));
    launch_x(type);
  });
}

}  // namespace cnn_engine::cuda
