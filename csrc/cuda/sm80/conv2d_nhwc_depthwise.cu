// conv2d_nhwc_depthwise on CUDA: no matrix multiplication, but as many bytes as sums.
//
// Large windows go to tensor cores where they are many and numbers have 16 bits
// (conv2d_nhwc_depthwise_mma.cu), and in boxes where those are float32
// (conv2d_nhwc_depthwise_box.cuh); others with many positions in strips
// (conv2d_nhwc_depthwise_strip.cuh). With few, a thread makes
// one output of `Width` neighbouring channels, and has as many loads as registers allow under way
// at once: the weights before it waits for its inputs, the window before its first product; what
// takes as long as a small batch is the way to the second-level cache and back. With Side > 0:
// square kernels without dilation and with equal strides of Stride, compiled in. Side = 0: any
// kernel, stride and dilation.
#include "cuda/sm80/conv2d_nhwc_depthwise_strip.cuh"
#include "cuda/sm80/conv2d_nhwc_depthwise_tma.cuh"
#include "cuda/sm80/conv2d_nhwc_depthwise_window.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"

namespace cnn_engine::cuda {
namespace {

// Threads that keep a multiprocessor busy: with fewer, strips do not pay.
constexpr std::int64_t kManyThreads = 256;
// Threads of four channels, of a multiprocessor, below which a thread makes two.
constexpr std::int64_t kFewThreads = 128;

// Outputs of 16 bits from which tensor cores are faster; windows of 3x3 have too few products.
constexpr std::int64_t fewest_in_tiles(int side) { return side == 7 ? 170'000 : 900'000; }

// Outputs of float32 from which boxes are faster than windows, which have more blocks, and those of
// 14 rows than those of 7 wherever they are not empty.
constexpr std::int64_t fewest_in_boxes(int side) { return side == 7 ? 0 : 300'000; }
constexpr std::int64_t kManyInBoxes = 1'000'000;

// Boxes that a multiprocessor has at least.
constexpr int kBoxesBesideEachOther = 3;

// Output pixels of an image up to which gates that read means of boxes are sooner ready: more of
// them are more parts.
constexpr std::int64_t kMostPixelsOfMeans = 28 * 28;

// What a thread makes of a strip: the fastest of those that registers hold.
template <int Side, int Stride>
struct StripShape {
  static constexpr int kColumns = Stride == 1 ? 4 : 2;
  static constexpr int kRows = Side == 7 ? 4 : 2, kWidth = Side == 7 ? 2 : 4;
};

template <typename T>
__global__ void conv2d_nhwc_depthwise_pack_kernel(const float* __restrict__ weight,  // [C, R, S]
                                                  T* __restrict__ packed,            // [R, S, C]
                                                  int channels, int kernel_offsets) {
  const std::int64_t index = grid_thread();
  if (index >= static_cast<std::int64_t>(channels) * kernel_offsets) return;
  const std::int64_t kernel_offset = index / channels;
  packed[index] =
      narrowed<T>(weight[(index - kernel_offset * channels) * kernel_offsets + kernel_offset]);
}

// Sets how threads are laid over groups of channels, runs of columns and strips of rows; returns
// their blocks.
template <typename T>
unsigned lay_out(Depthwise<T>& d, const Conv2dShape& p, int width, int columns, int rows) {
  const int runs = (p.out_w() + columns - 1) / columns, strips = (p.out_h() + rows - 1) / rows;
  d.by_groups = Divisor(p.c / width);
  d.by_runs = Divisor(runs);
  d.by_rows = Divisor(strips);
  const std::int64_t threads = std::int64_t{p.n} * strips * runs * (p.c / width);
  return static_cast<unsigned>((threads + kDepthwiseThreads - 1) / kDepthwiseThreads);
}

template <int Side, int Stride, int Width, typename T>
void launch_windows(Depthwise<T> d, const Conv2dShape& p, Stream stream) {
  const unsigned blocks = lay_out(d, p, Width, 1, 1);
  // Several images have more blocks than find room with so many registers.
  constexpr bool kCanPrefetch = Side == 3 || Side == 5;
  const auto kernel = kCanPrefetch && p.n == 1 && waits_in_kernels()
                          ? conv2d_nhwc_depthwise_kernel<T, Side, Stride, Width, kCanPrefetch>
                          : conv2d_nhwc_depthwise_kernel<T, Side, Stride, Width, false>;
  launch("launch of conv2d_nhwc_depthwise_kernel", kernel, blocks, kDepthwiseThreads, 0, stream, 1,
         d, p);
}

template <int Side, int Stride, typename T>
void launch_strips(Depthwise<T> d, const Conv2dShape& p, Stream stream) {
  using Strip = StripShape<Side, Stride>;
  const unsigned blocks = lay_out(d, p, Strip::kWidth, Strip::kColumns, Strip::kRows);
  launch("launch of conv2d_nhwc_depthwise_strip_kernel",
         conv2d_nhwc_depthwise_strip_kernel<T, Side, Stride, Strip::kColumns, Strip::kRows,
                                            Strip::kWidth>,
         blocks, kDepthwiseThreads, 0, stream, 1, d, p);
}

// Whether the copy engine can read it.
bool takes_boxes(const Depthwise<float>& d) {
  return waits_in_kernels() && d.pitches.x % 4 == 0 && is_aligned(d.input, 16);
}

template <int Side, int Stride, int Rows, bool Means = false>
void launch_boxes(Depthwise<float> d, const Conv2dShape& p, Stream stream) {
  using Box = DepthwiseBox<Side, Stride, Rows>;
  const int groups = (p.c + Box::kChannels - 1) / Box::kChannels;
  const int columns = (p.out_w() + Box::kColumns - 1) / Box::kColumns;
  const int rows = (p.out_h() + Box::kRows - 1) / Box::kRows;
  d.by_groups = Divisor(groups);
  d.by_runs = Divisor(columns);
  d.by_rows = Divisor(rows);
  const std::int64_t blocks = std::int64_t{p.n} * rows * columns * groups;
  const int bytes =
      spread_bytes(Box::kBytes, blocks, target_here(), kBoxesBesideEachOther) - Box::kBytes;
  const auto kernel = conv2d_nhwc_depthwise_box_kernel<Side, Stride, Rows, Means>;
  make_ready(kernel, bytes);
  launch("launch of conv2d_nhwc_depthwise_box_kernel", kernel, static_cast<unsigned>(blocks),
         Box::kThreads, bytes, stream, 1,
         wgmma::map_of_boxes<float>(d.input, p, d.pitches.x, Box::kReadRows, Box::kReadColumns,
                                    CU_TENSOR_MAP_SWIZZLE_NONE),
         d, p);
}

template <int Side, int Stride, typename T>
void launch_square(const Depthwise<T>& d, const Conv2dShape& p, Stream stream) {
  using Strip = StripShape<Side, Stride>;
  const std::int64_t outputs = std::int64_t{p.n} * p.out_h() * p.out_w() * p.c;
  if constexpr (Side > 3 && Stride == 1 && sizeof(T) == 2) {
    if (outputs >= fewest_in_tiles(Side) && takes_tiles(d, p)) {
      return launch_tiles<Side>(d, p, stream);
    }
  }
  if constexpr (Side > 3 && Stride == 1 && sizeof(T) == 4) {
    if (outputs >= fewest_in_boxes(Side) && takes_boxes(d)) {
      const bool tall = p.out_h() > (outputs < kManyInBoxes ? 2 : 1) * kBoxSide;
      return tall ? launch_boxes<Side, 1, 2>(d, p, stream) : launch_boxes<Side, 1, 1>(d, p, stream);
    }
  }
  const std::int64_t multiprocessors = target_here().multiprocessors;
  if (outputs >= multiprocessors * kManyThreads * Strip::kColumns * Strip::kRows * Strip::kWidth) {
    return launch_strips<Side, Stride>(d, p, stream);
  }
  // Two channels a thread leave more registers to a window of 7x7, and have twice the threads.
  constexpr int kNarrow = sizeof(T) == 4 ? 4 : 2, kWide = Side == 7 ? kNarrow : 4;
  if (outputs >= multiprocessors * kFewThreads * 4) {
    return launch_windows<Side, Stride, kWide>(d, p, stream);
  }
  launch_windows<Side, Stride, kNarrow>(d, p, stream);
}

// Boxes of 7x7 positions that cover an image.
std::int64_t boxes_of(const Conv2dShape& p) {
  return std::int64_t{1} * ((p.out_h() + kBoxSide - 1) / kBoxSide) *
         ((p.out_w() + kBoxSide - 1) / kBoxSide);
}

bool has_means(const Conv2dShape& p) {
  return p.r == p.s && (p.s == 3 || p.s == 5) && p.stride_h == p.stride_w && p.stride_h <= 2 &&
         p.dilation_h * p.dilation_w == 1 && p.c % 4 == 0 && p.groups == p.c && p.k == p.c;
}

}  // namespace

std::int64_t depthwise_means_takes(const Conv2dShape& shape, const Target&) {
  const bool small = std::int64_t{shape.out_h()} * shape.out_w() <= kMostPixelsOfMeans;
  const bool pays = shape.n > 1 && small;  // one image's windows are ready before it
  return pays && has_means(shape) ? boxes_of(shape) : 0;
}

void depthwise_means(const float* input, const void* packed, float* output, float* means,
                     const Conv2dShape& shape, int parts, const Epilogue& epilogue, Stream stream) {
  if (parts != boxes_of(shape)) {
    throw std::invalid_argument("depthwise_means: expected " + std::to_string(boxes_of(shape)) +
                                " parts, found " + std::to_string(parts));
  }
  if (!has_means(shape) || !waits_in_kernels() || !is_aligned(input, 16)) {
    throw std::invalid_argument(
        "depthwise_means: expected a GPU of compute capability 9.0, one filter a channel of 3x3 or "
        "5x5, strides of 1 or 2, channels in fours and addresses that are multiples of 16");
  }
  const std::int64_t image_in = std::int64_t{shape.h} * shape.w * shape.c;
  const std::int64_t image_out = std::int64_t{shape.out_h()} * shape.out_w() * shape.c;
  for_each_part_of_batch(shape.n, image_out, [&](std::int64_t first, int images) {
    Conv2dShape p = shape;
    p.n = images;
    Depthwise<float> d{};
    d.input = input + first * image_in;
    d.packed = static_cast<const float*>(packed);
    d.bias = epilogue.bias;
    d.output = output + first * image_out;
    d.pitches = {p.c, p.c, p.c};
    d.out_h = p.out_h();
    d.out_w = p.out_w();
    d.activation = epilogue.activation;
    d.means = means + first * boxes_of(p) * p.c;
    d.scale = static_cast<float>(1.0 / (static_cast<double>(p.out_h()) * p.out_w()));
    if (p.s == 3 && p.stride_h == 1) return launch_boxes<3, 1, 1, true>(d, p, stream);
    if (p.s == 3) return launch_boxes<3, 2, 1, true>(d, p, stream);
    if (p.stride_h == 1) return launch_boxes<5, 1, 1, true>(d, p, stream);
    launch_boxes<5, 2, 1, true>(d, p, stream);
  });
}

void conv2d_nhwc_depthwise_pack(const float* weight, void* packed, const Conv2dShape& shape,
                                ElementType storage, Stream stream) {
  with_element_type(storage, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    conv2d_nhwc_depthwise_pack_kernel<T>
        <<<blocks_for(shape.weight_size()), kBlockThreads, 0, stream>>>(
            weight, static_cast<T*>(packed), shape.c, shape.r * shape.s);
    CUDA_CHECK_LAUNCH("conv2d_nhwc_depthwise_pack_kernel");
  });
}

void conv2d_nhwc_depthwise(const ConstImages& input, const void* packed, const Images& output,
                           const Conv2dShape& shape, const Epilogue& epilogue, Stream stream) {
  const ElementType storage = input.storage;
  const ConstImages& residual = epilogue.residual;
  if (output.storage != storage || (residual.data && residual.storage != storage)) {
    throw std::invalid_argument(
        "conv2d_nhwc_depthwise: expected images of one type, found " +
        std::string(name_of(storage)) + " and " +
        name_of(output.storage != storage ? output.storage : residual.storage));
  }
  const std::int64_t image_in = std::int64_t{shape.h} * shape.w;
  const std::int64_t image_out = std::int64_t{shape.out_h()} * shape.out_w();
  const bool fours = in_fours(input.data, shape.c, input.pitch, storage) &&
                     in_fours(output.data, shape.c, output.pitch, storage) &&
                     in_fours(residual.data, shape.c, residual.pitch, storage) &&
                     in_fours(packed, shape.c, 0, storage) && in_fours(epilogue.bias, shape.c, 0);
  with_element_type(storage, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_each_part_of_batch(shape.n, image_out * shape.c, [&](std::int64_t first, int images) {
      Conv2dShape p = shape;
      p.n = images;
      Depthwise<T> d{};
      d.input = static_cast<const T*>(input.data) + first * image_in * input.pitch;
      d.packed = static_cast<const T*>(packed);
      d.bias = epilogue.bias;
      if (residual.data) {
        d.residual = static_cast<const T*>(residual.data) + first * image_out * residual.pitch;
      }
      d.output = static_cast<T*>(output.data) + first * image_out * output.pitch;
      d.pitches = {input.pitch, output.pitch, residual.pitch};
      d.out_h = p.out_h();
      d.out_w = p.out_w();
      d.overflow = epilogue.overflow;
      d.activation = epilogue.activation;
      d.once = 1;
      if (!fours) return launch_windows<0, 1, 1>(d, p, stream);
      const bool square =
          p.r == p.s && p.stride_h == p.stride_w && p.dilation_h == 1 && p.dilation_w == 1;
      const int side = square ? p.s : 0, stride = p.stride_h;
      if (side == 3 && stride == 1) return launch_square<3, 1>(d, p, stream);
      if (side == 3 && stride == 2) return launch_square<3, 2>(d, p, stream);
      if (side == 5 && stride == 1) return launch_square<5, 1>(d, p, stream);
      if (side == 5 && stride == 2) return launch_square<5, 2>(d, p, stream);
      if (side == 7 && stride == 1) return launch_square<7, 1>(d, p, stream);
      launch_windows<0, 1, 4>(d, p, stream);
    });
  });
}

}  // namespace cnn_engine::cuda
