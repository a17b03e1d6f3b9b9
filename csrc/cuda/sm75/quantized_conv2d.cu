// quantized_conv2d on CUDA: packed weights, and the launch of a kernel for every shape.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/common/strided.cuh"
#include "cuda/sm75/quantized_conv2d.cuh"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

// A thread makes Width neighbouring channels of one position.
template <int Width>
__global__ void quantized_depthwise_kernel(const QuantizedGemm p, const Divisor by_groups,
                                           const Divisor by_columns, const Divisor by_rows) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t thread = grid_thread();
  if (thread >= std::int64_t{p.rows} * by_groups.value) return;
  using Run = Neighbours<std::uint8_t, Width>;
  const QuantizedPacked<const char> packed(p.packed, p.shape);
  const auto position = static_cast<unsigned>(thread / by_groups.value);
  const int channel = static_cast<int>(thread - std::int64_t{position} * by_groups.value) * Width;
  const unsigned row = by_columns.quotient(position), image = by_rows.quotient(row);
  const int top = static_cast<int>(row - image * p.out_h) * p.shape.stride_h - p.shape.pad_top;
  const int left = static_cast<int>(position - row * p.out_w) * p.shape.stride_w - p.shape.pad_left;
  const std::int16_t* weights = packed.depthwise() + channel;
  int sums[4] = {};
  for (int r = 0; r < p.shape.r; ++r) {
    const int y = top + r * p.shape.dilation_h;
    for (int s = 0; s < p.shape.s; ++s, weights += p.shape.c) {
      const int x = left + s * p.shape.dilation_w;
      const bool inside = static_cast<unsigned>(y) < static_cast<unsigned>(p.shape.h) &&
                          static_cast<unsigned>(x) < static_cast<unsigned>(p.shape.w);
      const std::int64_t at = (std::int64_t{image} * p.shape.h + y) * p.shape.w + x;
      const std::uint8_t* const from =
          inside ? p.x + at * p.position_step + image * p.more_an_image + channel * p.channel_step
                 : packed.header().zeros;
      const Run taps = *reinterpret_cast<const Run*>(from);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        sums[i] += integer_of(taps.value[i], p.types.x) * weights[i];
      }
    }
  }
  finish(p, FilterNumbers(packed, channel, Width), position, channel, Width, sums);
}

// A thread makes four neighbouring channels of kColumns neighbouring positions of a row, by a
// square kernel without dilation: what it reads serves several of them.
constexpr int kColumns = 4;

template <int Size, int Stride>
__global__ void quantized_depthwise_row_kernel(const QuantizedGemm p, const Divisor by_groups,
                                               const Divisor by_columns, const Divisor by_rows) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t thread = grid_thread();
  const auto run = static_cast<unsigned>(thread / by_groups.value);  // of columns
  const unsigned row = by_columns.quotient(run), image = by_rows.quotient(row);
  if (image >= static_cast<unsigned>(p.shape.n)) return;
  using Four = Neighbours<std::uint8_t, 4>;
  using Weights = Neighbours<std::int16_t, 4>;
  const QuantizedPacked<const char> packed(p.packed, p.shape);
  const int channel = static_cast<int>(thread - std::int64_t{run} * by_groups.value) * 4;
  const int first = static_cast<int>(run - row * by_columns.value) * kColumns;
  const int top = static_cast<int>(row - image * p.out_h) * Stride - p.shape.pad_top;
  const int left = first * Stride - p.shape.pad_left;
  int sums[kColumns][4] = {};
