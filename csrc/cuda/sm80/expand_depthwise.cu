// expand_depthwise on CUDA: small images in 16 bits, both convolutions on tensor cores.
//
// A block makes some rows of an image for 16 channels. The rows of x that these need are in shared
// memory at once, and so is what the 1x1 convolution makes of them, rounded: each channel by
// itself, columns side by side, with the border above and below. For one channel and one row of its
// kernel the depthwise convolution then is a product: the columns of eight rows by a matrix that
// has the kernel's row along its diagonals. A warp makes a channel, whose matrices are in its
// registers before it waits for the image, as the weights of the 1x1 convolution are in shared
// memory. What is between the convolutions never leaves the block.
#include <algorithm>
#include <string>

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/inverted.cuh"
#include "ops/expand_depthwise.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarpThreads;
constexpr int kChannels = kWarps;       // of a block, which a product has as rows
constexpr int kColumns = 16;            // of a product: of an image's rows
constexpr int kMostRows = 8;            // of a block's results: what a product has as columns
constexpr int kMaxKernelOffsets = 5;    // rows of a kernel
constexpr int kResult = kChannels + 2;  // channels of a result in shared memory: banks apart
constexpr int kMostBytes = 100 * 1024;  // of shared memory: two blocks find room

// Up to which waiting is what counts; half as many of two sixteens of columns, which have a
// multiprocessor each.
constexpr int kFewBlocks = 168;

struct Expansion {
  const float *first_bias, *second_bias;
  void* y;
  float* means;  // or null
  Overflow overflow;
  int channels, wide;  // of x and of y
  int h, w, out_h, out_w;
  int r, s, stride_h, stride_w, pad_top, pad_left;
  int rows;             // of y that a block makes
  int pitch;            // of a position of x and of a filter in shared memory, in bytes
  int lines;            // of what is between, of a channel
  int weights_at, end;  // in shared memory, in bytes: what is between, weights, the end
  int between_at;
  int once;           // 1
  float scale;        // 1 / positions of y
  Divisor by_pieces;  // of a position of x
  Activation inner, outer;
};

// Bytes of a channel of what is between: an odd number of pieces, which begin in banks apart.
template <int kSteps>
__host__ __device__ constexpr int channel_pitch(int lines) {
  return lines * kSteps * kColumns * 2 + kPiece;
}

// Where eight columns of a line of a channel lie: swizzled, so that eight lines that are read at
// once lie in banks apart.
template <int kSteps>
__device__ inline int eight_at(int line, int eight) {
  const int swizzled = kSteps == 1 ? line >> 2 & 1 : line >> 1 & 3;
  return line * (kSteps * kColumns * 2) + (eight ^ swizzled) * kPiece;
}

// Blocks: images; 16 channels each; rows of y. kSteps: 16 columns of x; kTiles: of y.
template <typename T, int kSteps, int kTiles, KnownActivation kKnown>
__global__ void __launch_bounds__(kThreads, kSteps == 1 ? 2 : 1)
    expand_depthwise_kernel(const T* x, const T* first, const T* second,
                            const __grid_constant__ Expansion p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kSteps > 0) return;  // there is nothing to wait for: never launched
#endif
  using Mma = std::conditional_t<std::is_same_v<T, __half>, Half, Bfloat16>;
  extern __shared__ __align__(16) char memory[];
  char *const between = memory + p.between_at, *const weights = memory + p.weights_at;
  T* const results = reinterpret_cast<T*>(memory);  // where the image was
  const int thread = threadIdx.x, warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const int g = lane / 4, t = lane % 4;
  const int pieces = p.channels / 8, channel_bytes = channel_pitch<kSteps>(p.lines);
  const int first_channel = static_cast<int>(blockIdx.y) * kChannels;
  const int first_out = static_cast<int>(blockIdx.z) * p.rows;
  const int out_rows = min(p.rows, p.out_h - first_out);
  const int top = first_out * p.stride_h - p.pad_top;  // the row of x that is line 0
  const int first_row = max(top, 0);
  const int rows = max(0, min(top + (out_rows - 1) * p.stride_h + p.r, p.h) - first_row);
  let_successors_start();

  for (int at = thread * kPiece; at < kChannels * channel_bytes; at += kThreads * kPiece) {
    *reinterpret_cast<uint4*>(between + at) = make_uint4(0, 0, 0, 0);
  }
  for (int i = thread; i < kChannels * pieces; i += kThreads) {
    const int filter = p.by_pieces.quotient(i), piece = i - filter * pieces;
    copy_piece(weights + filter * p.pitch + piece * kPiece,
               first + static_cast<std::int64_t>(first_channel + filter) * p.channels + piece * 8);
  }
  // Along the diagonals: row kx of the kernel's, where column `in` is that of result `out`.
  std::uint32_t diagonals[kMaxKernelOffsets][kTiles][kSteps][4];
  const auto* kernel_offsets =
      reinterpret_cast<const unsigned short*>(second) +
      (first_channel + warp) * p.r * (p.s + 1);  // zeros at the end of each row
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int out = tile * kColumns + g + 8 * (i & 1);
        const int in = step * kColumns + 2 * t + 8 * (i >> 1);
        int kernel_offset[2];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int at = in + v - out * p.stride_w + p.pad_left;
          kernel_offset[v] = at >= 0 && at < p.s && in + v < p.w ? at : p.s;
        }
