// Depthwise convolutions of many positions: a thread makes `Rows` rows of `Columns` columns, of
// `Width` neighbouring channels; neighbouring threads make neighbouring channels.
//
// A row of the image is read once and adds to all outputs whose windows it is in, of which
// registers hold the sums: windows by themselves would read and widen each number Side times Side
// times.
#pragma once

#include "cuda/sm80/conv2d_nhwc_depthwise.cuh"

namespace cnn_engine::cuda {

constexpr int kPrefetchRows = 2;

template <typename T, int Side, int Stride, int Columns, int Rows, int Width>
__global__ void __launch_bounds__(kDepthwiseThreads)
    conv2d_nhwc_depthwise_strip_kernel(const __grid_constant__ Depthwise<T> d,
                                       const __grid_constant__ Conv2dShape p) {
  using Raw = Neighbours<T, Width>;
  constexpr int kRead = (Columns - 1) * Stride + Side, kReadRows = (Rows - 1) * Stride + Side;
  let_successors_start();
  const DepthwisePosition position(d, grid_thread());
  if (position.image >= static_cast<unsigned>(p.n)) return wait_for_inputs();
  const int c = position.group * Width, first = position.run * Columns,
            first_row = position.row * Rows;
  const int top = first_row * Stride - p.pad_top, left = first * Stride - p.pad_left;

  float weight[Side * Side][Width];
#pragma unroll
  for (int t = 0; t < Side * Side; ++t) load_neighbours(d.packed + c + t * p.c, weight[t]);
  const auto bias =
      d.bias != nullptr ? Channels<Width>::load(d.bias + c) : Channels<Width>::all(0.0f);
  wait_for_inputs();

  const T* image =
      d.input + static_cast<std::int64_t>(position.image) * p.h * p.w * d.pitches.x + c;
  const std::int64_t line = static_cast<std::int64_t>(p.w) * d.pitches.x;
  const int columns_out = d.out_w - first, rows_out = d.out_h - first_row;
  // Positions outside are read at the image's edge, and then taken as 0.
  int columns[kRead];
#pragma unroll
  for (int s = 0; s < kRead; ++s) columns[s] = min(max(left + s, 0), p.w - 1) * d.pitches.x;
  const std::int64_t at =
      (static_cast<std::int64_t>(position.image) * d.out_h + first_row) * d.out_w + first;
  T* output = d.output + at * d.pitches.y + c;

  // A row is on its way while those before it are summed.
  Raw read[kPrefetchRows + 1][kRead];
  const auto ask = [&](int y) {
    const T* const from = image + min(max(top + y, 0), p.h - 1) * line;
#pragma unroll
    for (int s = 0; s < kRead; ++s) {
      read[y % (kPrefetchRows + 1)][s] = *reinterpret_cast<const Raw*>(from + columns[s]);
    }
  };
#pragma unroll
  for (int y = 0; y < kPrefetchRows; ++y) ask(y);

  float sum[Rows][Columns * Width];
#pragma unroll
  for (int y = 0; y < kReadRows; ++y) {
    if (y + kPrefetchRows < kReadRows) ask(y + kPrefetchRows);
    const bool row_inside = top + y >= 0 && top + y < p.h;
    float x[kRead][Width];
#pragma unroll
    for (int s = 0; s < kRead; ++s) {
      const Raw some =
          kept_if(row_inside && left + s >= 0 && left + s < p.w, read[y % (kPrefetchRows + 1)][s]);
#pragma unroll
      for (int v = 0; v < Width; ++v) x[s][v] = widened(some.value[v]);
    }
    // Row y is row r of the windows of the outputs' row (y - r) / Stride.
#pragma unroll
    for (int r = 0; r < Side; ++r) {
      const int row = (y - r) / Stride;
      if (y < r || (y - r) % Stride != 0 || row >= Rows) continue;
#pragma unroll
      for (int j = 0; j < Columns; ++j) {
#pragma unroll
        for (int v = 0; v < Width; ++v) {
          float& one = sum[row][j * Width + v];
          if (r == 0) one = 0.0f;
#pragma unroll
          for (int s = 0; s < Side; ++s) {
            one = fmaf(x[j * Stride + s][v], weight[r * Side + s][v], one);
          }
        }
      }
      if (r < Side - 1 || row >= rows_out) continue;
      float (&made)[Columns * Width] = sum[row];
#pragma unroll
      for (int j = 0; j < Columns; ++j) {
#pragma unroll
        for (int v = 0; v < Width; ++v) made[j * Width + v] += bias.value[v];
        if (d.residual != nullptr && j < columns_out) {
          const auto added =
              Channels<Width>::load(d.residual + (at + row * d.out_w + j) * d.pitches.residual + c);
#pragma unroll
          for (int v = 0; v < Width; ++v) made[j * Width + v] += added.value[v];
        }
      }
      apply<T>(d.activation, made);
      const float most = largest(made);
#pragma unroll
      for (int j = 0; j < Columns; ++j) {
        float one[Width];
#pragma unroll
        for (int v = 0; v < Width; ++v) one[v] = made[j * Width + v];
        T* const to = output + static_cast<std::int64_t>(row * d.out_w + j) * d.pitches.y;
        if (j < columns_out) store_rounded(to, one, most, d.overflow);
      }
    }
  }
}

}  // namespace cnn_engine::cuda
