// conv2d_nhwc_depthwise of many positions on tensor cores, of images and weights of 16 bits, with a
// stride of 1.
//
// For one channel and one row j of the image, the products of its columns 0..15 with a kernel's row
// r, slid over 8 columns, are those of a matrix [8 outputs, 16 columns] that is w[r, x' - x] along
// its diagonals and zero elsewhere. Rows r = j - y and r = j - y - 1 of the kernel are one operand
// A [2 x 8 outputs, 16 columns], which makes two rows of outputs; operand B [16 columns, 8 tiles]
// is the row of 8 tiles, anywhere in the batch. 44 % of the products are of diagonals, at ten times
// FMA's rate. Zeros times what is no number are none: an infinity or NaN reaches all of its tile.
//
// A block makes 8 tiles of 8x8 positions and 16 channels. It lays its part of the images down with
// a channel's neighbouring columns side by side, two to a word; a warp makes two channels.
#include "cuda/sm80/conv2d_nhwc_depthwise.cuh"
#include "cuda/sm80/mma.cuh"

namespace cnn_engine::cuda {
namespace {

template <int Side>
struct DepthwiseTiles {
  static constexpr int kSide = 8, kTiles = 8;           // positions of a tile, tiles of a block
  static constexpr int kChannels = 16, kThreads = 256;  // of a block
  static constexpr int kRows = kSide + Side - 1, kWords = 8;  // that a tile reads, and a row's
  // So that a warp's loads, [8 tiles][4 pairs of words], and its stores, [2 groups of 8 channels]
  // [2 rows][8 words], are of all banks.
  static constexpr int kTilePitch = kRows * kWords + 8;
  static constexpr int kPlane = kTiles * kTilePitch + 2;
  static constexpr int kPositionPitch =
      kChannels / 2 + 4;  // of what is made: words of two channels
  static constexpr int kWeightPitch = kChannels / 2 + 1;
  static constexpr int kImageBytes = kChannels * kPlane * 4;
  static constexpr int kWeightBytes = (Side * Side * kWeightPitch * 4 + 15) / 16 * 16;
  static constexpr int kSharedBytes = kImageBytes + kWeightBytes;