#pragma unroll
        for (int ky = 0; ky < kMaxKernelOffsets; ++ky) {
          std::uint32_t pair = 0;
          if (ky < p.r) {
            const auto* row = kernel_offsets + ky * (p.s + 1);
            pair = row[kernel_offset[0]] | static_cast<std::uint32_t>(row[kernel_offset[1]]) << 16;
          }
          diagonals[ky][tile][step][i] = pair;
        }
      }
    }
  }
  const auto bias_of = [&](const float* bias, int channel) {
    return bias != nullptr && channel < p.wide ? bias[channel] : 0.0f;
  };
  const float first_bias[2] = {bias_of(p.first_bias, first_channel + g),
                               bias_of(p.first_bias, first_channel + g + 8)};
  const float second_bias = bias_of(p.second_bias, first_channel + warp);
  const std::uint32_t filters =
      shared_address(weights) + (lane % 16) * p.pitch + lane / 16 * kPiece;
  const std::uint32_t lines = shared_address(between) + warp * channel_bytes;
  const std::uint32_t image = shared_address(memory) + (lane / 8 & 1) * kPiece;

  // A loop, though it is gone through once: what is computed before it stays before the wait.
#pragma unroll 1
  for (int once = p.once; once > 0; --once) {
    wait_for_inputs();
    const T* const from =
        x + (static_cast<std::int64_t>(blockIdx.x) * p.h + first_row) * p.w * p.channels;
    for (int i = thread; i < rows * p.w * pieces; i += kThreads) {
      const int position = p.by_pieces.quotient(i), piece = i - position * pieces;
      copy_piece(memory + position * p.pitch + piece * kPiece, from + i * 8);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    // A warp makes 16 columns of a row for all channels; columns past the last are the last again,
    // which no diagonal reads.
    bool past = false;
    for (int item = warp; item < rows * kSteps; item += kWarps) {
      const int row = item / kSteps, step = item % kSteps;
      const int column = min(step * kColumns + lane % 8 + lane / 16 * 8, p.w - 1);
      const std::uint32_t positions = image + (row * p.w + column) * p.pitch;
      float sum[2][4] = {};
      std::uint32_t a[4], b[4];
      int k = 0;
#pragma unroll 4
      for (; k + 16 <= p.channels; k += 16) {
        load_tiles(a, filters + k * 2);
        load_tiles(b, positions + k * 2);
        Mma::mma16(sum[0], a, b);
        Mma::mma16(sum[1], a, b + 2);
      }
      if (k < p.channels) {
        load_tiles(a, filters + k * 2);
        load_tiles(b, positions + k * 2);
        Mma::mma8(sum[0], a, b);
        Mma::mma8(sum[1], a, b + 2);
      }
      float value[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] = sum[i / 4][i % 4] + first_bias[i / 2 % 2];
      apply_known<kKnown, T>(p.inner, value);
      past |= some_past<T>(value);
      const int line = first_row - top + row;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at =
            (g + 8 * (i % 2)) * channel_bytes + eight_at<kSteps>(line, step * 2 + i / 2) + 4 * t;
        *reinterpret_cast<std::uint32_t*>(between + at) = Mma::pack(value[2 * i], value[2 * i + 1]);
      }
    }
    __syncthreads();

    float sum[kTiles][4] = {}, all = 0.0f;
#pragma unroll
    for (int ky = 0; ky < kMaxKernelOffsets; ky += kSteps == 1 ? 2 : 1) {
      if (ky >= p.r) break;
      // Two rows of the kernel at once, or all columns of one.
      const int line = lane % 8 * p.stride_h + ky + (kSteps == 1 ? lane / 16 : 0);
      const int eight = kSteps == 1 ? lane / 8 % 2 : lane / 8;
      std::uint32_t b[4];
      load_tiles(b, lines + eight_at<kSteps>(line, eight));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        Mma::mma16(sum[tile], diagonals[ky][tile][0], b);
        if constexpr (kSteps == 2) {
          Mma::mma16(sum[tile], diagonals[ky][tile][kSteps - 1], b + 2);
        } else if (ky + 1 < kMaxKernelOffsets) {
          if (ky + 1 < p.r) Mma::mma16(sum[tile], diagonals[ky + 1][tile][0], b + 2);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] = sum[tile][i] + second_bias;
      apply_known<kKnown, T>(p.outer, value);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * t + i % 2, column = tile * kColumns + g + 8 * (i / 2);
        if (row < out_rows && column < p.out_w) {
          all += value[i];
          results[(row * p.out_w + column) * kResult + warp] = narrowed<T>(value[i]);
        } else {
          value[i] = 0.0f;
        }
      }
      past |= some_past<T>(value);
    }
    if (p.means != nullptr) {
#pragma unroll
      for (int apart = kWarpThreads / 2; apart > 0; apart /= 2) {
        all += __shfl_xor_sync(kFullMask, all, apart);
      }
      const int channel = first_channel + warp;
      if (lane == 0 && channel < p.wide) {
        p.means[(std::int64_t{blockIdx.x} * gridDim.z + blockIdx.z) * p.wide + channel] =
            all * p.scale;
      }
    }
    __syncthreads();

    constexpr int kPairs = kChannels / 2;
    T* const to = static_cast<T*>(p.y) + first_channel +
                  (static_cast<std::int64_t>(blockIdx.x) * p.out_h + first_out) * p.out_w * p.wide;
    for (int i = thread; i < out_rows * p.out_w * kPairs; i += kThreads) {
      const int position = i / kPairs, channel = i % kPairs * 2;
      if (first_channel + channel >= p.wide) continue;
      *reinterpret_cast<std::uint32_t*>(to + static_cast<std::int64_t>(position) * p.wide +
                                        channel) =
          *reinterpret_cast<const std::uint32_t*>(results + position * kResult + channel);
    }
    if (past) tell(p.overflow);
  }
}