#pragma unroll
  for (int r = 0; r < Size; ++r) {
    const int y = top + r;
    const bool in_rows = static_cast<unsigned>(y) < static_cast<unsigned>(p.shape.h);
    Weights weights[Size];
#pragma unroll
    for (int s = 0; s < Size; ++s) {
      const std::int16_t* const from = packed.depthwise() + (r * Size + s) * p.shape.c + channel;
      weights[s] = *reinterpret_cast<const Weights*>(from);
    }
    const std::int64_t line = (std::int64_t{image} * p.shape.h + y) * p.shape.w;
#pragma unroll
    for (int j = 0; j < (kColumns - 1) * Stride + Size; ++j) {
      const int x = left + j;
      const bool inside = in_rows && static_cast<unsigned>(x) < static_cast<unsigned>(p.shape.w);
      const std::uint8_t* const from =
          inside ? p.x + (line + x) * p.position_step + channel : packed.header().zeros;
      const Four taps = *reinterpret_cast<const Four*>(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int one = integer_of(taps.value[i], p.types.x);
#pragma unroll
        for (int o = 0; o < kColumns; ++o) {
          const int s = j - o * Stride;
          if (s >= 0 && s < Size) sums[o][i] += one * weights[s].value[i];
        }
      }
    }
  }
  const FilterNumbers numbers(packed, channel, 4);
#pragma unroll
  for (int o = 0; o < kColumns; ++o) {
    if (first + o >= p.out_w) break;
    finish(p, numbers, std::int64_t{row} * p.out_w + first + o, channel, 4, sums[o]);
  }
}

void launch_depthwise(const QuantizedGemm& p, bool fours, Stream stream) {
  const Conv2dShape& shape = p.shape;
  const int width = fours ? 4 : 1;
  const Divisor by_groups(shape.c / width), by_rows(p.out_h);
  const bool is_square = shape.r == shape.s && shape.stride_h == shape.stride_w &&
                         shape.dilation_h * shape.dilation_w == 1;
  const auto kernel = !fours || !is_square                  ? nullptr
                      : shape.r == 3 && shape.stride_h == 1 ? quantized_depthwise_row_kernel<3, 1>
                      : shape.r == 3 && shape.stride_h == 2 ? quantized_depthwise_row_kernel<3, 2>
                      : shape.r == 5 && shape.stride_h == 1 ? quantized_depthwise_row_kernel<5, 1>
                      : shape.r == 5 && shape.stride_h == 2 ? quantized_depthwise_row_kernel<5, 2>
                                                            : nullptr;
  if (kernel) {
    const Divisor by_columns((p.out_w + kColumns - 1) / kColumns);
    const std::int64_t runs = std::int64_t{shape.n} * p.out_h * by_columns.value;
    launch("quantized_depthwise_row_kernel", kernel, blocks_for(runs * by_groups.value),
           kBlockThreads, 0, stream, 1, p, by_groups, by_columns, by_rows);
    return;
  }
  const Divisor by_columns(p.out_w);
  launch("quantized_depthwise_kernel",
         fours ? quantized_depthwise_kernel<4> : quantized_depthwise_kernel<1>,
         blocks_for(std::int64_t{p.rows} * by_groups.value), kBlockThreads, 0, stream, 1, p,
         by_groups, by_columns, by_rows);
}

template <typename Tile, int Width>
void launch_tile(QuantizedGemm p, Stream stream) {
  const auto kernel = p.types.x == ElementType::int8 ? quantized_conv2d_kernel<Tile, true, Width>
                                                     : quantized_conv2d_kernel<Tile, false, Width>;
  make_ready(kernel, Tile::kBytes);
  constexpr int kMostLayers = 65535;  // of a grid, along z
  for (p.first_group = 0; p.first_group < p.shape.groups; p.first_group += kMostLayers) {
    const dim3 grid((p.rows + Tile::kRows - 1) / Tile::kRows,
                    (p.shape.group_filters() + Tile::kColumns - 1) / Tile::kColumns,
                    std::min(kMostLayers, p.shape.groups - p.first_group));
    launch("quantized_conv2d_kernel", kernel, grid, Tile::kThreads, Tile::kBytes, stream, 1, p);
  }
}

template <typename Tile>
std::int64_t tiles(const QuantizedGemm& p) {
  return (std::int64_t{p.rows} + Tile::kRows - 1) / Tile::kRows * p.shape.groups *
         ((p.shape.group_filters() + Tile::kColumns - 1) / Tile::kColumns);
}

