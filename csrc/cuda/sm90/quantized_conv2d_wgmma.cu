// quantized_conv2d_wgmma: what it takes, packed weights, the choice of a tile, and launches.
#include <cuda.h>

#include <cmath>
#include <string>
#include <vector>

#include "cuda/common/strided.cuh"
#include "cuda/sm80/rated.h"
#include "cuda/sm90/quantized_conv2d_wgmma.cuh"
#include "runtime/check.h"
#include "runtime/device.h"

namespace cnn_engine::cuda {
namespace quantized_wgmma {
namespace {

// Why the kernel cannot run a shape, or null.
const char* why_not(const Conv2dShape& p, int largest) {
  const int down = (p.r - 1) * p.dilation_h, right = (p.s - 1) * p.dilation_w;
  const auto is_corner = [](int offset) {
    return offset >= -128 && offset <= 127;
  };
  if (p.groups != 1) return "one group";
  if (p.c % 16 != 0) return "channels in sixteens";
  if (largest > 127) return "weights of 8 bits";
  if (p.stride_h > 8 || p.stride_w > 8) return "strides up to 8";
  if (!is_corner(-p.pad_top) || !is_corner(-p.pad_left) || !is_corner(p.pad_bottom - down) ||
      !is_corner(p.pad_right - right) || down > 255 || right > 255) {
    return "windows that reach up to 128 places beyond the image";
  }
  return nullptr;
}

void check_shape(const Conv2dShape& shape, int largest) {
  if (const char* expected = why_not(shape, largest)) {
    throw std::invalid_argument(std::string("quantized_conv2d_wgmma: expected ") + expected);
  }
}

void check_map(CUresult result, const char* name) {
  if (result != CUDA_SUCCESS) {
    throw cuda::Error(std::string(name) + ": CUDA error " + std::to_string(result));
  }
}

bool is_tiled(const Conv2dShape& p) {
  return p.r * p.s == 1 && p.stride_h * p.stride_w == 1 &&
         p.pad_top + p.pad_left + p.pad_bottom + p.pad_right == 0;
}

// Images of which a copy has `positions`, so many bytes of channels each.
CUtensorMap map_of_images(const void* x, const Conv2dShape& p, int pitch, int positions,
                          int row_bytes) {
  const auto type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto swizzle = row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const auto none = CU_TENSOR_MAP_INTERLEAVE_NONE;
  const auto promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const auto fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;  // zeros
  const cuuint64_t row = pitch;
  CUtensorMap map;
  if (is_tiled(p)) {
    static const auto encode =
        driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
    const cuuint64_t dims[] = {cuuint64_t(p.c), cuuint64_t(p.n) * p.h * p.w}, strides[] = {row};
    const cuuint32_t box[] = {cuuint32_t(row_bytes), cuuint32_t(positions)}, steps[] = {1, 1};
    check_map(encode(&map, type, 2, const_cast<void*>(x), dims, strides, box, steps, none, swizzle,
                     promotion, fill),
              "cuTensorMapEncodeTiled");
    return map;
  }
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col", 12000);
  const cuuint64_t dims[] = {cuuint64_t(p.c), cuuint64_t(p.w), cuuint64_t(p.h), cuuint64_t(p.n)};
  const cuuint64_t strides[] = {row, row * p.w, row * p.w * p.h};
  const int lower[] = {-p.pad_left, -p.pad_top};
  const int upper[] = {p.pad_right - (p.s - 1) * p.dilation_w,
                       p.pad_bottom - (p.r - 1) * p.dilation_h};
  const cuuint32_t steps[] = {1, cuuint32_t(p.stride_w), cuuint32_t(p.stride_h), 1};
  check_map(encode(&map, type, 4, const_cast<void*>(x), dims, strides, lower, upper, row_bytes,
                   positions, steps, none, swizzle, promotion, fill),
            "cuTensorMapEncodeIm2col");
  return map;
}

// What a launch takes, in microseconds: `step` of a block by itself, `share` of each that a
// multiprocessor has, of 128 bytes; `end` and `end_share` what follows a tile's sums, likewise.
// Fitted to 416 launches of 26 convolutions, of batches of 1, 8, 20 and 256, on an H200: the
// geometric mean of the times of what is chosen is 1.003 times that of the fastest.
struct TileCost {
  double step, share, end, end_share;
};
constexpr TileCost kCosts[] = {{0.140, 0.119, 1.039, 0.586},
                               {0.109, 0.255, 2.337, 0.862},
                               {0.157, 0.396, 6.998, 1.575},
                               {0.471, 0.253, 6.778, 1.194}};
static_assert(sizeof(kCosts) / sizeof(kCosts[0]) == kTileCount);
constexpr double kLaunch = 1.742, kHalfStep = 0.467;  // the latter of a step of 64 bytes

using Rating = Rated<int, kTileCount>;

int choose(const Gemm& p, int row_bytes, int multiprocessors, int rank) {
  Rating found;
  const double steps = p.steps * (row_bytes == 64 ? kHalfStep : 1.0);
  for (int tile = 0; tile < kTileCount; ++tile) {
    const TileShape& shape = kTiles[tile];
    const TileCost& cost = kCosts[tile];
    const double tiles =
        double{1} * divided(p.rows, 64 * shape.groups) * divided(p.shape.k, shape.columns);
    const double each = std::ceil(tiles / multiprocessors), rounds = std::ceil(each / shape.blocks);
    found.add(kLaunch + std::fmax(rounds * (steps * cost.step + cost.end),
                                  each * (steps * cost.share + cost.end_share)),
              tile);
  }
  return found.at(rank);
}

template <bool Signed, int Tile, int RowBytes>
void launch_tile(const void* x, int pitch, Gemm p, Stream stream) {
  constexpr TileShape kShape = kTiles[Tile];
  constexpr int kStageBytes = stage_bytes(kShape, RowBytes) + 16;  // and its barriers
  constexpr int kBeside = bytes_beside(kShape), kMostStages = 12;
  p.filter_tiles = divided(p.shape.k, kShape.columns);
  p.tiles = divided(p.rows, 64 * kShape.groups) * p.filter_tiles;
  // Two blocks of a multiprocessor, of this launch or of the next, have half of its memory.
  constexpr int kAll = 220 * 1024;
  const int multiprocessors = target_here().multiprocessors;
  const int together = std::min(divided(p.tiles, multiprocessors), kShape.blocks);
  const int most = kShape.blocks == 1 ? kAll : kAll / std::max(together, 2);
  p.stages = std::min((most - kBeside) / kStageBytes, kMostStages);
  const int bytes = p.stages * kStageBytes + kBeside;
  const auto kernel = quantized_conv2d_wgmma_kernel<Signed, Tile, RowBytes>;
  make_ready(kernel, bytes);
  const int blocks = std::min(kShape.blocks * multiprocessors, p.tiles);
  launch("quantized_conv2d_wgmma_kernel", kernel, dim3(blocks), dim3(threads_of(kShape)), bytes,
         stream, 1, map_of_images(x, p.shape, pitch, 64 * kShape.groups, RowBytes), p);
}

template <bool Signed, int RowBytes, int Tile = 0>
void launch_tiles(const void* x, int pitch, const Gemm& p, int tile, Stream stream) {
  if constexpr (Tile < kTileCount) {
    if (tile == Tile) return launch_tile<Signed, Tile, RowBytes>(x, pitch, p, stream);
    launch_tiles<Signed, RowBytes, Tile + 1>(x, pitch, p, tile, stream);
  }
}

}  // namespace
}  // namespace quantized_wgmma

using namespace quantized_wgmma;

std::int64_t quantized_conv2d_wgmma_takes(const Conv2dShape& shape, int largest, const Target&) {
  return why_not(shape, largest) == nullptr;
}

std::int64_t quantized_conv2d_wgmma_packed(const Conv2dShape& shape, int largest) {
  check_shape(shape, largest);
  return Packed<char>(nullptr, shape).bytes();
}

void quantized_conv2d_wgmma_pack(const std::int16_t* weight, const std::int32_t* bias,
                                 const float* scale, void* packed, const Conv2dShape& shape,
                                 const QuantizedTypes& types, int largest, Stream stream) {
  check_shape(shape, largest);
  const Conv2dShape& p = shape;
  std::vector<char> memory(Packed<char>(nullptr, p).bytes());
  const Packed<char> to(memory.data(), p);
  const int area = p.r * p.s, row_bytes = to.row_bytes(), chunks = to.chunks(), all = to.filters();
  const auto zero = static_cast<std::uint32_t>(types.x_zero);
  auto* const biases = to.template at<std::uint32_t>(0);
  auto* const border = to.template at<std::uint32_t>(to.border());
  if (scale) std::copy(scale, scale + p.k, to.template at<float>(to.scale()));
  std::vector<std::uint32_t> sums(area);  // of a kernel offset's weights
  for (int k = 0; k < p.k; ++k) {
    const std::int16_t* const own = weight + std::int64_t{k} * p.c * area;
    std::uint32_t sum = 0;  // modulo 2^32
    for (int offset = 0; offset < area; ++offset) {
      sums[offset] = 0;
      for (int c = 0; c < p.c; ++c) sums[offset] += own[c * area + offset];
      sum += sums[offset];
    }
    biases[k] = (bias ? bias[k] : 0u) - sum * zero;
    for (int r = 1; r <= p.r && to.is_padded(); ++r) {
      std::uint32_t row = 0;
      for (int s = 1; s <= p.s; ++s) {
        row += sums[(r - 1) * p.s + s - 1] * zero;
        const auto at = [&](int r) -> std::uint32_t& {
          return border[(std::int64_t{r} * (p.s + 1) + s) * all + k];
        };
        at(r) = at(r - 1) + row;
      }
    }
  }
  for (int row = 0; row < all; ++row) {
    const int unit = row / kUnitFilters, n = row % kUnitFilters;
    const int k = unit * kUnitFilters + filter_of(n);
    if (k >= p.k) continue;
    for (int offset = 0; offset < area; ++offset) {
      for (int c = 0; c < p.c; ++c) {
        const int step = offset * chunks + c / row_bytes, piece = c % row_bytes / 16;
        const int at = row_bytes == 128 ? piece ^ n % 8 : piece ^ n / 2 % 4;
        const std::int64_t before = (std::int64_t{unit} * to.steps() + step) * kUnitFilters + n;
        memory[to.weights() + before * row_bytes + at * 16 + c % 16] =
            static_cast<char>(weight[(std::int64_t{k} * p.c + c) * area + offset]);
      }
    }
  }
  CUDA_CHECK(cudaMemcpyAsync(packed, memory.data(), memory.size(), cudaMemcpyHostToDevice, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void quantized_conv2d_wgmma(const QuantizedOperands& operands, const Conv2dShape& shape,
                            const Conv2dPitches& pitches, const QuantizedTypes& types, int rank,
                            Stream stream) {
  const void *const input = operands.input, *const packed = operands.packed;
  const auto* const residual = static_cast<const std::uint8_t*>(operands.residual);
  void* const output = operands.output;
  check_shape(shape, 0);
  if (!is_aligned(packed, 16) || !is_aligned(input, 16) || pitches.x % 16 != 0) {
    throw std::invalid_argument(
        "quantized_conv2d_wgmma: expected x's pitch and all addresses in multiples of 16 bytes, "
        "found a pitch of " +
        std::to_string(pitches.x));
  }
  const Packed<const char> at(static_cast<const char*>(packed), shape);
  const std::int64_t positions_in = std::int64_t{shape.h} * shape.w;
  const std::int64_t positions = std::int64_t{shape.out_h()} * shape.out_w();
  const int bytes = bytes_of(types.y);
  const auto in_sixteens = [](const void* address, int pitch) {
    return is_aligned(address, 16) && pitch % 16 == 0;
  };
  Gemm p = {};
  p.weights = at.template at<const char>(at.weights());
  p.bias = at.template at<const std::int32_t>(0);
  p.scale = at.template at<const float>(at.scale());
  if (at.is_padded() && types.x_zero != 0) {
    p.border = at.template at<const std::int32_t>(at.border());
  }
  p.table = static_cast<const std::uint8_t*>(operands.table);
  p.shape = shape;
  p.types = types;
  p.y_pitch = pitches.y;
  p.residual_pitch = pitches.residual;
  p.out_h = shape.out_h();
  p.out_w = shape.out_w();
  p.padded_filters = at.filters();
  p.tiled = is_tiled(shape);
  p.sixteens = bytes == 1 && types.inner_scale == 0 && in_sixteens(output, pitches.y) &&
               (!residual || in_sixteens(residual, pitches.residual));
  p.chunks = at.chunks();
  p.steps = at.steps();
  for_each_part_of_batch(
      shape.n, std::max(positions_in, positions), [&](std::int64_t first, int images) {
        const auto* const x =
            static_cast<const std::uint8_t*>(input) + first * positions_in * pitches.x;
        p.y = static_cast<char*>(output) + first * positions * pitches.y * bytes;
        p.residual = residual ? residual + first * positions * pitches.residual : nullptr;
        p.shape.n = images;
        p.rows = static_cast<int>(images * positions);
        if (p.rows == 0) return;
        const int tile = choose(p, at.row_bytes(), target_here().multiprocessors, rank);
        const auto launch = [&](auto is_signed) {
          if (at.row_bytes() == 64) {
            launch_tiles<decltype(is_signed)::value, 64>(x, pitches.x, p, tile, stream);
          } else {
            launch_tiles<decltype(is_signed)::value, 128>(x, pitches.x, p, tile, stream);
          }
        };
        if (types.x == ElementType::int8) return launch(std::true_type());
        launch(std::false_type());
      });
}

}  // namespace cnn_engine::cuda
