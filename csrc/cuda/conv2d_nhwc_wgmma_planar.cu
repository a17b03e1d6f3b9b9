// conv2d_nhwc_wgmma_planar: a first layer as products of matrices, which wgmma multiplies.
//
// D [64 filters, 112 places of a row of outputs], a warpgroup each. K are a filter's taps, (r, s,
// c) with four channels and eight columns, of which those past the shape's have weights of 0. A
// block reads the rows of the image that its outputs need, and lays them down as pairs of places,
// four channels each: 16 bytes for each place of the output, so that the windows of eight
// neighbours are what wgmma takes for eight rows of 16 bytes, and those that overlap share their
// memory. A window's next two columns are one pair further where it moves by two, and two where it
// moves by one: there pairs overlap too.
//
// Packed weights: [ceil(K / 64)][ceil(R / 2)][64 filters][128 bytes of two of the filter's rows],
// their pieces exchanged (wgmma.cuh).
#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/conv2d_nhwc_wgmma_end.cuh"
#include "cuda/conv2d_nhwc_wgmma_product.h"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/stored.cuh"
#include "cuda/strided.cuh"
#include "cuda/wgmma.cuh"
#include "ops/conv2d_nhwc_wgmma.h"

namespace cnn_engine::cuda {
namespace wgmma {
namespace {

constexpr int kPlaces = 112;  // of a row of outputs
constexpr int kColumns = 8, kPlanes = 4;
constexpr int kPairs = 120;  // of a row of the image
constexpr int kUnitBytes = 64 * kRowBytes;
constexpr int kSharedBytes = 200 * 1024;  // at most
constexpr int kPitch = 64 + 4;            // of sums
// Behind the last row: memcheck takes the rows of a matrix for apart, and sees so much more read.
constexpr int kBeyond = 1792;

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

int units_of(const Conv2dShape& shape) { return (shape.r + 1) / 2; }

int image_rows(const Conv2dShape& shape, int rows) { return shape.r + (rows - 1) * shape.stride_h; }

int shared_bytes(const Conv2dShape& shape, int rows) {
  const int inputs = units_of(shape) * kUnitBytes + image_rows(shape, rows) * kPairs * 16 + kBeyond;
  return std::max(inputs, rows * kPlaces * kPitch * 4) + 8;
}

const char* why_not_planar(const Conv2dShape& p) {
  if (p.groups != 1 || p.c > kPlanes) return "one group of at most 4 channels";
  if (p.s > kColumns || p.stride_w > 2 || p.dilation_h != 1 || p.dilation_w != 1) {
    return "at most 8 columns, 1 or 2 columns apart, without dilation";
  }
  if (shared_bytes(p, 2) > kSharedBytes) return "rows that fit into shared memory";
  return nullptr;
}

// How wgmma is told of pairs at `address`.
template <int Stride>
__device__ inline std::uint64_t pairs_at(std::uint32_t address) {
  constexpr std::uint64_t kNextColumns = 16 * (3 - Stride), kEightPlaces = 8 * 16;
  return (kEightPlaces >> 4) << 32 | (kNextColumns >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

template <typename T, int Stride, int Rows>
__global__ void __launch_bounds__(128 * Rows, 2)
    conv2d_nhwc_wgmma_planar_kernel(const __grid_constant__ Planar p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kThreads = 128 * Rows;
  extern __shared__ __align__(1024) char memory[];
  const int thread = threadIdx.x, group = thread / 128;
  const int units = (p.shape.r + 1) / 2, rows_in = p.shape.r + (Rows - 1) * p.shape.stride_h;
  char* const image = memory + units * kUnitBytes;
  const int inputs = units * kUnitBytes + rows_in * kPairs * 16 + kBeyond;
  const int sum_bytes = Rows * kPlaces * kPitch * 4;
  const std::uint32_t weights = shared_address(memory);
  const std::uint32_t barrier = weights + max(inputs, sum_bytes);

  let_successors_start();
  const int tile = static_cast<int>(blockIdx.x), line = tile / p.tiles_a_row;
  const int first_place = (tile - line * p.tiles_a_row) * kPlaces;
  const int n = line / p.tiles_a_column, first_row = (line - n * p.tiles_a_column) * Rows;
  const int first_filter = static_cast<int>(blockIdx.y) * 64;
  if (thread == 0) {
    init_phases(barrier, 1);
    publish_to_engines();
    expect_bytes(barrier, units * kUnitBytes);
    copy_bulk(weights, p.packed + std::int64_t{1} * blockIdx.y * units * kUnitBytes,
              units * kUnitBytes, barrier);
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
  const int begin = first_place * Stride - p.shape.pad_left;
#pragma unroll 5
  for (int pair = thread; pair < rows_in * kPairs; pair += kThreads) {
    const int row = pair / kPairs, h = top + row;
    const int w = begin + (pair - row * kPairs) * Stride;
    float values[2 * kPlanes] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool inside = h >= 0 && h < p.shape.h && w + i >= 0 && w + i < p.shape.w;
      const float* const from = x + static_cast<std::int64_t>(h) * p.shape.w + w + i;
#pragma unroll
      for (int c = 0; c < kPlanes; ++c) {
        if (inside && c < p.shape.c) values[i * kPlanes + c] = from[c * plane];
      }
    }
    store_neighbours(reinterpret_cast<T*>(image + pair * 16), values, p.overflow);
  }
  publish_to_engines();
  __syncthreads();
  wait_for_phase(barrier, 0);

  float sums[kPlaces / 2] = {};
  const std::uint32_t pairs =
      weights + units * kUnitBytes + group * p.shape.stride_h * (kPairs * 16);
#pragma unroll 1
  for (int r = 0; r < p.shape.r; ++r) {
    const std::uint64_t a = matrix_at(weights + r / 2 * kUnitBytes + r % 2 * 64);
    const std::uint64_t b = pairs_at<Stride>(pairs + r * (kPairs * 16));
    begin_products();
    Wgmma<T, kPlaces>::multiply(sums, a, b);
    // Four columns further.
    Wgmma<T, kPlaces>::multiply(sums, a + 2, b + 4 / Stride);
    commit_products();
    wait_for_products<1>();
  }
  wait_for_products<0>();
  __syncthreads();  // no one multiplies what lies there
  float* const own = reinterpret_cast<float*>(memory) + group * (kPlaces * kPitch);
#pragma unroll
  for (int j = 0; j < kPlaces / 8; ++j) {
    store_sums<kPitch>(own + place_of_sums<kPitch>(thread % 128) + 8 * j * kPitch,
                       {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]});
  }
  __syncthreads();

  const int row = first_row + group;
  const int count = row < p.out_h ? min(kPlaces, p.out_w - first_place) : 0;
  const bool whole = p.in_pieces && left >= kWidth;
  const std::int64_t first = (std::int64_t{1} * n * p.out_h + row) * p.out_w + first_place;
#pragma unroll 1
  for (int place = thread % 128 / 8; place < count; place += 16) {
    if (left <= 0) break;
    float value[kWidth];
    load_neighbours(own + place * kPitch + piece * kWidth, value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] += bias[i];
    activate(p, value);
    const std::int64_t to = (first + place) * p.y_pitch + filter;
    if (p.y_is_rounded) {
      store_piece(static_cast<T*>(p.y) + to, value, whole, left, p.overflow);
    } else {
      store_piece(static_cast<float*>(p.y) + to, value, whole, left, p.overflow);
    }
  }
#endif
}

// One thread packs 16 bytes: two columns of four channels.
template <typename T>
__global__ void conv2d_nhwc_wgmma_planar_pack_kernel(const float* weight,  // [K, C, R, S]
                                                     T* packed, const Conv2dShape shape, int units,
                                                     int pieces) {
  const int index = static_cast<int>(grid_thread());
  if (index >= pieces) return;
  const int at = index % 8, row = index / 8 % 64, unit = index / 512 % units;
  const int filter = index / 512 / units * 64 + row;
  const int piece = exchanged(row, at), r = 2 * unit + piece / 4;
  for (int i = 0; i < 8; ++i) {
    const int s = piece % 4 * 2 + i / kPlanes, c = i % kPlanes;
    const bool some = filter < shape.k && r < shape.r && s < shape.s && c < shape.c;
    const int from = ((filter * shape.c + c) * shape.r + r) * shape.s + s;
    packed[std::int64_t{8} * index + i] = narrowed<T>(some ? weight[from] : 0.0f);
  }
}

template <typename T, int Stride, int Rows>
void launch_planar(Planar p, Stream stream) {
  const auto kernel = conv2d_nhwc_wgmma_planar_kernel<T, Stride, Rows>;
  const int bytes = shared_bytes(p.shape, Rows);
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  p.tiles_a_row = (p.out_w + kPlaces - 1) / kPlaces;
  p.tiles_a_column = (p.out_h + Rows - 1) / Rows;
  const dim3 grid(p.shape.n * p.tiles_a_column * p.tiles_a_row, (p.shape.k + 63) / 64);
  launch("conv2d_nhwc_wgmma_planar_kernel", kernel, grid, dim3(128 * Rows), bytes, stream, 1, p);
}

template <typename T>
void launch_planar(const Planar& p, int multiprocessors, Stream stream) {
  const std::int64_t rows = std::int64_t{p.shape.n} * p.out_h;
  if (rows > 2 * multiprocessors) {
    if (p.shape.stride_w == 2) return launch_planar<T, 2, 2>(p, stream);
    return launch_planar<T, 1, 2>(p, stream);
  }
  if (p.shape.stride_w == 2) return launch_planar<T, 2, 1>(p, stream);
  launch_planar<T, 1, 1>(p, stream);
}

void check_planar(const Conv2dShape& shape) {
  if (const char* expected = why_not_planar(shape)) {
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma_planar: expected ") + expected);
  }
}

// Calls body(a null pointer to the type that is multiplied).
template <typename Body>
void with_type(Conv2dOperands operands, const Body& body) {
  if (operands == Conv2dOperands::float16) return body(static_cast<__half*>(nullptr));
  if (operands == Conv2dOperands::bfloat16) return body(static_cast<__nv_bfloat16*>(nullptr));
  throw std::invalid_argument(
      std::string("conv2d_nhwc_wgmma_planar: expected operands of 16 bits, found ") +
      name_of(operands));
}

}  // namespace
}  // namespace wgmma

std::int64_t conv2d_nhwc_wgmma_planar_takes(const Conv2dShape& shape, Conv2dOperands operands,
                                            int device) {
  return wgmma::runs_on(device) && wgmma::has_16_bits(operands) &&
         wgmma::why_not_planar(shape) == nullptr;
}

std::int64_t conv2d_nhwc_wgmma_planar_packed(const Conv2dShape& shape, Conv2dOperands, int) {
  wgmma::check_planar(shape);
  return std::int64_t{wgmma::kUnitBytes} * wgmma::units_of(shape) * ((shape.k + 63) / 64);
}

void conv2d_nhwc_wgmma_planar_pack(const float* weight, void* packed, const Conv2dShape& shape,
                                   Conv2dOperands operands, Stream stream) {
  const int pieces = static_cast<int>(conv2d_nhwc_wgmma_planar_packed(shape, operands, 0) / 16);
  wgmma::with_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    wgmma::conv2d_nhwc_wgmma_planar_pack_kernel<<<blocks_for(pieces), kBlockThreads, 0, stream>>>(
        weight, static_cast<T*>(packed), shape, wgmma::units_of(shape), pieces);
  });
  CUDA_CHECK_LAUNCH("conv2d_nhwc_wgmma_planar_pack_kernel");
  // conv2d_nhwc_wgmma_planar reads them before it waits for the kernels before it.
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void conv2d_nhwc_wgmma_planar(const float* input, const void* packed, const float* bias,
                              void* output, const Conv2dShape& shape, int y_pitch, Stored stored,
                              const Overflow& overflow, Conv2dOperands operands,
                              UnaryFunction activation, float alpha, float beta, Stream stream) {
  wgmma::check_planar(shape);
  check_stored("y", stored, operands);
  if (!is_aligned(packed, 16)) {
    throw std::invalid_argument("packed weights: expected an address that is a multiple of 16");
  }
  if (shape.n == 0) return;
  int device = 0, multiprocessors = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const std::int64_t places = std::int64_t{shape.out_h()} * shape.out_w();
  for_each_part_of_batch(shape.n, places, [&](std::int64_t first, int images) {
    wgmma::Planar p = {};
    p.x = input + first * shape.c * shape.h * shape.w;
    p.packed = static_cast<const char*>(packed);
    p.bias = bias;
    p.y = element(output, stored, first * places * y_pitch);
    p.shape = shape;
    p.shape.n = images;
    p.y_pitch = y_pitch;
    p.out_h = shape.out_h();
    p.out_w = shape.out_w();
    p.y_is_rounded = stored != Stored::float32;
    p.in_pieces = is_aligned(p.y, 16) && y_pitch * bytes_of(stored) % 16 == 0;
    p.activation = activation;
    p.alpha = alpha;
    p.beta = beta;
    p.overflow = overflow;
    wgmma::with_type(operands, [&](auto* type) {
      wgmma::launch_planar<std::remove_pointer_t<decltype(type)>>(p, multiprocessors, stream);
    });
  });
}

}  // namespace cnn_engine::cuda