// Large tiles read less; small ones, and several steps at once, fill a GPU sooner.
template <int Width>
void launch_tiles(const QuantizedGemm& p, Stream stream) {
  using Large = ByteTile<4, 2>;
  using Small = ByteTile<2, 2>;
  const int multiprocessors = target_here().multiprocessors;
  if (tiles<Large>(p) >= 2 * multiprocessors) return launch_tile<Large, Width>(p, stream);
  if (tiles<Small>(p) >= multiprocessors) return launch_tile<Small, Width>(p, stream);
  launch_tile<ByteTile<1, 1, 4>, Width>(p, stream);
}

// A shape as kernels read it: of one group, fewer than four channels become four.
Conv2dShape as_read(Conv2dShape shape) {
  if (shape.groups == 1 && shape.c < 4 && !is_depthwise(shape)) shape.c = 4;
  return shape;
}

// Brings the channels of [N, H, W, pitch] or [N, C, H, W] together in fours; weights of those that
// fill up are zeros.
__global__ void four_channels_kernel(const std::uint8_t* x, std::uint8_t* y, int channels,
                                     std::int64_t position_step, std::int64_t channel_step,
                                     std::int64_t more_an_image, const Divisor by_positions,
                                     std::int64_t all) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t index = grid_thread();
  if (index >= all) return;
  const unsigned image = by_positions.quotient(static_cast<unsigned>(index));
  const std::uint8_t* const from = x + index * position_step + image * more_an_image;
  Neighbours<std::uint8_t, 4> four{};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (c < channels) four.value[c] = from[c * channel_step];
  }
  reinterpret_cast<Neighbours<std::uint8_t, 4>*>(y)[index] = four;
}

int passes_of(int largest) { return largest <= 127 ? 1 : (largest + 126) / 127; }

}  // namespace

std::int64_t quantized_conv2d_packed(const Conv2dShape& shape, int largest) {
  const Conv2dShape read = as_read(shape);
  return QuantizedPacked<char>(nullptr, read).bytes(passes_of(largest));
}

std::int64_t quantized_conv2d_workspace(const Conv2dShape& shape) {
  const Conv2dShape read = as_read(shape);
  return read.c > shape.c ? std::int64_t{4} * shape.n * shape.h * shape.w : 0;
}

