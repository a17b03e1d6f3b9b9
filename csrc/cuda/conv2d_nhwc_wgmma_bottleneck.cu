// bottleneck: a convolution of 3x3 and the one of 1x1 behind it as one kernel over clusters.
//
// A cluster makes a tile of the image: rows that are narrow, or a part of a wide one, whose places
// and the two columns between a row and the next are the columns of a product. It has blocks for
// each 64 filters and, of each of these, one for each 64 channels. Such a block multiplies nine
// taps of 64 x 64 weights by the rows of the image that its tile reaches, which are copied once: a
// tap's matrix is the same memory from another place on (conv2d_nhwc_wgmma_rows.cuh). The blocks of
// the same filters send each other parts of their sums, each adds up some eights of the places in a
// fixed order and sends the result, rounded, to all blocks of the cluster. Then each makes a part
// of the outputs of the 1x1 convolution from all of it. Weights of both are asked for before the
// wait for the kernel before.
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <string>

#include "cuda/conv2d_nhwc_wgmma_end.cuh"
#include "cuda/conv2d_nhwc_wgmma_map.h"
#include "cuda/conv2d_nhwc_wgmma_product.h"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/strided.cuh"
#include "cuda/wgmma.cuh"
#include "ops/bottleneck.h"

namespace cnn_engine::cuda {
namespace bottlenecks {
namespace {

using namespace wgmma;

constexpr int kMultiplying = 128;                     // threads of a block that multiply
constexpr int kThreads = kMultiplying + 32;           // and those that ask for copies
constexpr int kColumns = 32, kEights = kColumns / 8;  // of a product
constexpr int kTaps = 9, kUnitBytes = kFilters * kRowBytes;
constexpr int kPlacesBytes = kColumns * kRowBytes;  // of 64 channels
constexpr int kExpansion = 4;                       // outputs for a filter, at most

struct Bottleneck {
  const char *first, *second;  // packed weights
  const float *first_bias, *second_bias;
  void* y;
  bool adds;
  int filters, outputs, h, w;
  int lines, columns, parts;  // of a tile; tiles of a row
  int tiles;                  // of an image
  int added_columns;          // of the residual that are copied: rows begin as those of products
  Clamp inner, outer;
  Overflow overflow;
};

// Where things lie in the shared memory of one of Shares x Shares blocks: the first weights, in
// whose place sums and results are kept later, the second ones, the image, what is between the
// convolutions, the residual, what others send, barriers.
template <int Shares>
struct Block {
  static constexpr int kUnits = kExpansion / Shares;  // 64 outputs each
  static constexpr int kOwn = kEights / Shares;       // eights of places that it adds up
  static constexpr int kOwnBytes = kOwn * kMultiplying * 16;
  static constexpr int kMadePitch = kUnits * kRowBytes + 16;
  static constexpr int kSecond = kTaps * kUnitBytes;
  static constexpr int kImage = kSecond + kExpansion * kUnitBytes;
  // The three rows that one row of places reaches are most, and what products read past them.
  static constexpr int kBetween = kImage + (3 * (kColumns + 2) * kRowBytes + 1023) / 1024 * 1024;
  static constexpr int kResidual = kBetween + Shares * kPlacesBytes;
  static constexpr int kReceived = kResidual + kUnits * kPlacesBytes;
  static constexpr int kBarriers = kReceived + (Shares - 1) * kOwnBytes;
  static constexpr int kBytes = kBarriers + 8 * 8;
  static_assert(kColumns * kMadePitch <= kSecond && kOwnBytes <= kSecond);
};

template <typename T, int Shares>
__global__ void __launch_bounds__(kThreads)
    bottleneck_kernel(const __grid_constant__ CUtensorMap images,
                      const __grid_constant__ CUtensorMap residuals,
                      const __grid_constant__ Bottleneck p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using At = Block<Shares>;
  constexpr int kCluster = Shares * Shares, kPieces = 8;  // of 16 bytes, of 64 channels
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t shared = shared_address(memory);
  const std::uint32_t image_at = shared + At::kImage, between = shared + At::kBetween;
  const std::uint32_t first_is_here = shared + At::kBarriers,  // three rows of taps
      second_is_here = first_is_here + 24, image_is_here = second_is_here + 8,
                      residual_is_here = image_is_here + 8, sums_are_here = residual_is_here + 8,
                      between_is_here = sums_are_here + 8;

  let_successors_start();
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32);
  const int rank = Shares > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int share = rank % Shares, group = rank / Shares;  // of channels, of filters
  const int first_output = rank * At::kUnits * kFilters;
  const int image = static_cast<int>(blockIdx.x) / p.tiles;
  const int tile = static_cast<int>(blockIdx.x) - image * p.tiles, down = tile / p.parts;
  const int h = down * p.lines, w = (tile - down * p.parts) * p.columns, pitch = p.columns + 2;

