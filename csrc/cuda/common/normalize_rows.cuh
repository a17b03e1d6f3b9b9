// normalize_rows of rows that the lanes of a warp hold in registers, in any of types.h's types: a
// row is read once. 2 to 32 lanes have a row, as few as hold it, so that a warp has several.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/channels.cuh"
#include "ops/normalize_rows.h"

namespace cnn_engine::cuda {

constexpr int kHeldRowThreads = 128;

// `Width` neighbouring channels are a run; lane l of a row's 2^log_lanes has runs l, l + lanes,
// ..., `Runs` of them at most. Sums are of differences from the row's first element, and squares of
// those from the mean. Few runs have their scale and shift asked for with them.
template <typename In, typename Out, int Width, int Runs>
__global__ void __launch_bounds__(kHeldRowThreads)
    normalize_held_rows_kernel(const In* x, const float* scale, const float* shift, Out* y,
                               const NormalizeRowsShape p, int log_lanes, const Overflow overflow) {
  const int lanes = 1 << log_lanes, lane = threadIdx.x % lanes;
  const int channels = static_cast<int>(p.channels);
  const std::int64_t own = grid_thread() >> log_lanes;
  const std::int64_t row = own < p.rows ? own : p.rows - 1;  // all lanes of a warp add up
  let_successors_start();
  wait_for_inputs();
  float value[Runs][Width];
#pragma unroll
  for (int i = 0; i < Runs; ++i) {
    const int c = (i * lanes + lane) * Width;
    if (c < channels) {
      load_neighbours(x + row * channels + c, value[i]);
    } else {
#pragma unroll
      for (int v = 0; v < Width; ++v) value[i][v] = 0.0f;
    }
  }
  constexpr bool kPrefetch = Runs <= 6;
  const auto read = [&](const float* from, int i, float other) {
    const int c = (i * lanes + lane) * Width;
    return from != nullptr && c < channels ? Channels<Width>::load(from + c)
                                           : Channels<Width>::all(other);
  };
  Channels<Width> wide[Runs], above[Runs];
#pragma unroll
  for (int i = 0; kPrefetch && i < Runs; ++i) {
    wide[i] = read(scale, i, 1.0f);
    above[i] = read(shift, i, 0.0f);
  }
  const auto add_up = [&](float sum) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, distance);
    }
    return sum / channels;
  };
  const float origin = p.centered ? __shfl_sync(kFullMask, value[0][0], 0, lanes) : 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Runs; ++i) {
    if ((i * lanes + lane) * Width >= channels) break;
#pragma unroll
    for (int v = 0; v < Width; ++v) {
      value[i][v] -= origin;
      sum += value[i][v];
    }
  }
  const float offset = p.centered ? add_up(sum) : 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < Runs; ++i) {
    if ((i * lanes + lane) * Width >= channels) break;
#pragma unroll
    for (int v = 0; v < Width; ++v) {
      value[i][v] -= offset;
      squares = fmaf(value[i][v], value[i][v], squares);
    }
  }
  const float factor = 1.0f / sqrtf(add_up(squares) + p.epsilon);
  if (isinf(factor)) tell(overflow);
  if (own >= p.rows) return;
#pragma unroll
  for (int i = 0; i < Runs; ++i) {
    const int c = (i * lanes + lane) * Width;
    if (c >= channels) break;
    if (!kPrefetch) {
      wide[i] = read(scale, i, 1.0f);
      above[i] = read(shift, i, 0.0f);
    }
#pragma unroll
    for (int v = 0; v < Width; ++v) {
      value[i][v] = fmaf(value[i][v] * factor, wide[i].value[v], above[i].value[v]);
    }
    store_neighbours(y + row * channels + c, value[i], overflow);
  }
}

// Launches it where rows can be held; returns whether they can.
template <typename In, typename Out>
bool normalize_held_rows(const In* x, const float* scale, const float* shift, Out* y,
                         const NormalizeRowsShape& p, const Overflow& overflow, Stream stream) {
  constexpr int kWidth = sizeof(In) + sizeof(Out) == 8 ? 4 : 8;
  constexpr int kMost = 64 / kWidth;  // runs of a lane
  const std::int64_t runs = p.channels / kWidth;
  if (p.groups != 1 || p.span != 1 || p.channels % kWidth != 0 || runs > kMost * kWarpThreads ||
      !is_aligned(x, 16) || !is_aligned(y, 16) || !is_aligned(scale, 16) ||
      !is_aligned(shift, 16)) {
    return false;
  }
  int log_lanes = 1;
  while (log_lanes < 5 && (3 << log_lanes) < runs) ++log_lanes;
  const auto kernel =
      runs <= (3 << log_lanes)
          ? normalize_held_rows_kernel<In, Out, kWidth, 3>
          : (runs <= 6 * kWarpThreads ? normalize_held_rows_kernel<In, Out, kWidth, 6>
                                      : normalize_held_rows_kernel<In, Out, kWidth, kMost>);
  const std::int64_t threads = p.rows << log_lanes;
  launch("launch of normalize_held_rows_kernel", kernel,
         static_cast<unsigned>((threads + kHeldRowThreads - 1) / kHeldRowThreads), kHeldRowThreads,
         0, stream, 1, x, scale, shift, y, p, log_lanes, overflow);
  return true;
}

}  // namespace cnn_engine::cuda
