// linear_rows on CUDA: a warp makes an output feature of up to `Rows` rows. Its first weights are
// on their way before it waits for its inputs.
#include "cuda/activation.cuh"
#include "cuda/channels.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/row_weights.cuh"
#include "ops/linear_rows.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 128;

// Loads of weights in flight: as many as registers beside the rows' sums allow.
template <int Rows>
constexpr int kAhead = Rows > 4 ? 4 : 8;

// Blocks: of warps, one an output feature; then groups of rows.
template <typename T, int width, int Rows>
__global__ void __launch_bounds__(kThreads)
    linear_rows_kernel(const float* input,              // [N, F]
                       const T* __restrict__ packed,    // [M, F]
                       const float* __restrict__ bias,  // [M] or null
                       float* output,                   // [N, M]
                       const LinearShape p, const Activation activation) {
  constexpr int kStep = kWarpThreads * width, kLoads = kAhead<Rows>;
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
  let_successors_start();

  const float* x[Rows];
#pragma unroll
  for (int n = 0; n < Rows; ++n) {
    x[n] = input + static_cast<std::int64_t>(min(first_row + n, p.n - 1)) * p.in_features;
  }
  constexpr int kRun = width == 1 ? 1 : 4;
  float sum[Rows] = {};
  for (int begin = first; begin - first < p.in_features; begin += kLoads * kStep) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int f = begin + k * kStep, at = min(f, last);
      Channels<kRun> run[Rows][width / kRun];
#pragma unroll
      for (int n = 0; n < Rows; ++n) {
#pragma unroll
        for (int v = 0; v < width / kRun; ++v) {
          run[n][v] = Channels<kRun>::load(x[n] + at + v * kRun);
        }
      }
      float w[width];
      weights[k].unpack(w);
      weights[k].load(row + min(f + kLoads * kStep, last));
      if (f <= last) {
#pragma unroll
        for (int n = 0; n < Rows; ++n) {
#pragma unroll
          for (int i = 0; i < width; ++i) {
            sum[n] = fmaf(run[n][i / kRun].value[i % kRun], w[i], sum[n]);
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
      output[static_cast<std::int64_t>(first_row + n) * p.out_features + m] =
          activation(total + added);
    }
  }
}

template <typename T>
__global__ void linear_rows_pack_kernel(const float* __restrict__ weight, T* __restrict__ packed,
                                        std::int64_t size) {
  const std::int64_t index = grid_thread();
  if (index < size) packed[index] = static_cast<T>(weight[index]);
}

template <typename T, int width, int Rows>
void launch_rows(const float* input, const T* packed, const float* bias, float* output,
                 const LinearShape& p, const Activation& activation, Stream stream) {
  constexpr int kWarps = kThreads / kWarpThreads;
  const dim3 grid((p.out_features + kWarps - 1) / kWarps, (p.n + Rows - 1) / Rows);
  launch("launch of linear_rows_kernel", linear_rows_kernel<T, width, Rows>, grid, kThreads, 0,
         stream, 1, input, packed, bias, output, p, activation);
}

template <typename T, int width>
void launch_width(const float* input, const T* packed, const float* bias, float* output,
                  const LinearShape& p, const Activation& activation, Stream stream) {
  if (p.n == 1) return launch_rows<T, width, 1>(input, packed, bias, output, p, activation, stream);
  if (p.n == 2) return launch_rows<T, width, 2>(input, packed, bias, output, p, activation, stream);
  if (p.n <= 5) return launch_rows<T, width, 5>(input, packed, bias, output, p, activation, stream);
  launch_rows<T, width, 8>(input, packed, bias, output, p, activation, stream);
}

}  // namespace

std::int64_t linear_rows_packed(const LinearShape& shape, Conv2dOperands operands, int) {
  std::int64_t size = 0;
  with_row_type(operands, [&](auto* type) { size = shape.weight_size() * sizeof(*type); });
  return size;
}

void linear_rows_pack(const float* weight, void* packed, const LinearShape& shape,
                      Conv2dOperands operands, Stream stream) {
  with_row_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    linear_rows_pack_kernel<T><<<blocks_for(shape.weight_size()), kBlockThreads, 0, stream>>>(
        weight, static_cast<T*>(packed), shape.weight_size());
    CUDA_CHECK_LAUNCH("linear_rows_pack_kernel");
  });
}

void linear_rows(const float* input, const void* packed, const float* bias, float* output,
                 const LinearShape& shape, Conv2dOperands operands, UnaryFunction activation,
                 float alpha, float beta, Stream stream) {
  if (shape.n == 0) return;
  const Activation end{activation, alpha, beta};
  with_row_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kWidth = 16 / sizeof(T);
    const T* weights = static_cast<const T*>(packed);
    const bool wide = shape.in_features % kWidth == 0 && in_fours(input, shape.in_features, 0) &&
                      in_fours(packed, 0, 0);
    if (wide) {
      return launch_width<T, kWidth>(input, weights, bias, output, shape, end, stream);
    }
    launch_width<T, 1>(input, weights, bias, output, shape, end, stream);
  });
}

}  // namespace cnn_engine::cuda