// [K padded to sixteens][C] of the first, then [K padded][R][S + 1] of the second; zeros else.
template <typename T>
__global__ void expand_depthwise_pack_kernel(const float* __restrict__ first,   // [K, C]
                                             const float* __restrict__ second,  // [K, R, S]
                                             T* __restrict__ packed, int channels, int wide,
                                             int padded, int r, int s) {
  const std::int64_t index = grid_thread(), head = std::int64_t{padded} * channels;
  const std::int64_t rest = index - head, line = rest / (s + 1);
  if (rest >= std::int64_t{padded} * r * (s + 1)) return;
  const int kernel_offset = static_cast<int>(rest - line * (s + 1));
  float value = 0.0f;
  if (rest < 0) {
    if (index < std::int64_t{wide} * channels) value = first[index];
  } else if (kernel_offset < s && line < std::int64_t{wide} * r) {
    value = second[line * s + kernel_offset];
  }
  packed[index] = narrowed<T>(value);
}

int padded_of(const Conv2dShape& shape) {
  return (shape.k + kChannels - 1) / kChannels * kChannels;
}

std::int64_t packed_size(const Conv2dShape& shape, int channels) {
  return std::int64_t{padded_of(shape)} * (channels + shape.r * (shape.s + 1));
}

int parts_of(const Conv2dShape& shape) { return (shape.out_h() + kMostRows - 1) / kMostRows; }

int steps_of(int columns) { return (columns + kColumns - 1) / kColumns; }

Expansion parted(const Conv2dShape& shape, int channels) {
  Expansion p = {};
  p.channels = channels;
  p.wide = shape.k;
  p.h = shape.h;
  p.w = shape.w;
  p.out_h = shape.out_h();
  p.out_w = shape.out_w();
  p.r = shape.r;
  p.s = shape.s;
  p.stride_h = shape.stride_h;
  p.stride_w = shape.stride_w;
  p.pad_top = shape.pad_top;
  p.pad_left = shape.pad_left;
  p.rows = (p.out_h + parts_of(shape) - 1) / parts_of(shape);
  p.pitch = (channels / 8 | 1) * kPiece;
  // Eight rows of results and two of the kernel are read, whatever a block has of them.
  p.lines = (kMostRows - 1) * p.stride_h + p.r + 1;
  const int rows = std::min(p.h, (p.rows - 1) * p.stride_h + p.r);
  const auto aligned = [](int bytes) {
    return (bytes + 2 * kPiece - 1) / kPiece * kPiece;
  };
  p.between_at = aligned(std::max(rows * p.w * p.pitch, p.rows * p.out_w * kResult * 2));
  const int steps = steps_of(p.w);
  p.weights_at = p.between_at +
                 kChannels * (steps == 1 ? channel_pitch<1>(p.lines) : channel_pitch<2>(p.lines));
  p.end = aligned(p.weights_at + kChannels * p.pitch);
  p.once = 1;
  p.scale = 1.0f / static_cast<float>(p.out_h * p.out_w);
  p.by_pieces = Divisor(channels / 8);
  return p;
}