void quantized_conv2d_pack(const std::int16_t* weight, const std::int32_t* bias, const float* scale,
                           void* packed, const Conv2dShape& shape, const QuantizedTypes& types,
                           int largest, Stream stream) {
  const Conv2dShape p = as_read(shape);
  const int passes = passes_of(largest), channels = p.group_channels(), area = p.r * p.s;
  const int given = shape.group_channels(), filter_size = shape.filter_size();
  std::vector<char> memory(quantized_conv2d_packed(shape, largest));
  const QuantizedPacked<char> to(memory.data(), p);
  to.header().passes = passes;
  std::memset(to.header().zeros, types.x_zero, sizeof(to.header().zeros));
  if (scale) std::memcpy(to.scale(), scale, sizeof(*scale) * p.k);
  for (int k = 0; k < p.k; ++k) {  // modulo 2^32
    std::uint32_t sum = 0;
    for (int t = 0; t < filter_size; ++t) sum += weight[std::int64_t{k} * filter_size + t];
    to.bias()[k] = static_cast<std::int32_t>((bias ? bias[k] : 0u) - sum * types.x_zero);
  }
  const auto at = [&](int k, int term) -> int {
    const int c = term % channels, offset = term / channels;
    return c < given ? weight[std::int64_t{k} * filter_size + c * area + offset] : 0;
  };
  const int steps = steps_of(p, passes), filters = p.group_filters();
  for (int k = 0; k < p.k; ++k) {
    if (is_depthwise(p)) {
      for (int t = 0; t < area; ++t) to.depthwise()[std::int64_t{t} * p.c + k] = at(k, t);
      continue;
    }
    const int own = k % filters;
    char* const block = to.weights(k / filters, own / 8, 0, steps);
    for (int term = 0; term < passes * p.filter_size(); ++term) {
      const int in_unit = term % 32, lane = own % 8 * 4 + in_unit % 16 / 4;
      block[std::int64_t{term / 32} * 256 + lane * 8 + in_unit / 16 * 4 + in_unit % 4] =
          static_cast<char>(
              share_of(at(k, term % p.filter_size()), term / p.filter_size(), passes));
    }
  }
  CUDA_CHECK(cudaMemcpyAsync(packed, memory.data(), memory.size(), cudaMemcpyHostToDevice, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void quantized_conv2d(const void* input, const void* packed, const void* residual,
                      const void* table, void* output, void* workspace, const Conv2dShape& given,
                      const Conv2dPitches& given_pitches, const QuantizedTypes& types, bool planar,
                      Stream stream) {
  if (!is_aligned(packed, 16)) {
    throw std::invalid_argument("packed weights: expected an address that is a multiple of 16");
  }
  const Conv2dShape shape = as_read(given);
  Conv2dPitches pitches = given_pitches;
  const std::int64_t positions_in = std::int64_t{shape.h} * shape.w;
  if (shape.c > given.c) {
    const std::int64_t step = planar ? 1 : pitches.x, channel = planar ? positions_in : 1;
    const std::int64_t more = planar ? positions_in * (given.c - 1) : 0;
    for_each_part_of_batch(shape.n, positions_in, [&](std::int64_t first, int images) {
      const std::int64_t all = images * positions_in, before = first * positions_in;
      launch("four_channels_kernel", four_channels_kernel, blocks_for(all), kBlockThreads, 0,
             stream, 1, static_cast<const std::uint8_t*>(input) + before * step + first * more,
             static_cast<std::uint8_t*>(workspace) + before * 4, given.c, step, channel, more,
             Divisor(static_cast<unsigned>(positions_in)), all);
    });
    input = workspace;
    pitches.x = 4;
    planar = false;
  }
  const std::int64_t positions = std::int64_t{shape.out_h()} * shape.out_w();
  const std::int64_t image_in = positions_in * (planar ? shape.c : pitches.x);
  const auto in_runs = [](int run, const void* address, int pitch) {
    return is_aligned(address, run) && pitch % run == 0;
  };
  const int bytes = bytes_of(types.y);
  const auto* const x = static_cast<const std::uint8_t*>(input);
  const auto* const added = static_cast<const std::uint8_t*>(residual);
  QuantizedGemm p = {};
  p.packed = static_cast<const char*>(packed);
  p.table = static_cast<const std::uint8_t*>(table);
  p.shape = shape;
  p.pitches = pitches;
  p.types = types;
  p.out_h = shape.out_h();
  p.out_w = shape.out_w();
  p.position_step = planar ? 1 : pitches.x;
  p.channel_step = planar ? positions_in : 1;
  p.more_an_image = planar ? positions_in * (shape.c - 1) : 0;
  p.fours = shape.group_filters() % 4 == 0 && in_runs(4, output, pitches.y) &&
            (!residual || in_runs(4, residual, pitches.residual));
  for_each_part_of_batch(
      shape.n, std::max(positions_in, positions), [&](std::int64_t first, int images) {
        p.x = x + first * image_in;
        p.y = static_cast<char*>(output) + first * positions * pitches.y * bytes;
        p.residual = added ? added + first * positions * pitches.residual : nullptr;
        p.shape.n = images;
        p.rows = static_cast<int>(images * positions);
        const auto reads = [&](int run) {
          return !planar && in_runs(run, x, pitches.x) && shape.group_channels() % run == 0;
        };
        if (is_depthwise(shape)) {
          const bool fours = !planar && shape.c % 4 == 0 && in_runs(4, x, pitches.x) &&
                             in_runs(4, output, pitches.y) &&
                             (!residual || in_runs(4, residual, pitches.residual));
          p.fours = fours;
          return launch_depthwise(p, fours, stream);
        }
        if (reads(16)) return launch_tiles<16>(p, stream);
        if (reads(8)) return launch_tiles<8>(p, stream);
        if (reads(4)) return launch_tiles<4>(p, stream);
        launch_tiles<1>(p, stream);
      });
}

}  // namespace cnn_engine::cuda
