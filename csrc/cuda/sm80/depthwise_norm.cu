// depthwise_norm on CUDA: boxes of positions as conv2d_nhwc_depthwise_box.cuh makes them, by
// clusters whose blocks have the same positions and parts of the channels. Of each position they
// tell each other the mean of 32 channels and the sum of the squares about it: what was a kernel,
// that read all outputs again, is one exchange.
#include "cuda/sm80/cluster.cuh"
#include "cuda/sm80/conv2d_nhwc_depthwise_tma.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"
#include "ops/depthwise_norm.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kSide = 7, kOfPart = 32;  // channels that have a mean of their own
constexpr int kMostBlocks = 16;         // of a cluster

// Blocks up to which each has a multiprocessor of its own, and those of 7 rows up to which boxes
// have no more.
constexpr std::int64_t kFewBlocks = 105, kFewShortBlocks = 64;
// Outputs up to which it is sooner than boxes, or tiles on tensor cores, and normalize_rows: in
// passes of ConvNeXt-T.
constexpr std::int64_t most_outputs(ElementType storage, int images) {
  if (storage != ElementType::float32) return 800'000;
  return images <= 2 ? 620'000 : 200'000;
}

template <typename T>
struct DepthwiseNorm {
  const T* packed;
  const float *bias, *scale, *shift;
  T* output;
  Overflow overflow;
  Divisor by_columns, by_rows;  // boxes of an image
  int out_h, out_w;
  float of_part, of_channel, epsilon;  // 1 / parts, 1 / channels
};

// A block's boxes: of one part of the channels or of two.
template <typename T, int Rows, int Parts>
struct NormBox : DepthwiseBox<kSide, 1, Rows> {
  using Base = DepthwiseBox<kSide, 1, Rows>;
  using Line = T[Base::kReadColumns][kOfPart];
  static constexpr int kAllThreads = Base::kThreads * Parts;
  static constexpr int kPositions = Base::kRows * kBoxSide, kWarpPositions = Rows * kBoxSide;
  static constexpr int kBoxBytes = Base::kReadRows * sizeof(Line);
  static constexpr int kBoxPitch = (kBoxBytes + 127) / 128 * 128;
  // Numbers that lanes add up at once, and lanes that then have the same sum.
  static constexpr int kSums = Rows == 1 ? 8 : 16, kSame = 32 / kSums;
  static constexpr int kBarriers = Parts * kBoxPitch, kFullBarrier = kBarriers + 16;
  static constexpr int bytes(int parts) { return kFullBarrier + parts * kPositions * 8; }
  static_assert(kWarpPositions <= kSums);
};

// The sum over a warp of number lane / (32 / n) of each lane's n, in the same order for all.
template <int n, int apart = 16>
__device__ inline float sum_of_lanes(const float (&value)[n]) {
  if constexpr (apart == 0) {
    return value[0];
  } else {
    constexpr int kLeft = n > 1 ? n / 2 : 1;
    const bool upper = n > 1 && (threadIdx.x & apart);
    float left[kLeft];
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const float low = value[i], high = value[n - kLeft + i];
      left[i] = (upper ? high : low) + __shfl_xor_sync(kFullMask, upper ? low : high, apart);
    }
    return sum_of_lanes<kLeft, apart / 2>(left);
  }
}

