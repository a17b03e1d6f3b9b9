// conv2d_nhwc_wgmma_planar: a first layer as products of matrices, which wgmma multiplies.
//
// D [64 filters, 112 positions of a row of outputs]; a block has two rows, a warpgroup each, or one
// row in halves. K are a filter's kernel offsets, (r, s, c) with four channels and eight columns,
// of which those past the shape's have weights of 0. A block reads the rows of the image that its
// outputs need, and lays them down in pieces of 16 bytes, one for each position of the output, so
// that the windows of eight neighbours are what wgmma takes for eight rows of 16 bytes, and those
// that overlap share their memory.
//
// Of 16 bits a piece is a pair of positions, four channels each. A window's next two columns are
// one pair further where it moves by two, and two where it moves by one: there pairs overlap too.
// Of 32 bits a piece is one position; where windows move by two, even and odd positions lie apart.
//
// An infinity or NaN times the weights of 0 would be NaN in windows that it is not in: a block that
// reads one adds up its sums again, one product after another.
//
// float32 is multiplied as two parts of tf32 (conv2d_nhwc_wgmma_split.cuh), which weights are
// packed as, and each row of a filter summed by itself, half of the positions at a time.
//
// Packed weights: [ceil(K / 64)][parts][units][64 filters][128 bytes of two of the filter's rows,
// of 32 bits of one], their pieces swizzled (wgmma.cuh).
#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/sm80/tf32.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_epilogue.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_planar.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_split.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "ops/conv2d_nhwc_wgmma.h"

namespace cnn_engine::cuda {
namespace wgmma {
namespace {

constexpr int kPositions = 112;  // of a row of outputs
constexpr int kThreads = 256;
constexpr int kColumns = kColumnsOfFilter;
constexpr int kPieces = 120;              // of a row of the image, or of its even or odd positions
constexpr int kSharedBytes = 200 * 1024;  // at most
constexpr int kPitch = 64 + 4;            // of sums

// How an operand of so many bytes, in so many parts, lies in shared memory.
struct Layout {
  int item_bytes, parts, stride;