  if (thread == kMultiplying) {
    prefetch_map(&images);
    if (p.adds) prefetch_map(&residuals);
    for (int i = 0; i < 8; ++i) init_phases(first_is_here + 8 * i, 1);
    if (Shares > 1) {
      expect_bytes(sums_are_here, (Shares - 1) * At::kOwnBytes);
      expect_bytes(between_is_here, (kCluster - 1) * At::kOwn * 8 * kRowBytes);
    }
    publish_barriers();
  }
  __syncwarp();
  if (Shares > 1) arrive_at_cluster_barrier_relaxed();
  __syncthreads();

  if (warp == kMultiplying / 32) {  // asks for copies
    const bool leads = leads_warp();
    if (leads) {
      const char* from = p.first + (group * kTaps * Shares + share) * kUnitBytes;
#pragma unroll 1
      for (int tap = 0; tap < kTaps; ++tap, from += Shares * kUnitBytes) {
        const std::uint32_t barrier = first_is_here + tap / 3 * 8;
        if (tap % 3 == 0) expect_bytes(barrier, 3 * kUnitBytes);
        copy_bulk(shared + tap * kUnitBytes, from, kUnitBytes, barrier);
      }
      constexpr int kSecondBytes = kExpansion * kUnitBytes;
      expect_bytes(second_is_here, kSecondBytes);
      copy_bulk(shared + At::kSecond, p.second + rank * kSecondBytes, kSecondBytes, second_is_here);
    }
    if ((image | h | w) < 0) return;  // never: but so all of it is divided before the wait
    wait_for_inputs();
    if (leads) {
      expect_bytes(image_is_here, (p.lines + 2) * pitch * kRowBytes);
      copy_box(image_at, &images, share * kFilters, w - 1, h - 1, image, image_is_here);
      if (p.adds) {
        expect_bytes(residual_is_here, At::kUnits * p.lines * p.added_columns * kRowBytes);
        for (int unit = 0; unit < At::kUnits; ++unit) {
          copy_box(shared + At::kResidual + unit * kPlacesBytes, &residuals,
                   first_output + unit * kFilters, w, h, image, residual_is_here);
        }
      }
    }
    return;
  }

  // Where a column of the product is in y, or -1.
  const auto place_of = [&](int column) {
    const int line = column / pitch, across = column - line * pitch;
    const bool kept = line < p.lines && h + line < p.h && across < p.columns && w + across < p.w;
    return kept ? (image * p.h + h + line) * p.w + w + across : -1;
  };
  // Of each eight columns, those before this one are kept, as far as a thread's two of them go.
  int left[kEights], own_left[At::kOwn];
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const int two = thread % 4 * 2;
    left[j] = place_of(8 * j + two) < 0 ? 0 : place_of(8 * j + two + 1) < 0 ? two + 1 : 8;
  }
#pragma unroll
  for (int eight = 0; eight < At::kOwn; ++eight) {
#pragma unroll
    for (int i = 0; i < Shares; ++i) {
      if (i == share) own_left[eight] = left[eight * Shares + i];
    }
  }
  constexpr int kApart = kMultiplying / kPieces;
  int places[kColumns / kApart];  // of y, that a thread stores pieces of
#pragma unroll
  for (int i = 0; i < kColumns / kApart; ++i) places[i] = place_of(thread / kPieces + i * kApart);
  float first_bias[2], second_bias[At::kUnits][2];  // of the rows of D that a thread has
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp * 16 + thread % 32 / 4 + 8 * i, filter = group * kFilters + row;
    first_bias[i] = p.first_bias && filter < p.filters ? p.first_bias[filter] : 0.0f;
#pragma unroll
    for (int unit = 0; unit < At::kUnits; ++unit) {
      const int output = first_output + unit * kFilters + row;
      second_bias[unit][i] = p.second_bias && output < p.outputs ? p.second_bias[output] : 0.0f;
    }
  }
  if (Shares > 1) wait_at_cluster_barrier();  // others have made their barriers
  wait_for_inputs();                          // of what this kernel overwrites, others may read

