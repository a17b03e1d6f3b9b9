// conv2d_blocked where each group has one channel: outputs on SIMD lanes, and no matrix.
//
// A band of a channel's rows is copied with its border of zeros, its columns dealt out by their
// position modulo the stride, so that neighbouring outputs read neighbours and no bounds are
// tested. Included only by files that are compiled once for each instruction set.
#pragma once

#include "cpu/blocked.h"
#include "ops/conv2d.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr int kDepthwiseVectors = 4;  // of a row, at once

struct Band {
  int outputs;  // rows of outputs
  int rows;     // of the input, that they read
  int pitch;    // of one phase of a row

  CNN_ENGINE_INLINE explicit Band(const Conv2dShape& p) {
    const int last = (p.s - 1) * p.dilation_w / p.stride_w;
    const int lanes = p.out_w() <= kNarrow ? kNarrow : kWide;
    pitch = (p.out_w() + lanes - 1) / lanes * lanes + last + 1;
    const int window = (p.r - 1) * p.dilation_h + 1;
    // About a second-level cache's part, and at least the border's worth of rows.
    const std::int64_t row = std::int64_t{p.stride_w} * pitch;
    std::int64_t most = (32768 / row - window) / p.stride_h + 1;
    if (most < 8) most = 8;
    outputs = p.out_h() < most ? p.out_h() : static_cast<int>(most);
    rows = (outputs - 1) * p.stride_h + window;
  }
  CNN_ENGINE_INLINE std::int64_t size(const Conv2dShape& p) const {
    return std::int64_t{rows} * p.stride_w * pitch;
  }
};

std::int64_t depthwise_scratch(const Conv2dShape& p) {
  return Band(p).size(p) + kWide + p.r * p.s;  // the band, and where in it each kernel offset is
}

// V vectors of outputs, `step` apart in the band and `to_step` apart in y; of vector v, count - v *
// fewer exist.
template <int W, int V>
CNN_ENGINE_INLINE void depthwise_vectors(const float* band, std::int64_t step,
                                         const int* kernel_offsets, const float* filter, int area,
                                         float bias, const float* residual,
                                         const Epilogue& epilogue, float* to, int to_step,
                                         int count, int fewer) {
  Vec<W> sum[V] = {};
  for (int t = 0; t < area; ++t) {
    const float* from = band + kernel_offsets[t];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[v] += load<W>(from + v * step) * filter[t];
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    Vec<W> value = sum[v] + bias;
    const int here = count - v * fewer;
    const float* other = residual ? residual + v * to_step : nullptr;
    float* y = to + v * to_step;
    if (here >= W) {
      if (other) value += load<W>(other);
      store<W>(y, clamp(value, epilogue.lowest, epilogue.highest));
    } else {
      for (int i = 0; i < here; ++i) {
        y[i] = clamp_one(other ? value[i] + other[i] : value[i], epilogue.lowest, epilogue.highest);
      }
    }
  }
}

// `rows` of outputs, whose first kernel offsets are `step` apart in the band: several vectors of
// one row, or one of several rows.
template <int W>
void depthwise_rows(const float* band, std::int64_t step, const int* kernel_offsets,
                    const float* filter, int area, float bias, const float* residual,
                    const Epilogue& epilogue, float* to, int rows, int out_w) {
  constexpr int V = kDepthwiseVectors;
  int x = 0;
  for (; out_w - x > (V - 1) * W; x += V * W) {
    for (int i = 0; i < rows; ++i) {
      const std::int64_t at = std::int64_t{i} * out_w + x;
      depthwise_vectors<W, V>(band + i * step + x, W, kernel_offsets, filter, area, bias,
                              residual ? residual + at : nullptr, epilogue, to + at, W, out_w - x,
                              W);
    }
  }
  for (; x < out_w; x += W) {
    int i = 0;
    for (; i + V <= rows; i += V) {
      const std::int64_t at = std::int64_t{i} * out_w + x;
      depthwise_vectors<W, V>(band + i * step + x, step, kernel_offsets, filter, area, bias,
                              residual ? residual + at : nullptr, epilogue, to + at, out_w,
                              out_w - x, 0);
    }
    for (; i < rows; ++i) {
      const std::int64_t at = std::int64_t{i} * out_w + x;
      depthwise_vectors<W, 1>(band + i * step + x, step, kernel_offsets, filter, area, bias,
                              residual ? residual + at : nullptr, epilogue, to + at, out_w,
                              out_w - x, 0);
    }
  }
}

