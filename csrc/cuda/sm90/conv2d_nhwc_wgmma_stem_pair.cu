// stem_pair: what it takes, how its weights are packed, and its launch.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_split.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_stem_pair.cuh"
#include "ops/conv2d_nhwc_wgmma.h"
#include "ops/stem_pair.h"

namespace cnn_engine::cuda {
namespace wgmma::stem_pair {
namespace {

// One thread packs 16 bytes of the first convolution's weights, two columns of four channels: a
// filter has 128 bytes, of which each of its rows takes an instruction's.
template <typename T>
__global__ void stem_pair_pack_kernel(const float* weight,  // [K, C, 3, 3]
                                      T* packed, int filters, int channels) {
  const int index = static_cast<int>(grid_thread()), filter = index / 8;
  if (filter >= kFilters) return;
  const int piece = exchanged(filter, index % 8), r = piece / 2;
#pragma unroll
  for (int i = 0; i < 2 * kPlanes; ++i) {
    const int s = piece % 2 * 2 + i / kPlanes, c = i % kPlanes;
    const bool some = filter < filters && r < 3 && s < 3 && c < channels;
    packed[index * 2 * kPlanes + i] =
        narrowed<T>(some ? weight[((filter * channels + c) * 3 + r) * 3 + s] : 0.0f);
  }
}

Conv2dShape second_of(const Conv2dShape& shape, int filters) {
  Conv2dShape second = shape;
  second.c = shape.k;
  second.k = filters;
  return second;
}

// What shapes are expected to be and are not, or null.
const char* why_not(const Conv2dShape& shape, int filters, Conv2dOperands operands) {
  if (!has_16_bits(operands)) return "float16 or bfloat16";
  if (shape.groups != 1 || shape.c > kMostChannels) return "one group of at most 3 channels";
  if (shape.r != 3 || shape.s != 3 || shape.stride_h != 1 || shape.stride_w != 1 ||
      shape.dilation_h != 1 || shape.dilation_w != 1 || shape.pad_top != 1 || shape.pad_left != 1 ||
      shape.pad_bottom != 1 || shape.pad_right != 1) {
    return "kernels of 3x3, one place apart, with one place around";
  }
  if (shape.k > kFilters || filters > kFilters || filters % 8 != 0) {
    return "at most 64 filters, the second's in eights";
  }
  return nullptr;
}

std::int64_t tiles_of(const Conv2dShape& shape) {
  return std::int64_t{shape.n} * ((shape.h + kRows - 1) / kRows) *
         ((shape.w + kPatchWidth - 1) / kPatchWidth);
}

void check(const Conv2dShape& shape, int filters, Conv2dOperands operands) {
  if (const char* expected = why_not(shape, filters, operands)) {
    throw std::invalid_argument(std::string("stem_pair: expected ") + expected);
  }
}

template <typename T>
void launch_stem_pair(StemPair p, int images, Stream stream) {
  const auto kernel = stem_pair_kernel<T>;
  const int multiprocessors = multiprocessors_here();
  Product& second = p.second;
  second.patches_a_row = (p.w + kPatchWidth - 1) / kPatchWidth;
  second.patches_a_column = (p.h + kRows - 1) / kRows;
  second.tiles = images * second.patches_a_column * second.patches_a_row;
  Conv2dShape made = {};
  made.n = images;
  made.c = second.filters;
  made.h = p.h / 2;
  made.w = p.w / 2;
  if (images * made.h * made.w == 0) return;
  make_ready(kernel, kBytes);
  launch("stem_pair_kernel", kernel, dim3(std::min(2 * multiprocessors, second.tiles)),
         dim3(kThreads), kBytes, stream, 1,
         map_of_boxes<T>(second.y, made, second.y_pitch, kRows / 2, kPatchWidth / 2), p);
}

}  // namespace
}  // namespace wgmma::stem_pair

std::int64_t stem_pair_takes(const Conv2dShape& shape, int filters, Conv2dOperands operands,
                             int device) {
  namespace pair = wgmma::stem_pair;
  if (!wgmma::runs_on(device) || pair::why_not(shape, filters, operands)) return 0;
  // Two kernels have smaller tiles, and are faster where these are few, or partly outside.
  int multiprocessors = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const std::int64_t tiles = pair::tiles_of(shape);
  const std::int64_t places = std::int64_t{shape.n} * shape.h * shape.w;
  return tiles >= multiprocessors && 4 * places >= 3 * tiles * pair::kRows * wgmma::kPatchWidth;
}

std::int64_t stem_pair_packed(const Conv2dShape& shape, int filters, Conv2dOperands operands, int) {
  wgmma::stem_pair::check(shape, filters, operands);
  return 10 * wgmma::stem_pair::kStageBytes;
}

void stem_pair_pack(const float* weight, const float* second_weight, void* packed,
                    const Conv2dShape& shape, int filters, Conv2dOperands operands, Stream stream) {
  namespace pair = wgmma::stem_pair;
  pair::check(shape, filters, operands);
  wgmma::with_type(operands, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (sizeof(T) == 2) {
      pair::stem_pair_pack_kernel<T>
          <<<2, kBlockThreads, 0, stream>>>(weight, static_cast<T*>(packed), shape.k, shape.c);
      CUDA_CHECK_LAUNCH("stem_pair_pack_kernel");
      wgmma::launch_pack<T>(second_weight, static_cast<char*>(packed) + pair::kStageBytes,
                            pair::second_of(shape, filters), 1, stream);
    }
  });
  // stem_pair reads them before it waits for the kernels before it.
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void stem_pair(const float* input, const void* packed, const float* bias, const float* second_bias,
               void* output, const Conv2dShape& shape, int filters, int y_pitch,
               const Overflow& overflow, Conv2dOperands operands, UnaryFunction activation,
               float alpha, float beta, UnaryFunction second_activation, float second_alpha,
               float second_beta, Stream stream) {
  wgmma::stem_pair::check(shape, filters, operands);
  const auto refuse = [](const char* expected) {
    throw std::invalid_argument(std::string("stem_pair: expected ") + expected);
  };
  const Activation first = clamps_of({activation, alpha, beta});
  const Activation second = clamps_of({second_activation, second_alpha, second_beta});
  if (ends_of(first) != Ends::clamps || ends_of(second) != Ends::clamps) {
    refuse("relu, clip or no functions");
  }
  if (!is_aligned(packed, 16)) refuse("packed weights at a multiple of 16");
  if (!is_aligned(output, 16) || y_pitch % 8 != 0) {
    refuse("y's pitch and address in multiples of 16 bytes");
  }
  const std::int64_t places = std::int64_t{shape.h / 2} * (shape.w / 2);
  for_each_part_of_batch(shape.n,
                         std::max<std::int64_t>(places * y_pitch, std::int64_t{shape.h} * shape.w),
                         [&](std::int64_t begin, int images) {
                           wgmma::stem_pair::StemPair p = {};
                           p.x = input + begin * shape.c * shape.h * shape.w;
                           p.bias = bias;
                           p.channels = shape.c;
                           p.h = shape.h;
                           p.w = shape.w;
                           p.low = first.alpha;
                           p.high = first.beta;
                           p.second.packed = static_cast<const char*>(packed);
                           p.second.bias = second_bias;
                           p.second.y = static_cast<char*>(output) + begin * places * y_pitch * 2;
                           p.second.y_pitch = y_pitch;
                           p.second.channels = shape.k;
                           p.second.filters = filters;
                           p.second.out_h = shape.h;
                           p.second.out_w = shape.w;
                           p.second.pools = true;
                           p.second.low = second.alpha;
                           p.second.high = second.beta;
                           p.second.overflow = overflow;
                           wgmma::with_type(operands, [&](auto* type) {
                             using T = std::remove_pointer_t<decltype(type)>;
                             if constexpr (sizeof(T) == 2) {
                               wgmma::stem_pair::launch_stem_pair<T>(p, images, stream);
                             }
                           });
                         });
}

}  // namespace cnn_engine::cuda