  __host__ __device__ constexpr int piece_positions() const { return item_bytes == 2 ? 2 : 1; }
  // Of a row of the image.
  __host__ __device__ constexpr int planes() const { return item_bytes == 2 ? 1 : stride; }
  __host__ __device__ constexpr int line_bytes() const { return planes() * kPieces * 16; }
  // From a column of a window to the next that has a piece of its own.
  __host__ __device__ constexpr int next_columns() const {
    if (item_bytes == 2) return 16 * (3 - stride);
    return stride == 1 ? 16 : kPieces * 16;
  }
  __host__ __device__ constexpr int filter_row_bytes() const {
    return kColumns * kPlanes * item_bytes;
  }
  __host__ __device__ constexpr int units(int filter_rows) const {
    return (filter_rows * filter_row_bytes() + kRowBytes - 1) / kRowBytes;
  }
  // Behind the last row.
  __host__ __device__ constexpr int beyond() const { return wgmma::beyond(next_columns()); }
};
template <typename T, int Stride>
constexpr Layout kLayout = {sizeof(T), std::is_same_v<T, float> ? 2 : 1, Stride};

constexpr Layout layout_of(ElementType compute_type, int stride) {
  return {has_16_bits(compute_type) ? 2 : 4, compute_type == ElementType::float32 ? 2 : 1, stride};
}

struct Planar {
  const float* x;
  const char* packed;
  const float* bias;
  void* y;
  Conv2dShape shape;
  int y_pitch, out_h, out_w, tiles_a_row, tiles_a_column;
  bool y_is_rounded, in_pieces;
  UnaryFunction activation;
  float alpha, beta;
  Overflow overflow;
};

int image_rows(const Conv2dShape& shape, int rows) { return shape.r + (rows - 1) * shape.stride_h; }

int shared_bytes(const Conv2dShape& shape, const Layout& at, int rows) {
  const int part = at.units(shape.r) * kUnitBytes + image_rows(shape, rows) * at.line_bytes();
  return std::max(at.parts * part + at.beyond(), rows * kPositions * kPitch * 4) + 8;
}

const char* why_not_planar(const Conv2dShape& p, ElementType compute_type) {
  if (p.groups != 1 || p.c > kPlanes) return "one group of at most 4 channels";
  if (p.s > kColumns || p.stride_w > 2 || p.dilation_h != 1 || p.dilation_w != 1) {
    return "at most 8 columns, 1 or 2 columns apart, without dilation";
  }
  if (shared_bytes(p, layout_of(compute_type, p.stride_w), 2) > kSharedBytes)
    return "rows that fit into shared memory";
  return nullptr;
}

// Descriptor for wgmma of pieces at `address`.
template <typename T, int Stride>
__device__ inline std::uint64_t pieces_at(std::uint32_t address) {
  constexpr std::uint64_t kNextColumns = kLayout<T, Stride>.next_columns(),
                          kEightPositions = 8 * 16;
  return (kEightPositions >> 4) << 32 | (kNextColumns >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

// Stores a piece of the image, four channels of a position or two, in each of its parts.
template <typename T, int n>
__device__ inline void store_piece_of_image(char* to, const float (&values)[n], int part_bytes,
                                            const Overflow& overflow) {
  if constexpr (std::is_same_v<T, float>) {
    float large[n], small[n];
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const Tf32Parts parts(values[i]);
      large[i] = parts.large;
      small[i] = parts.small;
    }
    store_neighbours(reinterpret_cast<T*>(to), large, overflow);
    store_neighbours(reinterpret_cast<T*>(to + part_bytes), small, overflow);
  } else {
    store_neighbours(reinterpret_cast<T*>(to), values, overflow);
  }
}

// A weight, from where conv2d_nhwc_wgmma_planar_pack put it.
template <typename T>
__device__ inline float packed_weight(const Planar& p, int filter, int r, int s, int c) {
  constexpr Layout kAt = kLayout<T, 1>;
  constexpr int kWidth = 16 / sizeof(T), kRowPieces = kAt.filter_row_bytes() / 16;
  constexpr int kKernelOffsets = kWidth / kPlanes, kRowsAUnit = 8 / kRowPieces;
  const int units = kAt.units(p.shape.r), row = filter % 64;
  const int piece = swizzled(row, r % kRowsAUnit * kRowPieces + s / kKernelOffsets);
  const auto* const from = reinterpret_cast<const T*>(p.packed);
  float weight = 0.0f;
#pragma unroll
  for (int part = 0; part < kAt.parts; ++part) {
    const int unit = (filter / 64 * kAt.parts + part) * units + r / kRowsAUnit;
    const std::int64_t at = (std::int64_t{64} * unit + row) * 8 + piece;
    weight += widened(from[at * kWidth + s % kKernelOffsets * kPlanes + c]);
  }
  return weight;
}

// A filter's sum over the window whose first place is (h, w) of image x.
template <typename T>
__device__ inline float plain_sum(const Planar& p, const float* x, int filter, int h, int w) {
  float sum = 0.0f;
#pragma unroll 1
  for (int r = 0; r < p.shape.r; ++r) {
#pragma unroll 1
    for (int s = 0; s < p.shape.s; ++s) {
      const bool inside = h + r >= 0 && h + r < p.shape.h && w + s >= 0 && w + s < p.shape.w;
#pragma unroll 1
      for (int c = 0; c < p.shape.c; ++c) {
        const std::int64_t line = std::int64_t{c} * p.shape.h + h + r;
        const float value = inside ? widened(narrowed<T>(x[line * p.shape.w + w + s])) : 0.0f;
        sum = fmaf(value, packed_weight<T>(p, filter, r, s, c), sum);
      }
    }
  }
  return sum;
}

// Of windows of at most Columns columns.
template <typename T, int Stride, int Columns, int Rows>
__global__ void __launch_bounds__(kThreads, 2)
    conv2d_nhwc_wgmma_planar_kernel(const __grid_constant__ Planar p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr Layout kAt = kLayout<T, Stride>;
  constexpr int kLineBytes = kAt.line_bytes();
  constexpr int kParts = 2 / Rows, kOwnPositions = kPositions / kParts;  // of a row; of a warpgroup
  extern __shared__ __align__(1024) char memory[];
  const int thread = threadIdx.x, group = thread / 128;
  const int own_row = group / kParts, own_position = group % kParts * kOwnPositions;
  const int rows_in = p.shape.r + (Rows - 1) * p.shape.stride_h;
  const int weight_bytes = kAt.units(p.shape.r) * kUnitBytes, image_bytes = rows_in * kLineBytes;
  char* const image = memory + kAt.parts * weight_bytes;
  const int inputs = kAt.parts * (weight_bytes + image_bytes) + kAt.beyond();
  const int sum_bytes = Rows * kPositions * kPitch * 4;
  const std::uint32_t weights = shared_address(memory);
  const std::uint32_t barrier = weights + max(inputs, sum_bytes);

  let_successors_start();
  const int tile = static_cast<int>(blockIdx.x), line = tile / p.tiles_a_row;
  const int first_position = (tile - line * p.tiles_a_row) * kPositions;
  const int n = line / p.tiles_a_column, first_row = (line - n * p.tiles_a_column) * Rows;
  const int first_filter = static_cast<int>(blockIdx.y) * 64;
  if (thread == 0) {
    init_mbarrier(barrier, 1);
    fence_async_proxy();
    expect_tx(barrier, kAt.parts * weight_bytes);
    copy_bulk(weights, p.packed + std::int64_t{1} * blockIdx.y * kAt.parts * weight_bytes,
              kAt.parts * weight_bytes, barrier);
  }
  constexpr int kWidth = 8;
  const int piece = thread % 8, filter = first_filter + piece * kWidth;
  const int left = p.shape.k - filter;
  float bias[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) bias[i] = p.bias && i < left ? p.bias[filter + i] : 0.0f;
  wait_for_inputs();

  const std::int64_t plane = std::int64_t{1} * p.shape.h * p.shape.w;
  const float* const x = p.x + plane * p.shape.c * n;
  const int top = first_row * p.shape.stride_h - p.shape.pad_top;
  const int begin = first_position * Stride - p.shape.pad_left;
  const int pieces_in = rows_in * kAt.planes() * kPieces;
  constexpr int kAtOnce = Columns > 4 ? 5 : 2;  // pieces whose loads are all on their way
  float probe = 0.0f;                           // NaN once an infinity or NaN was read
#pragma unroll 1
  for (int from_piece = thread; from_piece < pieces_in; from_piece += kAtOnce * kThreads) {
    float values[kAtOnce][kAt.piece_positions() * kPlanes] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = from_piece + j * kThreads, run = at / kPieces;
      const int row = run / kAt.planes(), h = top + row;
      const int w = begin + (at - run * kPieces) * Stride + run % kAt.planes();
#pragma unroll
      for (int i = 0; i < kAt.piece_positions(); ++i) {
        const bool inside =
            at < pieces_in && h >= 0 && h < p.shape.h && w + i >= 0 && w + i < p.shape.w;
        const float* const from = x + static_cast<std::int64_t>(h) * p.shape.w + w + i;
#pragma unroll
        for (int c = 0; c < kPlanes; ++c) {
          if (inside && c < p.shape.c) values[j][i * kPlanes + c] = from[c * plane];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = from_piece + j * kThreads;
#pragma unroll
      for (const float value : values[j]) probe = fmaf(value, 0.0f, probe);
      if (at < pieces_in) {
        store_piece_of_image<T>(image + at * 16, values[j], image_bytes, p.overflow);
      }
    }
  }
  fence_async_proxy();
  const bool plain = __syncthreads_or(probe != 0.0f);
  wait_mbarrier(barrier, 0);

  float accumulators[kOwnPositions / 2] = {};
  const std::uint32_t pieces = weights + kAt.parts * weight_bytes +
                               own_row * p.shape.stride_h * kLineBytes + own_position * 16;
  constexpr int kKernelOffsets = kInstructionBytes / (kPlanes * static_cast<int>(sizeof(T)));
  constexpr int kInstructions = Columns / kKernelOffsets;
#pragma unroll 1
  for (int r = 0; r < p.shape.r; ++r) {
    constexpr int kRowsAUnit = kRowBytes / kAt.filter_row_bytes();
    const std::uint64_t a = matrix_descriptor(weights + r / kRowsAUnit * kUnitBytes +
                                              r % kRowsAUnit * kAt.filter_row_bytes());
    const std::uint64_t b = pieces_at<T, Stride>(pieces + r * kLineBytes);
    constexpr int kNextA = kInstructionBytes >> 4, kNextB = kKernelOffsets / Stride;
    if constexpr (std::is_same_v<T, float>) {
      constexpr int kHalf = kPositions / 2;  // at a time
      const std::uint64_t small = a + (weight_bytes >> 4), beyond = b + (image_bytes >> 4);
#pragma unroll
      for (int half = 0; half < kOwnPositions / kHalf; ++half) {
        float of_row[kHalf / 2] = {};
        const auto multiply = [&](std::uint64_t of_filters, std::uint64_t of_positions) {
#pragma unroll
          for (int i = 0; i < kInstructions; ++i) {
            Wgmma<Tf32, kHalf>::multiply(of_row, of_filters + i * kNextA,
                                         of_positions + half * kHalf + i * kNextB);
          }
        };
        wgmma_fence();
        multiply(a, beyond);
        multiply(small, b);
        multiply(a, b);
        wgmma_commit();
        wgmma_wait<0>();
        take(of_row);
#pragma unroll
        for (int i = 0; i < kHalf / 2; ++i) accumulators[half * (kHalf / 2) + i] += of_row[i];
      }
    } else {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kInstructions; ++i) {
        Wgmma<T, kOwnPositions>::multiply(accumulators, a + i * kNextA, b + i * kNextB);
      }
      wgmma_commit();
      wgmma_wait<1>();
    }
  }
  wgmma_wait<0>();
  __syncthreads();  // no one multiplies what lies there
  float* const own = reinterpret_cast<float*>(memory) + group * (kOwnPositions * kPitch);
#pragma unroll
  for (int j = 0; j < kOwnPositions / 8; ++j) {
    store_accumulators<kPitch>(own + accumulator_index<kPitch>(thread % 128) + 8 * j * kPitch,
                               {accumulators[4 * j], accumulators[4 * j + 1],
                                accumulators[4 * j + 2], accumulators[4 * j + 3]});
  }
  __syncthreads();
  if (plain) {
    float* const all = reinterpret_cast<float*>(memory);  // [rows][positions][kPitch]
    for (int i = thread; i < Rows * kPositions * 64; i += kThreads) {
      const int of_filter = i % 64, position = i / 64 % kPositions, row = i / 64 / kPositions;
      all[i / 64 * kPitch + of_filter] =
          plain_sum<T>(p, x, min(first_filter + of_filter, p.shape.k - 1),
                       top + row * p.shape.stride_h, begin + position * Stride);
    }
    __syncthreads();
  }

  const int row = first_row + own_row, begins = first_position + own_position;
  const int count = row < p.out_h ? min(kOwnPositions, p.out_w - begins) : 0;
  const bool whole = p.in_pieces && left >= kWidth;
  const std::int64_t first = (std::int64_t{1} * n * p.out_h + row) * p.out_w + begins;
#pragma unroll 1
  for (int position = thread % 128 / 8; position < count; position += 16) {
    if (left <= 0) break;
    float value[kWidth];
    load_neighbours(own + position * kPitch + piece * kWidth, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] += bias[i];
    activate<T>(p, value);
    const std::int64_t to = (first + position) * p.y_pitch + filter;
    if (sizeof(T) == 2 && p.y_is_rounded) {
      store_piece(static_cast<T*>(p.y) + to, value, whole, left, p.overflow);
    } else {
      store_piece(static_cast<float*>(p.y) + to, value, whole, left, p.overflow);
    }
  }
#endif
}

// One thread packs 16 bytes: one or two columns of four channels.
template <typename T>
__global__ void conv2d_nhwc_wgmma_planar_pack_kernel(const float* weight,  // [K, C, R, S]
                                                     T* packed, const Conv2dShape shape, int units,
                                                     int pieces) {
  constexpr Layout kAt = kLayout<T, 1>;
  constexpr int kWidth = 16 / sizeof(T), kRowPieces = kAt.filter_row_bytes() / 16;
  const int index = static_cast<int>(grid_thread());
  if (index >= pieces) return;
  const int at = index % 8, row = index / 8 % 64, unit = index / 512 % units;
  const int part = index / 512 / units % kAt.parts;
  const int filter = index / 512 / units / kAt.parts * 64 + row;
  const int piece = swizzled(row, at), r = unit * (8 / kRowPieces) + piece / kRowPieces;
  for (int i = 0; i < kWidth; ++i) {
    const int s = piece % kRowPieces * (kWidth / kPlanes) + i / kPlanes, c = i % kPlanes;
    const bool some = filter < shape.k && r < shape.r && s < shape.s && c < shape.c;
    const int from = ((filter * shape.c + c) * shape.r + r) * shape.s + s;
    float value = some ? weight[from] : 0.0f;
    if constexpr (kAt.parts > 1) value = part_of_tf32(value, part);
    packed[std::int64_t{kWidth} * index + i] = narrowed<T>(value);
  }
}

template <typename T, int Stride, int Columns, int Rows>
void launch_rows(Planar p, Stream stream) {
  const auto kernel = conv2d_nhwc_wgmma_planar_kernel<T, Stride, Columns, Rows>;
  const int bytes = shared_bytes(p.shape, kLayout<T, Stride>, Rows);
  make_ready(kernel, bytes);
  p.tiles_a_row = (p.out_w + kPositions - 1) / kPositions;
  p.tiles_a_column = (p.out_h + Rows - 1) / Rows;
  const dim3 grid(p.shape.n * p.tiles_a_column * p.tiles_a_row, (p.shape.k + 63) / 64);
  launch("conv2d_nhwc_wgmma_planar_kernel", kernel, grid, dim3(kThreads), bytes, stream, 1, p);
}

template <typename T, int Stride, int Columns>
void launch_columns(const Planar& p, int multiprocessors, Stream stream) {
  const std::int64_t rows = std::int64_t{p.shape.n} * p.out_h;
  if (rows > 2 * multiprocessors) return launch_rows<T, Stride, Columns, 2>(p, stream);
  launch_rows<T, Stride, Columns, 1>(p, stream);
}

template <typename T, int Stride>
void launch_stride(const Planar& p, int multiprocessors, Stream stream) {
  if (p.shape.s <= kColumns / 2) {
    return launch_columns<T, Stride, kColumns / 2>(p, multiprocessors, stream);
  }
  launch_columns<T, Stride, kColumns>(p, multiprocessors, stream);
}

template <typename T>
void launch_planar(const Planar& p, int multiprocessors, Stream stream) {
  if (p.shape.stride_w == 2) return launch_stride<T, 2>(p, multiprocessors, stream);
  launch_stride<T, 1>(p, multiprocessors, stream);
}

void check_planar(const Conv2dShape& shape, ElementType compute_type) {
  if (const char* expected = why_not_planar(shape, compute_type)) {
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma_planar: expected ") + expected);
  }
}

}  // namespace
}  // namespace wgmma

std::int64_t conv2d_nhwc_wgmma_planar_takes(const Conv2dShape& shape, ElementType compute_type,
                                            const Target&) {
  return wgmma::why_not_planar(shape, compute_type) == nullptr;
}

std::int64_t conv2d_nhwc_wgmma_planar_packed(const Conv2dShape& shape, ElementType compute_type,
                                             int) {
  wgmma::check_planar(shape, compute_type);
  const wgmma::Layout at = wgmma::layout_of(compute_type, shape.stride_w);
  return std::int64_t{wgmma::kUnitBytes} * at.parts * at.units(shape.r) * ((shape.k + 63) / 64);
}

void conv2d_nhwc_wgmma_planar_pack(const float* weight, void* packed, const Conv2dShape& shape,
                                   ElementType compute_type, Stream stream) {
  const int pieces = static_cast<int>(conv2d_nhwc_wgmma_planar_packed(shape, compute_type, 0) / 16);
  wgmma::with_type(compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    wgmma::conv2d_nhwc_wgmma_planar_pack_kernel<<<blocks_for(pieces), kBlockThreads, 0, stream>>>(
        weight, static_cast<T*>(packed), shape, wgmma::kLayout<T, 1>.units(shape.r), pieces);
  });
  CUDA_CHECK_LAUNCH("conv2d_nhwc_wgmma_planar_pack_kernel");
  // conv2d_nhwc_wgmma_planar reads them before it waits for the kernels before it.
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void conv2d_nhwc_wgmma_planar(const float* input, const void* packed, const Images& output,
                              const Conv2dShape& shape, ElementType compute_type,
                              const Epilogue& epilogue, Stream stream) {
  wgmma::check_planar(shape, compute_type);
  check_storage("y", output.storage, compute_type);
  if (epilogue.residual.data) {
    throw std::invalid_argument("conv2d_nhwc_wgmma_planar: expected no residual");
  }
  if (!is_aligned(packed, 16)) {
    throw std::invalid_argument("packed weights: expected an address that is a multiple of 16");
  }
  if (shape.n == 0) return;
  const int multiprocessors = target_here().multiprocessors;
  const std::int64_t positions = std::int64_t{shape.out_h()} * shape.out_w();
  for_each_part_of_batch(shape.n, positions, [&](std::int64_t first, int images) {
    wgmma::Planar p = {};
    p.x = input + first * shape.c * shape.h * shape.w;
    p.packed = static_cast<const char*>(packed);
    p.bias = epilogue.bias;
    p.y = element(output.data, output.storage, first * positions * output.pitch);
    p.shape = shape;
    p.shape.n = images;
    p.y_pitch = output.pitch;
    p.out_h = shape.out_h();
    p.out_w = shape.out_w();
    p.y_is_rounded = output.storage != ElementType::float32;
    p.in_pieces = is_aligned(p.y, 16) && output.pitch * bytes_of(output.storage) % 16 == 0;
    p.activation = epilogue.activation.function;
    p.alpha = epilogue.activation.alpha;
    p.beta = epilogue.activation.beta;
    p.overflow = epilogue.overflow;
    wgmma::with_type(compute_type, [&](auto* type) {
      wgmma::launch_planar<std::remove_pointer_t<decltype(type)>>(p, multiprocessors, stream);
    });
  });
}

}  // namespace cnn_engine::cuda