void depthwise(const float* input, const float* weight, const Epilogue& epilogue, float* output,
               const Scratch& scratch, const Conv2dShape& p, int threads) {
  const int out_h = p.out_h(), out_w = p.out_w(), area = p.r * p.s;
  const int multiplier = p.group_filters();
  const Band shape(p);
  const int bands = (out_h + shape.outputs - 1) / shape.outputs;
  const float* input_end = input + p.input_size();
  const std::int64_t cost = std::int64_t{shape.outputs} * out_w * area * multiplier;
  parallel_for(
      std::int64_t{p.n} * p.c * bands, cost, threads, [&](std::int64_t begin, std::int64_t end) {
        const Scratch::Part part(scratch);
        float* band = part.data();
        int* kernel_offsets = reinterpret_cast<int*>(band + shape.size(p) + kWide);
        for (int r = 0, t = 0; r < p.r; ++r) {
          for (int s = 0; s < p.s; ++s, ++t) {
            const int column = s * p.dilation_w;
            kernel_offsets[t] =
                (r * p.dilation_h * p.stride_w + column % p.stride_w) * shape.pitch +
                column / p.stride_w;
          }
        }
        for (std::int64_t index = begin; index < end; ++index) {
          const std::int64_t channel = index / bands;  // of all images
          const int first = static_cast<int>(index % bands) * shape.outputs;
          const int count = out_h - first < shape.outputs ? out_h - first : shape.outputs;
          const float* from = input + channel * p.h * p.w;
          const int top = first * p.stride_h - p.pad_top;
          const int rows = (count - 1) * p.stride_h + (p.r - 1) * p.dilation_h + 1;
          for (int row = 0; row < rows; ++row) {
            const int y = top + row;
            for (int phase = 0; phase < p.stride_w; ++phase) {
              float* to = band + (std::int64_t{row} * p.stride_w + phase) * shape.pitch;
              const int x = phase - p.pad_left;  // of the first position
              int before = x >= 0 ? 0 : (-x + p.stride_w - 1) / p.stride_w;
              int after =
                  x >= p.w || y < 0 || y >= p.h ? 0 : (p.w - x + p.stride_w - 1) / p.stride_w;
              before = before < shape.pitch ? before : shape.pitch;
              after = after < shape.pitch ? after : shape.pitch;
              if (after < before) after = before;
              fill_zero(to, before);
              // What it writes past the row is zeros, or the next phase or row, that are written
              // later.
              copy_run(to + before, from + std::int64_t{y} * p.w + x + before * p.stride_w,
                       after - before, p.stride_w, input_end);
              fill_zero(to + after, shape.pitch - after);
            }
          }
          const std::int64_t c = channel % p.c;
          for (int m = 0; m < multiplier; ++m) {
            const std::int64_t k = c * multiplier + m;
            const float* filter = weight + k * area;
            const float bias = epilogue.bias ? epilogue.bias[k] : 0.0f;
            const std::int64_t at = ((channel / p.c * p.k + k) * out_h + first) * out_w;
            const std::int64_t step = std::int64_t{p.stride_h} * p.stride_w * shape.pitch;
            const float* residual = epilogue.residual ? epilogue.residual + at : nullptr;
            const auto rows_of = out_w <= kNarrow ? depthwise_rows<kNarrow> : depthwise_rows<kWide>;
            rows_of(band, step, kernel_offsets, filter, area, bias, residual, epilogue, output + at,
                    count, out_w);
          }
        }
      });
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