template <typename T, int Rows, int Parts>
__global__ void __launch_bounds__(NormBox<T, Rows, Parts>::kAllThreads)
    depthwise_norm_kernel(const __grid_constant__ CUtensorMap images,
                          const __grid_constant__ DepthwiseNorm<T> d,
                          const __grid_constant__ Conv2dShape p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // never launched elsewhere
  using At = NormBox<T, Rows, Parts>;
  extern __shared__ __align__(128) char memory[];
  const std::uint32_t shared = shared_address(memory), here = shared + At::kBarriers,
                      full_barrier = here + 8;
  let_successors_start();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int rank = static_cast<int>(cluster_rank()), blocks = gridDim.z, parts = blocks * Parts;
  if (thread == 0) {
    prefetch_tensor_map(&images);
    init_mbarrier(here, 1);
    init_mbarrier(full_barrier, 1);
    expect_tx(full_barrier, parts * At::kPositions * 8);
    fence_mbarrier_init();
  }
  __syncwarp();
  arrive_at_cluster_barrier_relaxed();
  const int own_part = warp / kBoxSide, part = rank * Parts + own_part;
  const int own_row = warp % kBoxSide * Rows, c = part * kOfPart + lane;
  const unsigned line = d.by_columns.quotient(blockIdx.x), image = d.by_rows.quotient(line);
  const int first_column = static_cast<int>(blockIdx.x - line * d.by_columns.value) * At::kColumns;
  const int first_row = static_cast<int>(line - image * d.by_rows.value) * At::kRows;
  float weight[kSide * kSide];
#pragma unroll
  for (int t = 0; t < kSide * kSide; ++t) weight[t] = widened(d.packed[t * p.c + c]);
  const float bias = d.bias != nullptr ? d.bias[c] : 0.0f;
  const float scale = d.scale[c], shift = d.shift != nullptr ? d.shift[c] : 0.0f;
  __syncthreads();
  wait_for_inputs();
  if (thread == 0) {
    expect_tx(here, Parts * At::kBoxBytes);
#pragma unroll
    for (int i = 0; i < Parts; ++i) {
      tma_load_box(shared + i * At::kBoxPitch, &images, (rank * Parts + i) * kOfPart,
                   first_column - p.pad_left, first_row - p.pad_top, static_cast<int>(image), here);
    }
  }
  wait_mbarrier(here, 0);

  float sum[Rows][At::kColumns];
  const auto* const box =
      reinterpret_cast<const typename At::Line*>(memory + own_part * At::kBoxPitch);
  sum_windows<kSide, 1>(box, own_row, lane, weight, sum);

  // Lane l has the means and squares of the warp's position l / kSame.
  float value[At::kSums] = {};
#pragma unroll
  for (int i = 0; i < At::kWarpPositions; ++i) {
    value[i] = sum[i / kBoxSide][i % kBoxSide] + bias;
  }
  const float own_mean = sum_of_lanes(value) * (1.0f / kOfPart);
  float squares[At::kSums] = {};
#pragma unroll
  for (int i = 0; i < At::kWarpPositions; ++i) {
    const float apart = value[i] - __shfl_sync(kFullMask, own_mean, i * At::kSame);
    squares[i] = apart * apart;
  }
  const float own_squares = sum_of_lanes(squares);
  const int own = min(lane / At::kSame, At::kWarpPositions - 1);
  const int position = own_row * kBoxSide + own, turn = lane % At::kSame;
  wait_at_cluster_barrier();  // others have made their barriers
  if (lane / At::kSame < At::kWarpPositions) {
    const std::uint32_t slot = shared + At::kFullBarrier + (part * At::kPositions + position) * 8;
    for (int i = turn; i < blocks; i += At::kSame) {
      const int to = i + rank < blocks ? i + rank : i + rank - blocks;
      store_cluster_async(cluster_address(slot, to), cluster_address(full_barrier, to), own_mean,
                          own_squares);
    }
  }
  wait_mbarrier_cluster(full_barrier, 0);

  const float2* const of_parts =
      reinterpret_cast<const float2*>(memory + At::kFullBarrier) + position;
  const auto of_same = [](float value) {
    return sum_of_lanes<1, At::kSame / 2>({value});
  };
  float mean = 0.0f, all_squares = 0.0f;
  for (int i = turn; i < parts; i += At::kSame) mean += of_parts[i * At::kPositions].x;
  mean = of_same(mean) * d.of_part;
  for (int i = turn; i < parts; i += At::kSame) {
    const float2 one = of_parts[i * At::kPositions];
    const float apart = one.x - mean;
    all_squares += fmaf(kOfPart * apart, apart, one.y);
  }
  const float factor = __frsqrt_rn(fmaf(of_same(all_squares), d.of_channel, d.epsilon));

#pragma unroll
  for (int i = 0; i < At::kWarpPositions; ++i) {
    const float less = __shfl_sync(kFullMask, mean, i * At::kSame),
                times = __shfl_sync(kFullMask, factor, i * At::kSame);
    const int row = first_row + own_row + i / kBoxSide, column = first_column + i % kBoxSide;
    if (row >= d.out_h || column >= d.out_w) continue;
    const std::int64_t at = (static_cast<std::int64_t>(image) * d.out_h + row) * d.out_w + column;
    const float made[1] = {fmaf((value[i] - less) * times, scale, shift)};
    store_neighbours(d.output + at * p.c + c, made, d.overflow);
  }
#endif
}

// Parts of a block, or 0 where no cluster can have all channels.
int parts_of_block(int channels) {
  const int parts = channels / kOfPart;
  if (channels % kOfPart != 0 || parts < 2 || parts > 2 * kMostBlocks) return 0;
  return parts <= kMostBlocks ? 1 : parts % 2 == 0 ? 2 : 0;
}