  static_assert(Side % 2 == 1 && kSide + Side - 1 <= 2 * kWords);
  static_assert(kTilePitch % 16 == 8 && kPlane % 4 == 2);
  static_assert(kTiles * kSide * kSide * kPositionPitch * 4 <= kImageBytes);
  static_assert(kTiles * kRows % (kThreads / 16) == 0 && kThreads == 16 * kChannels);
};

template <typename T, int Side>
__global__ void __launch_bounds__(256, 3)
    conv2d_nhwc_depthwise_mma_kernel(const __grid_constant__ Depthwise<T> d,
                                     const __grid_constant__ Conv2dShape p, int tiles) {
  using At = DepthwiseTiles<Side>;
  using Format = std::conditional_t<std::is_same_v<T, __half>, Half, Bfloat16>;
  extern __shared__ __align__(16) std::uint32_t words[];
  std::uint32_t* const weights = words + At::kImageBytes / 4;  // [Side * Side][kWeightPitch]
  __shared__ int origin[At::kTiles][3];                        // image, first row, first column
  let_successors_start();
  const int thread = threadIdx.x, warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  const int block = static_cast<int>(d.by_groups.quotient(blockIdx.x));
  const int first_channel = (blockIdx.x - block * d.by_groups.value) * At::kChannels;
  const int first_tile = block * At::kTiles;

  if (thread < At::kTiles) {
    const unsigned tile = first_tile + thread, line = d.by_runs.quotient(tile);
    const unsigned image = d.by_rows.quotient(line);
    origin[thread][0] = static_cast<int>(tile) < tiles ? static_cast<int>(image) : -1;
    origin[thread][1] = static_cast<int>(line - image * d.by_rows.value) * At::kSide;
    origin[thread][2] = static_cast<int>(tile - line * d.by_runs.value) * At::kSide;
  }
  // Words of two channels as memory has them, [kernel offsets][channels].
  const auto* const packed = reinterpret_cast<const std::uint32_t*>(d.packed + first_channel);
  for (int i = thread; i < Side * Side * (At::kChannels / 2); i += At::kThreads) {
    const int kernel_offset = i / (At::kChannels / 2), word = i % (At::kChannels / 2);
    const bool some = first_channel + 2 * word < p.c;
    weights[kernel_offset * At::kWeightPitch + word] =
        some ? packed[kernel_offset * (p.c / 2) + word] : 0;
  }
  __syncthreads();

  float bias[2] = {};
  const int channel = first_channel + 2 * warp;
  if (d.bias != nullptr && channel < p.c) load_neighbours(d.bias + channel, bias);
  wait_for_inputs();

  {
    constexpr int kLinesAtOnce = At::kThreads / 16, kLines = At::kTiles * At::kRows / kLinesAtOnce;
    constexpr int kReadAtOnce = 4;
    const int eight = thread % 2, word = thread / 2 % 8, line = thread / 16;
    const bool in_channels = first_channel + eight * 8 < p.c;
    const T* const first = d.input + first_channel + eight * 8;
#pragma unroll
    for (int begin = 0; begin < kLines; begin += kReadAtOnce) {
      uint4 read[kReadAtOnce][2];
#pragma unroll
      for (int i = 0; i < kReadAtOnce && begin + i < kLines; ++i) {
        const int own = line + (begin + i) * kLinesAtOnce, tile = own / At::kRows;
        const int y = origin[tile][1] - p.pad_top + own % At::kRows, image = origin[tile][0];
        const bool inside = in_channels && image >= 0 && y >= 0 && y < p.h;
        const T* const from =
            first + (static_cast<std::int64_t>(image) * p.h + y) * p.w * d.pitches.x;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int column = 2 * word + k, x = origin[tile][2] - p.pad_left + column;
          const bool some = inside && x >= 0 && x < p.w && column < At::kSide + Side - 1;
          // What is outside is read where the images begin, and then taken as 0.
          read[i][k] = *reinterpret_cast<const uint4*>(some ? from + x * d.pitches.x : d.input);
          if (!some) read[i][k] = {0, 0, 0, 0};
        }
      }
#pragma unroll
      for (int i = 0; i < kReadAtOnce && begin + i < kLines; ++i) {
        const int own = line + (begin + i) * kLinesAtOnce;
        std::uint32_t* const to = words + eight * 8 * At::kPlane +
                                  own / At::kRows * At::kTilePitch + own % At::kRows * At::kWords +
                                  word;
        const std::uint32_t a[4] = {read[i][0].x, read[i][0].y, read[i][0].z, read[i][0].w};
        const std::uint32_t b[4] = {read[i][1].x, read[i][1].y, read[i][1].z, read[i][1].w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          to[2 * c * At::kPlane] = __byte_perm(a[c], b[c], 0x5410);
          to[(2 * c + 1) * At::kPlane] = __byte_perm(a[c], b[c], 0x7632);
        }
      }
    }
  }

  // Rows of A: a thread's columns 4t..4t+3 of the diagonals' row g. What A has of row r + 1 in its
  // lower half it has of row r in its upper one.
  std::uint32_t diagonal[2][Side][2];  // [channel][row of the kernel][columns 4t.., 4t+2..]
  {
    int at[4];
    bool some[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int s = 4 * t + i - g;
      some[i] = s >= 0 && s < Side;
      at[i] = (some[i] ? s : 0) * At::kWeightPitch + warp;
    }
#pragma unroll
    for (int r = 0; r < Side; ++r) {
      std::uint32_t pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pair[i] = weights[r * Side * At::kWeightPitch + at[i]];
        pair[i] = some[i] ? pair[i] : 0;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        diagonal[0][r][i] = __byte_perm(pair[2 * i], pair[2 * i + 1], 0x5410);
        diagonal[1][r][i] = __byte_perm(pair[2 * i], pair[2 * i + 1], 0x7632);
      }
    }
  }
  float accumulators[2][At::kSide / 2][4];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int pair = 0; pair < At::kSide / 2; ++pair) {
#pragma unroll
      for (int i = 0; i < 4; ++i) accumulators[c][pair][i] = bias[c];
    }
  }
  __syncthreads();

  const std::uint32_t* const tile_words =
      words + 2 * warp * At::kPlane + g * At::kTilePitch + 2 * t;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int j = 0; j < At::kRows; ++j) {
      const uint2 b = *reinterpret_cast<const uint2*>(tile_words + c * At::kPlane + j * At::kWords);
      const std::uint32_t columns[2] = {b.x, b.y};
#pragma unroll
      for (int pair = 0; pair < At::kSide / 2; ++pair) {
        const int r = j - 2 * pair;  // of the upper row of outputs; of the lower one r - 1
        if (r < 0 || r > Side) continue;
        const std::uint32_t a[4] = {r < Side ? diagonal[c][r < Side ? r : 0][0] : 0,
                                    r > 0 ? diagonal[c][r > 0 ? r - 1 : 0][0] : 0,
                                    r < Side ? diagonal[c][r < Side ? r : 0][1] : 0,
                                    r > 0 ? diagonal[c][r > 0 ? r - 1 : 0][1] : 0};
        Format::mma16(accumulators[c][pair], a, columns);
      }
    }
  }
  __syncthreads();

  float (&all)[At::kSide * 4] = reinterpret_cast<float (&)[At::kSide * 4]>(accumulators);
  apply<T>(d.activation, all);
  if (std::is_same_v<T, __half> && largest(all) >= 65520.0f) {
    bool past = false;
#pragma unroll
    for (int i = 0; i < At::kSide * 4; ++i) {
      const int tile = 2 * t + i % 2, y = origin[tile][1] + i / 2 % At::kSide;
      const bool some = origin[tile][0] >= 0 && y < d.out_h && origin[tile][2] + g < d.out_w;
      past |= some && is_past_float16(all[i]);
    }
    if (past) tell(d.overflow);
  }
  // What is made, [tile][row][column][kPositionPitch], the words of eight channels rotated by t.
  std::uint32_t* const made = words + (2 * t * At::kSide * At::kSide + g) * At::kPositionPitch +
                              warp / 4 * 4 + (warp + t) % 4;