  float sums[kColumns / 2] = {};
  wait_for_phase(image_is_here, 0);
#pragma unroll 1
  for (int r = 0; r < 3; ++r) {
    wait_for_phase(first_is_here + 8 * r, 0);
#pragma unroll
    for (int s = 0; s < 3; ++s) {
      multiply_rows<T, kColumns>(sums, matrix_at(shared + (3 * r + s) * kUnitBytes),
                                 matrix_at(image_at + (r * pitch + s) * kRowBytes));
    }
    commit_products();
  }
  wait_for_products<0>();

  bool past = false;
  // A lane's row of a pair of tiles, in eight places of 64 channels.
  const int tiles_row = row_of_tiles(thread), tiles_piece = warp * 2 + piece_of_tiles(thread);
  const std::uint32_t in_eight = tiles_row * kRowBytes + exchanged(tiles_row, tiles_piece) * 16;
  const std::uint32_t own_between = between + group * kPlacesBytes;
  constexpr int kEightBytes = 8 * kRowBytes;
  const auto end = [&](int eight, int kept, const float (&sum)[4]) {
    past |= end_in_fragments<T>(p.inner, sum, first_bias, {}, kept,
                                own_between + eight * kEightBytes + in_eight);
  };
  const auto seen_by_all = [&] {
    publish_to_engines();
    named_barrier<kMultiplying>(1);
  };
  if constexpr (Shares == 1) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      end(j, left[j], {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]});
    }
    seen_by_all();
  } else {
    add_up_in_cluster<Shares, kColumns, kMultiplying>(
        reinterpret_cast<float4*>(memory), sums, share, shared + At::kReceived, sums_are_here,
        thread, [] {},
        [&](int eight, const float (&sum)[4]) {
          int kept = own_left[0];
#pragma unroll
          for (int i = 1; i < At::kOwn; ++i) kept = i == eight ? own_left[i] : kept;
          end(eight * Shares + share, kept, sum);
        },
        group * Shares);
    seen_by_all();
    if (thread < kCluster && thread != rank) {  // sends what the block made
#pragma unroll
      for (int eight = 0; eight < At::kOwn; ++eight) {
        const std::uint32_t at = own_between + (eight * Shares + share) * kEightBytes;
        send_bulk(cluster_address(at, thread), at, kEightBytes,
                  cluster_address(between_is_here, thread));
      }
    }
    wait_for_cluster_phase(between_is_here, 0);
    __syncwarp();
    arrive_at_cluster_barrier_relaxed();  // those that sent it may end
  }

  float results[At::kUnits][kColumns / 2] = {};
  wait_for_phase(second_is_here, 0);
#pragma unroll
  for (int unit = 0; unit < At::kUnits; ++unit) {
#pragma unroll
    for (int chunk = 0; chunk < Shares; ++chunk) {
      multiply_rows<T, kColumns>(
          results[unit], matrix_at(shared + At::kSecond + (unit * Shares + chunk) * kUnitBytes),
          matrix_at(between + chunk * kPlacesBytes));
    }
    commit_products();
  }
  if (p.adds) wait_for_phase(residual_is_here, 0);
  wait_for_products<0>();
#pragma unroll
  for (int unit = 0; unit < At::kUnits; ++unit) {
    const float (&of)[kColumns / 2] = results[unit];
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      std::uint32_t tiles[2] = {};
      if (p.adds) {
        load_two_tiles(tiles,
                       shared + At::kResidual + unit * kPlacesBytes + j * kEightBytes + in_eight);
      }
      past |= end_in_fragments<T>(
          p.outer, {of[4 * j], of[4 * j + 1], of[4 * j + 2], of[4 * j + 3]}, second_bias[unit],
          tiles, left[j],
          shared + (8 * j + tiles_row) * At::kMadePitch + unit * kRowBytes + tiles_piece * 16);
    }
  }
  if (past) tell(p.overflow);
  named_barrier<kMultiplying>(1);
#pragma unroll
  for (int unit = 0; unit < At::kUnits; ++unit) {
    const int output = first_output + unit * kFilters + thread % kPieces * 8;
    if (output >= p.outputs) continue;
#pragma unroll
    for (int i = 0; i < kColumns / kApart; ++i) {
      if (places[i] < 0) continue;
      *reinterpret_cast<float4*>(static_cast<T*>(p.y) +
                                 static_cast<std::int64_t>(places[i]) * p.outputs + output) =
          load_float4(shared + (thread / kPieces + i * kApart) * At::kMadePitch + unit * kRowBytes +
                      thread % kPieces * 16);
    }
  }
  if (Shares > 1) {
    __syncwarp();
    wait_at_cluster_barrier();  // all that this block sent has been read
  }