bool is_made(const Conv2dShape& p) {
  return p.r == kSide && p.s == kSide && p.stride_h * p.stride_w == 1 &&
         p.dilation_h * p.dilation_w == 1 && p.groups == p.c && p.k == p.c &&
         parts_of_block(p.c) > 0;
}

template <typename T, int Rows, int Parts>
void launch_norms(const T* input, DepthwiseNorm<T> d, const Conv2dShape& p, Stream stream) {
  using At = NormBox<T, Rows, Parts>;
  const int columns = wgmma::divided(p.out_w(), At::kColumns);
  const int rows = wgmma::divided(p.out_h(), At::kRows);
  d.by_columns = Divisor(columns);
  d.by_rows = Divisor(rows);
  const int parts = p.c / kOfPart, blocks = parts / Parts;
  const auto kernel = depthwise_norm_kernel<T, Rows, Parts>;
  const std::int64_t boxes = std::int64_t{p.n} * rows * columns;
  const int own = At::bytes(parts);
  int bytes = boxes * blocks > kFewBlocks ? own : spread_bytes(own, boxes * blocks, target_here());
  make_ready(kernel, bytes);
  allow_large_clusters(kernel);
  // Some GPUs have no 16 multiprocessors side by side for a cluster's blocks.
  if (bytes > own && clusters_at_once(kernel, blocks, At::kAllThreads, bytes) == 0) bytes = own;
  launch("launch of depthwise_norm_kernel", kernel, dim3(static_cast<unsigned>(boxes), 1, blocks),
         At::kAllThreads, bytes, stream, blocks,
         wgmma::map_of_boxes<T, kOfPart>(input, p, p.c, At::kReadRows, At::kReadColumns,
                                         CU_TENSOR_MAP_SWIZZLE_NONE),
         d, p);
}

}  // namespace

std::int64_t depthwise_norm_takes(const Conv2dShape& shape, ElementType storage, const Target&) {
  const std::int64_t outputs = std::int64_t{shape.n} * shape.out_h() * shape.out_w() * shape.c;
  return is_made(shape) && outputs <= most_outputs(storage, shape.n);
}

void depthwise_norm(const ConstValues& input, const void* packed, const Values& output,
                    const Conv2dShape& shape, const ChannelNorm& norm, const Epilogue& epilogue,
                    Stream stream) {
  if (input.storage != output.storage) {
    throw std::invalid_argument("depthwise_norm: expected images of one storage type");
  }
  if (!is_made(shape) || !waits_in_kernels() || !is_aligned(input.data, 16)) {
    throw std::invalid_argument(
        "depthwise_norm: expected a GPU of compute capability 9.0, one filter a channel of 7x7, "
        "strides of 1, 64 to 1,024 channels in 32s, and images at a multiple of 16");
  }
  const std::int64_t image_in = std::int64_t{shape.h} * shape.w * shape.c;
  const std::int64_t image_out = std::int64_t{shape.out_h()} * shape.out_w() * shape.c;
  with_element_type(output.storage, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_each_part_of_batch(shape.n, image_out, [&](std::int64_t first, int images) {
      Conv2dShape p = shape;
      p.n = images;
      DepthwiseNorm<T> d = {};
      d.packed = static_cast<const T*>(packed);
      d.bias = epilogue.bias;
      d.scale = norm.scale;
      d.shift = norm.shift;
      d.output = static_cast<T*>(output.data) + first * image_out;
      d.overflow = epilogue.overflow;
      d.epsilon = norm.epsilon;
      d.out_h = p.out_h();
      d.out_w = p.out_w();
      d.of_part = static_cast<float>(kOfPart) / p.c;
      d.of_channel = 1.0f / p.c;
      const T* const from = static_cast<const T*>(input.data) + first * image_in;
      if (parts_of_block(p.c) == 2) return launch_norms<T, 1, 2>(from, d, p, stream);
      const std::int64_t boxes = std::int64_t{p.n} * wgmma::divided(p.out_h(), kBoxSide) *
                                 wgmma::divided(p.out_w(), kBoxSide);
      const bool tall = p.out_h() > kBoxSide && boxes * (p.c / kOfPart) > kFewShortBlocks;
      if (tall) return launch_norms<T, 2, 1>(from, d, p, stream);
      launch_norms<T, 1, 1>(from, d, p, stream);
    });
  });
}

}  // namespace cnn_engine::cuda