// What a shape is expected to be and is not, or null.
const char* why_not(const Conv2dShape& shape, int channels) {
  if (shape.groups != shape.c || shape.k != shape.c) return "one channel and one filter a group";
  if (channels % 8 != 0 || shape.c % 8 != 0 || channels < 8 || channels > 4096 ||
      shape.c > (1 << 20)) {
    return "channels in eights, and at most 4096 that are read";
  }
  if (shape.r > kMaxKernelOffsets || shape.s > kMaxKernelOffsets || shape.stride_h > 2 ||
      shape.stride_w > 2 || shape.dilation_h * shape.dilation_w != 1) {
    return "a kernel of at most 5x5, strides of at most 2 and no dilation";
  }
  if (shape.w > 2 * kColumns || shape.out_w() > kColumns * steps_of(shape.w) || shape.h > 256 ||
      shape.out_h() > 256 || shape.out_h() < 1 || shape.out_w() < 1) {
    return "images of at most 32 columns and 256 rows";
  }
  if (parted(shape, channels).end > kMostBytes) return "rows for which shared memory has room";
  return nullptr;
}

void check(const Conv2dShape& shape, int channels) {
  if (const char* expected = why_not(shape, channels)) {
    throw std::invalid_argument(std::string("expand_depthwise: expected ") + expected);
  }
}

}  // namespace

std::int64_t expand_depthwise_takes(const ExpandDepthwiseShape& both, const Target&) {
  const Conv2dShape& shape = both.second;
  const int channels = both.channels;
  if (why_not(shape, channels) != nullptr) return 0;
  const std::int64_t blocks =
      std::int64_t{shape.n} * parts_of(shape) * padded_of(shape) / kChannels;
  if (blocks > (steps_of(shape.w) == 1 ? kFewBlocks : kFewBlocks / 2)) return 0;
  return parts_of(shape);
}

std::int64_t expand_depthwise_packed(const ExpandDepthwiseShape& both, ElementType, int) {
  check(both.second, both.channels);
  return packed_size(both.second, both.channels) * 2;
}

void expand_depthwise_pack(const float* first, const float* second, void* packed,
                           const ExpandDepthwiseShape& both, ElementType compute_type,
                           Stream stream) {
  const Conv2dShape& shape = both.second;
  const int channels = both.channels;
  check(shape, channels);
  with_halves("expand_depthwise", compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const std::int64_t size = packed_size(shape, channels);
    expand_depthwise_pack_kernel<T><<<blocks_for(size), kBlockThreads, 0, stream>>>(
        first, second, static_cast<T*>(packed), channels, shape.k, padded_of(shape), shape.r,
        shape.s);
    CUDA_CHECK_LAUNCH("expand_depthwise_pack_kernel");
  });
}

void expand_depthwise(const void* x, const void* packed, void* y, float* means,
                      const ExpandDepthwiseShape& both, ElementType compute_type,
                      const std::array<Epilogue, 2>& epilogues, Stream stream) {
  const Conv2dShape& shape = both.second;
  const int channels = both.channels;
  check(shape, channels);
  if (!is_aligned(x, kPiece) || !is_aligned(packed, kPiece) || !is_aligned(y, 4)) {
    throw std::invalid_argument("expand_depthwise: expected addresses that are multiples of 16");
  }
  if (!waits_in_kernels()) {
    throw std::invalid_argument("expand_depthwise: expected a GPU of compute capability 9.0");
  }
  if (shape.n == 0) return;
  Expansion p = parted(shape, channels);
  p.first_bias = epilogues[0].bias;
  p.second_bias = epilogues[1].bias;
  p.y = y;
  p.means = means;
  p.overflow = epilogues[1].overflow;
  p.inner = clamps_of(epilogues[0].activation);
  p.outer = clamps_of(epilogues[1].activation);
  const dim3 grid(static_cast<unsigned>(shape.n),
                  static_cast<unsigned>(padded_of(shape) / kChannels),
                  static_cast<unsigned>(parts_of(shape)));
  with_halves("expand_depthwise", compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* const first = static_cast<const T*>(packed);
    const T* const second = first + std::int64_t{padded_of(shape)} * channels;
    const auto launched = [&](auto kernel) {
      CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.end));
      launch("launch of expand_depthwise_kernel", kernel, grid, kThreads,
             static_cast<unsigned>(p.end), stream, 1, static_cast<const T*>(x), first, second, p);
    };
    with_known_activations(p.inner, p.outer, [&](auto known) {
      if (steps_of(p.w) == 1) return launched(expand_depthwise_kernel<T, 1, 1, known.value>);
      if (steps_of(p.out_w) == 1) return launched(expand_depthwise_kernel<T, 2, 1, known.value>);
      launched(expand_depthwise_kernel<T, 2, 2, known.value>);
    });
  });
}

}  // namespace cnn_engine::cuda
