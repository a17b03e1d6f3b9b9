// linear_rows on CUDA: a warp makes an output feature of up to `Rows` rows. Its first weights are
// on their way before it waits for its inputs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/activation.cuh"
#include "cuda/channels.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "ops/linear_rows.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 8;  // loads of weights in flight

// Weights that a thread reads at a time.
template <typename T, int width>
struct Weights;

template <typename T>
struct Weights<T, 1> {
  T value;
  __device__ void load(const T* from) { value = *from; }
  __device__ void unpack(float (&to)[1]) const { to[0] = static_cast<float>(value); }
};

template <>
struct Weights<float, 4> {
  float4 value;
  __device__ void load(const float* from) { value = *reinterpret_cast<const float4*>(from); }
  __device__ void unpack(float (&to)[4]) const {
    to[0] = value.x;
    to[1] = value.y;
    to[2] = value.z;
    to[3] = value.w;
  }
};

template <typename T>
struct Weights<T, 8> {
  uint4 value;
  __device__ void load(const T* from) { value = *reinterpret_cast<const uint4*>(from); }
  __device__ void unpack(float (&to)[8]) const {
    const T* values = reinterpret_cast<const T*>(&value);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(values[i]);
  }
};

// Blocks: of warps, one an output feature; then groups of rows.
template <typename T, int width, int Rows>
__global__ void __launch_bounds__(kThreads)
    linear_rows_kernel(const float* input,              // [N, F]
                       const T* __restrict__ packed,    // [M, F]
                       const float* __restrict__ bias,  // [M] or null
                       float* output,                   // [N, M]
                       const LinearShape p, const Activation activation) {
  constexpr int kStep = kWarpThreads * width;
  const int m = blockIdx.x * (kThreads / kWarpThreads) + threadIdx.x / kWarpThreads;
  if (m >= p.out_features) return wait_for_inputs();
  const int first_row = blockIdx.y * Rows;
  const int first = threadIdx.x % kWarpThreads * width;
  const T* row = packed + static_cast<std::int64_t>(m) * p.in_features;
  const float added = bias != nullptr ? bias[m] : 0.0f;
  Weights<T, width> weights[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    if (first + k * kStep < p.in_features) weights[k].load(row + first + k * kStep);
  }
  wait_for_inputs();
  let_successors_start();

  float sum[Rows] = {};
  for (int begin = first; begin < p.in_features; begin += kAhead * kStep) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int f = begin + k * kStep;
      if (f >= p.in_features) break;
      float w[width];
      weights[k].unpack(w);
      const int next = f + kAhead * kStep;
      if (next < p.in_features) weights[k].load(row + next);
#pragma unroll
      for (int n = 0; n < Rows; ++n) {
        if (first_row + n >= p.n) break;
        const float* x = input + static_cast<std::int64_t>(first_row + n) * p.in_features + f;
        constexpr int kRun = width == 1 ? 1 : 4;
#pragma unroll
        for (int v = 0; v < width; v += kRun) {
          const auto run = Channels<kRun>::load(x + v);
#pragma unroll
          for (int i = 0; i < kRun; ++i) sum[n] = fmaf(run.value[i], w[v + i], sum[n]);
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

// Calls body(a null pointer to the type that weights are kept as).
template <typename Body>
void with_type(Conv2dOperands operands, const Body& body) {
  switch (operands) {
    case Conv2dOperands::float32:
    case Conv2dOperands::tf32:
      return body(static_cast<float*>(nullptr));
    case Conv2dOperands::float16:
      return body(static_cast<__half*>(nullptr));
    case Conv2dOperands::bfloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
  }
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
  launch_rows<T, width, 8>(input, packed, bias, output, p, activation, stream);
}

}  // namespace

std::int64_t linear_rows_packed(const LinearShape& shape, Conv2dOperands operands, int) {
  std::int64_t size = 0;
  with_type(operands, [&](auto* type) { size = shape.weight_size() * sizeof(*type); });
  return size;
}

void linear_rows_pack(const float* weight, void* packed, const LinearShape& shape,
                      Conv2dOperands operands, Stream stream) {
  with_type(operands, [&](auto* type) {
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
  with_type(operands, [&](auto* type) {
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