#endif
}

// ---- shapes ----

int shares_of(const Conv2dShape& shape, int outputs) {
  const int most = std::max({shape.c, shape.k, (outputs + kExpansion - 1) / kExpansion});
  return most <= kFilters ? 1 : most <= 2 * kFilters ? 2 : 4;
}

const char* why_not(const Conv2dShape& shape, int outputs) {
  if (shape.groups != 1) return "one group";
  if (shape.c % 8 != 0 || outputs % 8 != 0) return "channels and outputs in eights";
  const bool beside =
      shape.pad_top == 1 && shape.pad_left == 1 && shape.pad_bottom == 1 && shape.pad_right == 1;
  if (shape.r != 3 || shape.s != 3 || !beside ||
      shape.stride_h * shape.stride_w * shape.dilation_h * shape.dilation_w != 1) {
    return "a kernel of 3x3, one place apart and one beside the image";
  }
  const int shares = shares_of(shape, outputs), most = shares * kFilters;
  if (shape.c > most || shape.k > most || outputs > most * kExpansion) {
    return "at most 256 channels and filters, and 1024 outputs";
  }
  return nullptr;
}

void check(const Conv2dShape& shape, int outputs) {
  if (const char* expected = why_not(shape, outputs)) {
    throw std::invalid_argument(std::string("bottleneck: expected ") + expected);
  }
}

std::int64_t first_bytes(int shares) { return std::int64_t{kTaps} * shares * shares * kUnitBytes; }
std::int64_t second_bytes(int shares) {
  return std::int64_t{kExpansion} * shares * shares * kUnitBytes;
}

// Calls body(a null pointer to the type of 16 bits).
template <typename Body>
void with_halves(Conv2dOperands operands, const Body& body) {
  if (operands == Conv2dOperands::float16) return body(static_cast<__half*>(nullptr));
  if (operands == Conv2dOperands::bfloat16) return body(static_cast<__nv_bfloat16*>(nullptr));
  throw std::invalid_argument("bottleneck: expected float16 or bfloat16");
}

// Calls body(kernel, bytes of shared memory) with the kernel made ready.
template <typename T, typename Body>
void with_kernel(int shares, const Body& body) {
  const auto ready = [&](auto kernel, int bytes) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    body(kernel, bytes);
  };
  if (shares == 1) return ready(bottleneck_kernel<T, 1>, Block<1>::kBytes);
  if (shares == 2) return ready(bottleneck_kernel<T, 2>, Block<2>::kBytes);
  ready(bottleneck_kernel<T, 4>, Block<4>::kBytes);
}

// Clusters that a device has room for at once.
int clusters_of(int shares) {
  int clusters = 0;
  with_kernel<__half>(shares, [&](auto kernel, int bytes) {
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {1, 1, static_cast<unsigned>(shares * shares)};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1, 1, shares * shares);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = bytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  });
  return clusters;
}

// How an image is parted into tiles.
Bottleneck parted(const Conv2dShape& shape) {
  Bottleneck p = {};
  p.h = shape.h;
  p.w = shape.w;
  const int even = (shape.w + 1) / 2 * 2;  // threads have two columns side by side
  p.parts = (even + kColumns - 1) / kColumns;
  p.columns = (even / 2 + p.parts - 1) / p.parts * 2;
  p.lines = p.parts > 1 ? 1 : (kColumns + 2) / (p.columns + 2);
  p.added_columns = p.lines > 1 ? p.columns + 2 : p.columns;
  p.tiles = (shape.h + p.lines - 1) / p.lines * p.parts;
  return p;
}

Clamp clamp_of(UnaryFunction function, float alpha, float beta) {
  if (function == UnaryFunction::relu) return {0.0f, std::numeric_limits<float>::infinity()};
  if (function == UnaryFunction::clip) return {alpha, beta};
  throw std::invalid_argument("bottleneck: expected relu or clip");
}

}  // namespace
}  // namespace bottlenecks

