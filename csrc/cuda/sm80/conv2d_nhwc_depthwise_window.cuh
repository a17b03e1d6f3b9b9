// Depthwise convolutions of few positions: a thread makes one output of `Width` neighbouring
// channels, and has as many loads as registers allow under way at once, the weights before it waits
// for its inputs, the window before its first product: what takes as long as a small batch is the
// way to the second-level cache and back.
#pragma once

#include "cuda/sm80/conv2d_nhwc_depthwise.cuh"

namespace cnn_engine::cuda {

// Registers that the window of a thread, and its weights, may take.
constexpr int kMostWindow = 100;

// Prefetch: all that does not depend on the image, weights as float32 and addresses, is made before
// the wait, at twice the registers. Side > 0: square kernels without dilation and with equal
// strides of Stride. Side = 0: any kernel, stride and dilation.
template <typename T, int Side, int Stride, int Width, bool Prefetch>
__global__ void __launch_bounds__(kDepthwiseThreads)
    conv2d_nhwc_depthwise_kernel(const __grid_constant__ Depthwise<T> d,
                                 const __grid_constant__ Conv2dShape p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (Prefetch) return;  // there is nothing to wait for: never launched
#endif
  using Raw = Neighbours<T, Width>;
  constexpr int kWords = (Width * static_cast<int>(sizeof(T)) + 3) / 4;  // of a run
  constexpr bool kHoldsWeights = Side > 0 && Side * Side * kWords <= kMostWindow;
  constexpr int kRows = Side * Side * kWords <= kMostWindow ? Side : 1;  // read at once
  let_successors_start();
  const DepthwisePosition position(d, grid_thread());
  if (position.image >= static_cast<unsigned>(p.n)) return wait_for_inputs();
  const int c = position.group * Width;
  const int top = position.row * (Side > 0 ? Stride : p.stride_h) - p.pad_top;
  const int left = position.run * (Side > 0 ? Stride : p.stride_w) - p.pad_left;
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
  const auto bias =
      d.bias != nullptr ? Channels<Width>::load(d.bias + c) : Channels<Width>::all(0.0f);
  [[maybe_unused]] int once = d.once;
#pragma unroll 1
  do {
    wait_for_inputs();

    const T* image =
        d.input + static_cast<std::int64_t>(position.image) * p.h * p.w * d.pitches.x + c;
    float sum[Width] = {};
    if constexpr (Side > 0) {
      // Positions outside are read at the image's edge, and then taken as 0: a load that may be
      // left out would wait for its own turn.
      int columns[Side];
#pragma unroll
      for (int s = 0; s < Side; ++s) columns[s] = min(max(left + s, 0), p.w - 1) * d.pitches.x;
#pragma unroll
      for (int begin = 0; begin < Side; begin += kRows) {
        Raw x[kRows][Side];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int y = min(max(top + begin + r, 0), p.h - 1);
          const T* line = image + static_cast<std::int64_t>(y) * p.w * d.pitches.x;
#pragma unroll
          for (int s = 0; s < Side; ++s) x[r][s] = *reinterpret_cast<const Raw*>(line + columns[s]);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int y = top + begin + r;
          const bool row_inside = y >= 0 && y < p.h;
#pragma unroll
          for (int s = 0; s < Side; ++s) {
            const bool inside = row_inside && left + s >= 0 && left + s < p.w;
            const Raw some = kept_if(inside, x[r][s]);
            const int kernel_offset = (begin + r) * Side + s;
            float w[Width];
            if constexpr (kHoldsWeights) {
#pragma unroll
              for (int v = 0; v < Width; ++v) w[v] = widened(held[kernel_offset].value[v]);
            } else {
              load_neighbours(weight + kernel_offset * p.c, w);
            }
#pragma unroll
            for (int v = 0; v < Width; ++v) sum[v] = fmaf(widened(some.value[v]), w[v], sum[v]);
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
          float run[Width], w[Width];
          load_neighbours(image + (static_cast<std::int64_t>(y) * p.w + x) * d.pitches.x, run);
          load_neighbours(weight + (static_cast<std::int64_t>(r) * p.s + s) * p.c, w);
#pragma unroll
          for (int v = 0; v < Width; ++v) sum[v] = fmaf(run[v], w[v], sum[v]);
        }
      }
    }

    const std::int64_t line = static_cast<std::int64_t>(position.image) * d.out_h + position.row;
    const std::int64_t at = line * d.out_w + position.run;
#pragma unroll
    for (int v = 0; v < Width; ++v) sum[v] += bias.value[v];
    if (d.residual != nullptr) {
      const auto added = Channels<Width>::load(d.residual + at * d.pitches.residual + c);
#pragma unroll
      for (int v = 0; v < Width; ++v) sum[v] += added.value[v];
    }
    apply<T>(d.activation, sum);
    store_rounded(d.output + at * d.pitches.y + c, sum, largest(sum), d.overflow);
    // Gone through once, but what is computed before a loop stays before the wait.
  } while (Prefetch && --once > 0);
}

}  // namespace cnn_engine::cuda