#pragma unroll
  for (int pair = 0; pair < At::kSide / 2; ++pair) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float one = accumulators[0][pair][i], other = accumulators[1][pair][i];
      const int position = i % 2 * At::kSide * At::kSide + (2 * pair + i / 2) * At::kSide;
      made[position * At::kPositionPitch] = Format::pack(one, other);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = thread; i < At::kTiles * At::kSide * At::kSide * 2; i += At::kThreads) {
    const int eight = i % 2, position = i / 2, tile = position / (At::kSide * At::kSide);
    const int y = origin[tile][1] + position / At::kSide % At::kSide;
    const int x = origin[tile][2] + position % At::kSide, image = origin[tile][0];
    const int c = first_channel + eight * 8, turn = tile / 2;
    if (image < 0 || y >= d.out_h || x >= d.out_w || c >= p.c) continue;
    uint4 v = *reinterpret_cast<const uint4*>(words + position * At::kPositionPitch + eight * 4);
    if (turn & 1) v = {v.y, v.z, v.w, v.x};
    if (turn & 2) v = {v.z, v.w, v.x, v.y};
    const std::int64_t at = (static_cast<std::int64_t>(image) * d.out_h + y) * d.out_w + x;
    *reinterpret_cast<uint4*>(d.output + at * d.pitches.y + c) = v;
  }
}

}  // namespace

template <int Side, typename T>
void launch_tiles(Depthwise<T> d, const Conv2dShape& p, Stream stream) {
  using At = DepthwiseTiles<Side>;
  const auto kernel = conv2d_nhwc_depthwise_mma_kernel<T, Side>;
  const std::int64_t across = (p.out_w() + At::kSide - 1) / At::kSide;
  const std::int64_t down = (p.out_h() + At::kSide - 1) / At::kSide;
  const std::int64_t tiles = p.n * down * across;
  const std::int64_t groups = (p.c + At::kChannels - 1) / At::kChannels;
  d.by_groups = Divisor(groups);
  d.by_runs = Divisor(across);
  d.by_rows = Divisor(down);
  CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, At::kSharedBytes));
  launch("launch of conv2d_nhwc_depthwise_mma_kernel", kernel,
         static_cast<unsigned>((tiles + At::kTiles - 1) / At::kTiles * groups), At::kThreads,
         At::kSharedBytes, stream, 1, d, p, static_cast<int>(tiles));
}

#define CNN_ENGINE_TILES(Side)                                                     \
  template void launch_tiles<Side>(Depthwise<__half>, const Conv2dShape&, Stream); \
  template void launch_tiles<Side>(Depthwise<__nv_bfloat16>, const Conv2dShape&, Stream);
CNN_ENGINE_TILES(5)
CNN_ENGINE_TILES(7)
#undef CNN_ENGINE_TILES

}  // namespace cnn_engine::cuda