std::int64_t bottleneck_takes(const Conv2dShape& shape, int outputs, int device) {
  if (!wgmma::runs_on(device) || bottlenecks::why_not(shape, outputs) != nullptr) return 0;
  const std::int64_t clusters = std::int64_t{shape.n} * bottlenecks::parted(shape).tiles;
  const int shares = bottlenecks::shares_of(shape, outputs), half = shares * wgmma::kFilters / 2;
  // Zeros take as long.
  if (std::min({shape.c, shape.k, outputs / bottlenecks::kExpansion}) <= half) return 0;
  return clusters <= bottlenecks::clusters_of(shares);
}

std::int64_t bottleneck_packed(const Conv2dShape& shape, int outputs, Conv2dOperands, int) {
  bottlenecks::check(shape, outputs);
  const int shares = bottlenecks::shares_of(shape, outputs);
  return bottlenecks::first_bytes(shares) + bottlenecks::second_bytes(shares);
}

void bottleneck_pack(const float* first, const float* second, void* packed,
                     const Conv2dShape& shape, int outputs, Conv2dOperands operands,
                     Stream stream) {
  bottlenecks::check(shape, outputs);
  const int shares = bottlenecks::shares_of(shape, outputs);
  bottlenecks::with_halves(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    char* const to = static_cast<char*>(packed);
    // Blocks have zeros for filters and outputs beyond the last.
    CUDA_CHECK(cudaMemsetAsync(
        to, 0, bottlenecks::first_bytes(shares) + bottlenecks::second_bytes(shares), stream));
    const Conv2dShape products{1, shape.k, 1, 1, outputs, 1, 1, 1, 1, 0, 0};
    wgmma::launch_pack<T>(first, to, shape, shares, stream);
    wgmma::launch_pack<T>(second, to + bottlenecks::first_bytes(shares), products, shares, stream);
  });
  // The kernel reads them before it waits for the kernels before it.
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void bottleneck(const void* x, const void* packed, const float* first_bias,
                const float* second_bias, const void* residual, void* y, const Conv2dShape& shape,
                int outputs, const Overflow& overflow, Conv2dOperands operands, UnaryFunction inner,
                float inner_alpha, float inner_beta, UnaryFunction outer, float outer_alpha,
                float outer_beta, Stream stream) {
  bottlenecks::check(shape, outputs);
  for (const void* address : {x, packed, residual, static_cast<const void*>(y)}) {
    if (!is_aligned(address, 16)) {
      throw std::invalid_argument("bottleneck: expected addresses that are multiples of 16");
    }
  }
  const int shares = bottlenecks::shares_of(shape, outputs);
  const bottlenecks::Bottleneck tiled = bottlenecks::parted(shape);
  const wgmma::Clamp first_clamp = bottlenecks::clamp_of(inner, inner_alpha, inner_beta),
                     second_clamp = bottlenecks::clamp_of(outer, outer_alpha, outer_beta);
  bottlenecks::with_halves(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const std::int64_t places = std::int64_t{shape.h} * shape.w;
    for_each_part_of_batch(shape.n, places, [&](std::int64_t before, int images) {
      bottlenecks::Bottleneck p = tiled;
      p.first = static_cast<const char*>(packed);
      p.second = p.first + bottlenecks::first_bytes(shares);
      p.first_bias = first_bias;
      p.second_bias = second_bias;
      p.y = static_cast<T*>(y) + before * places * outputs;
      p.adds = residual != nullptr;
      p.filters = shape.k;
      p.outputs = outputs;
      p.inner = first_clamp;
      p.outer = second_clamp;
      p.overflow = overflow;
      Conv2dShape in = shape, out = shape;
      in.n = out.n = images;
      out.c = outputs;
      const T* const added =
          p.adds ? static_cast<const T*>(residual) + before * places * outputs : nullptr;
      const CUtensorMap rows =
          wgmma::map_of_boxes<T>(static_cast<const T*>(x) + before * places * shape.c, in, shape.c,
                                 p.lines + 2, p.columns + 2);
      const CUtensorMap residuals =
          p.adds ? wgmma::map_of_boxes<T>(added, out, outputs, p.lines, p.added_columns)
                 : CUtensorMap{};
      const dim3 grid(static_cast<unsigned>(images * p.tiles), 1, shares * shares);
      bottlenecks::with_kernel<T>(shares, [&](auto kernel, int bytes) {
        launch("bottleneck_kernel", kernel, grid, dim3(bottlenecks::kThreads), bytes, stream,
               shares * shares, rows, residuals, p);
      });
    });
  });
}

}  // namespace cnn_engine::cuda
