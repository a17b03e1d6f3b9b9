// bottleneck: what it takes, how images are parted into tiles, and its launch.
#include <algorithm>
#include <string>

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/halves.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_bottleneck.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"
#include "ops/bottleneck.h"

namespace cnn_engine::cuda {
namespace bottlenecks {
namespace {

int shares_of(const Conv2dShape& shape, int outputs, int reduced) {
  const int most = std::max({shape.c, shape.k, (outputs + kExpansion - 1) / kExpansion, reduced});
  return most <= kFilters ? 1 : most <= 2 * kFilters ? 2 : 4;
}

const char* why_not(const Conv2dShape& shape, int outputs, int reduced) {
  if (shape.groups != 1) return "one group";
  if (shape.c % 8 != 0 || outputs % 8 != 0 || reduced % 8 != 0)
    return "channels and outputs in eights";
  const bool beside =
      shape.pad_top == 1 && shape.pad_left == 1 && shape.pad_bottom == 1 && shape.pad_right == 1;
  if (shape.r != 3 || shape.s != 3 || !beside ||
      shape.stride_h * shape.stride_w * shape.dilation_h * shape.dilation_w != 1) {
    return "a kernel of 3x3, one place apart and one beside the image";
  }
  const int shares = shares_of(shape, outputs, reduced), most = shares * kFilters;
  // 16 blocks that send each other sums of all filters lose to two kernels.
  if (reduced > 0 && shares == 4) return "at most 128 channels and filters before the next 1x1";
  if (shape.c > most || shape.k > most || outputs > most * kExpansion || reduced > most) {
    return "at most 256 channels and filters, and 1024 outputs";
  }
  return nullptr;
}

void check(const Conv2dShape& shape, int outputs, int reduced) {
  if (const char* expected = why_not(shape, outputs, reduced)) {
    throw std::invalid_argument(std::string("bottleneck: expected ") + expected);
  }
}

// Bytes of the packed weights of 3x3, then of each of the others.
std::int64_t first_bytes(int shares) {
  return std::int64_t{kKernelOffsets} * shares * shares * kUnitBytes;
}
std::int64_t next_bytes(int shares) {
  return std::int64_t{kExpansion} * shares * shares * kUnitBytes;
}

// Calls body(kernel, bytes of shared memory) with the kernel made ready.
template <typename T, bool Reduces, typename Body>
void with_kernel(int shares, const Body& body) {
  const auto ready = [&](auto kernel, int bytes) {
    make_ready(kernel, bytes);
    allow_large_clusters(kernel);
    body(kernel, bytes);
  };
  if (shares == 1) return ready(bottleneck_kernel<T, 1, Reduces>, Block<1, Reduces>::kBytes);
  if (shares == 2) return ready(bottleneck_kernel<T, 2, Reduces>, Block<2, Reduces>::kBytes);
  if constexpr (!Reduces) ready(bottleneck_kernel<T, 4, false>, Block<4, false>::kBytes);
}
template <typename T, typename Body>
void with_kernel(int shares, int reduced, const Body& body) {
  if (reduced > 0) return with_kernel<T, true>(shares, body);
  with_kernel<T, false>(shares, body);
}

// Clusters that a device has room for at once: most shared memory is one block's.
int clusters_of(int shares, const Target& target) {
  return target.clusters_at_once(shares * shares, 1, Block<4, false>::kBytes);
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

}  // namespace
}  // namespace bottlenecks

std::int64_t bottleneck_takes(const BottleneckShape& block, const Target& target) {
  const Conv2dShape& shape = block.first;
  const int outputs = block.outputs, reduced = block.reduced;
  if (bottlenecks::why_not(shape, outputs, reduced) != nullptr) return 0;
  const std::int64_t clusters = std::int64_t{shape.n} * bottlenecks::parted(shape).tiles;
  const int shares = bottlenecks::shares_of(shape, outputs, reduced);
  // Zeros take as long.
  const int least = std::min(
      {shape.c, shape.k, outputs / bottlenecks::kExpansion, reduced > 0 ? reduced : shape.k});
  if (least <= shares * wgmma::kFilters / 2) return 0;
  return clusters <= bottlenecks::clusters_of(shares, target);
}

std::int64_t bottleneck_packed(const BottleneckShape& block, ElementType, int) {
  const Conv2dShape& shape = block.first;
  const int outputs = block.outputs, reduced = block.reduced;
  bottlenecks::check(shape, outputs, reduced);
  const int shares = bottlenecks::shares_of(shape, outputs, reduced);
  return bottlenecks::first_bytes(shares) + (reduced > 0 ? 2 : 1) * bottlenecks::next_bytes(shares);
}

void bottleneck_pack(const float* first, const float* second, const float* third, void* packed,
                     const BottleneckShape& block, ElementType compute_type, Stream stream) {
  const Conv2dShape& shape = block.first;
  const int outputs = block.outputs, reduced = block.reduced;
  const std::int64_t bytes = bottleneck_packed(block, compute_type, 0);
  const int shares = bottlenecks::shares_of(shape, outputs, reduced);
  with_halves("bottleneck", compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    char *const to = static_cast<char*>(packed), *const next =
                                                     to + bottlenecks::first_bytes(shares);
    // Blocks have zeros for filters and outputs beyond the last.
    CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, stream));
    wgmma::launch_pack<T>(first, to, shape, shares, stream);
    wgmma::launch_pack<T>(second, next, wgmma::gemm_over(shape.k, outputs), shares, stream);
    if (reduced > 0) {
      wgmma::launch_pack<T>(third, next + bottlenecks::next_bytes(shares),
                            wgmma::gemm_over(outputs, reduced), bottlenecks::kExpansion * shares,
                            stream);
    }
  });
  // The kernel reads them before it waits for the kernels before it.
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void bottleneck(const void* x, const void* packed, void* y, void* next,
                const BottleneckShape& block, ElementType compute_type,
                const std::array<Epilogue, 3>& epilogues, Stream stream) {
  const Conv2dShape& shape = block.first;
  const int outputs = block.outputs, reduced = block.reduced;
  const auto& [first, second, third] = epilogues;
  const void* const residual = second.residual.data;
  bottlenecks::check(shape, outputs, reduced);
  for (const void* address :
       {x, packed, residual, const_cast<const void*>(y), const_cast<const void*>(next)}) {
    if (!is_aligned(address, 16)) {
      throw std::invalid_argument("bottleneck: expected addresses that are multiples of 16");
    }
  }
  const int shares = bottlenecks::shares_of(shape, outputs, reduced);
  const bottlenecks::Bottleneck tiled = bottlenecks::parted(shape);
  constexpr char kExpected[] = "bottleneck: expected relu or clip";
  const wgmma::Clamp first_clamp = wgmma::clamp_of(first.activation, kExpected),
                     second_clamp = wgmma::clamp_of(second.activation, kExpected),
                     third_clamp = wgmma::clamp_of(third.activation, kExpected);
  with_halves("bottleneck", compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const std::int64_t positions = std::int64_t{shape.h} * shape.w;
    for_each_part_of_batch(shape.n, positions, [&](std::int64_t before, int images) {
      bottlenecks::Bottleneck p = tiled;
      p.first = static_cast<const char*>(packed);
      p.second = p.first + bottlenecks::first_bytes(shares);
      p.third = p.second + bottlenecks::next_bytes(shares);
      p.first_bias = epilogues[0].bias;
      p.second_bias = epilogues[1].bias;
      p.third_bias = epilogues[2].bias;
      p.y = static_cast<T*>(y) + before * positions * outputs;
      p.e = static_cast<T*>(next) + before * positions * reduced;
      p.adds = residual != nullptr;
      p.filters = shape.k;
      p.outputs = outputs;
      p.reduced = reduced;
      p.inner = first_clamp;
      p.outer = second_clamp;
      p.next = third_clamp;
      p.overflow = epilogues[2].overflow;
      Conv2dShape in = shape, out = shape;
      in.n = out.n = images;
      out.c = outputs;
      const T* const added =
          p.adds ? static_cast<const T*>(residual) + before * positions * outputs : nullptr;
      const CUtensorMap rows =
          wgmma::map_of_boxes<T>(static_cast<const T*>(x) + before * positions * shape.c, in,
                                 shape.c, p.lines + 2, p.columns + 2);
      const CUtensorMap residuals =
          p.adds ? wgmma::map_of_boxes<T>(added, out, outputs, p.lines, p.added_columns)
                 : CUtensorMap{};
      const dim3 grid(static_cast<unsigned>(images * p.tiles), 1, shares * shares);
      bottlenecks::with_kernel<T>(shares, reduced, [&](auto kernel, int bytes) {
        launch("bottleneck_kernel", kernel, grid, dim3(bottlenecks::kThreads), bytes, stream,
               shares * shares, rows, residuals, p);
      });
    });
  });
}

}  // namespace cnn_engine::cuda
