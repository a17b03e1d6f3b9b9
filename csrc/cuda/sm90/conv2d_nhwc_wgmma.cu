// conv2d_nhwc_wgmma: what it takes, and its launches.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"
#include "ops/conv2d_nhwc_wgmma.h"

namespace cnn_engine::cuda {
namespace wgmma {
namespace {

constexpr int item_bytes(ElementType compute_type) { return has_16_bits(compute_type) ? 2 : 4; }

// Channels of a step.
constexpr int channels_of(ElementType compute_type) { return 128 / item_bytes(compute_type); }

int chunks_of(const Conv2dShape& shape, ElementType compute_type) {
  return divided(shape.c, channels_of(compute_type));
}

// Why the kernel cannot run a shape, or null.
const char* why_not(const Conv2dShape& shape, ElementType compute_type) {
  const int down = (shape.r - 1) * shape.dilation_h, right = (shape.s - 1) * shape.dilation_w;
  const auto is_corner = [](int offset) {
    return offset >= -128 && offset <= 127;
  };
  if (shape.groups != 1) return "one group";
  if (has_16_bits(compute_type) && shape.c % 8 != 0) return "channels in eights";
  if (shape.c % 4 != 0) return "channels in fours";
  if (shape.stride_h > 8 || shape.stride_w > 8) return "strides up to 8";
  if (!is_corner(-shape.pad_top) || !is_corner(-shape.pad_left) ||
      !is_corner(shape.pad_bottom - down) || !is_corner(shape.pad_right - right) || down > 255 ||
      right > 255) {
    return "windows that reach up to 128 places beyond the image";
  }
  return nullptr;
}

void check(const Conv2dShape& shape, ElementType compute_type) {
  if (const char* expected = why_not(shape, compute_type)) {
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma: expected ") + expected);
  }
}

bool in_pieces(const void* address, int pitch, ElementType storage) {
  return is_aligned(address, 16) && pitch * bytes_of(storage) % 16 == 0;
}

void check_source(const ConstImages& x, ElementType compute_type) {
  check_storage("x", x.storage, compute_type);
  if (bytes_of(x.storage) != item_bytes(compute_type) || !in_pieces(x.data, x.pitch, x.storage)) {
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma: expected x in ") +
                                name_of(compute_type) +
                                ", its pitch and all addresses multiples of 16 bytes, found " +
                                name_of(x.storage) + " with a pitch of " + std::to_string(x.pitch));
  }
}

void check_packed(const void* packed) {
  if (!is_aligned(packed, 16)) {
    throw std::invalid_argument(
        "conv2d_nhwc_wgmma: expected packed weights at a multiple of 16 bytes");
  }
}

// Why patches cannot make the pooled results of a shape, or null.
const char* why_not_pooled(const Conv2dShape& shape, ElementType compute_type) {
  if (!has_16_bits(compute_type)) return "operands of 16 bits";
  if (shape.r != 3 || shape.s != 3 || shape.stride_h * shape.stride_w != 1 ||
      shape.dilation_h * shape.dilation_w != 1) {
    return "a kernel of 3x3, one place apart, without dilation";
  }
  if (shape.k % 8 != 0) return "filters in eights";
  return why_not(shape, compute_type);
}

void check_pooled(const Conv2dShape& shape, const Images& output, ElementType compute_type) {
  const char* expected = why_not_pooled(shape, compute_type);
  if (!expected && !(is_aligned(output.data, 16) && output.pitch % 8 == 0)) {
    expected = "y's pitch and address in multiples of 16 bytes";
  }
  if (expected) {
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma_pool: expected ") + expected);
  }
}

// Why two convolutions' results cannot be added, or one's filters follow the other's; null.
const char* why_apart(const Conv2dShape& a, const Conv2dShape& b, bool beside) {
  if (a.n != b.n || a.out_h() != b.out_h() || a.out_w() != b.out_w()) return "as many places";
  if (beside) return a.k % kFilters == 0 ? nullptr : "filters of the first in sixty-fours";
  return a.k == b.k ? nullptr : "as many filters";
}

void check_pair(const Conv2dPairShape& both, ElementType compute_type) {
  const Conv2dShape &shape = both.first, &other = both.second;
  check(shape, compute_type);
  check(other, compute_type);
  if (const char* expected = why_apart(shape, other, both.beside)) {
    const auto said = [](const Conv2dShape& of) {
      return "[" + std::to_string(of.n) + ", " + std::to_string(of.out_h()) + ", " +
             std::to_string(of.out_w()) + ", " + std::to_string(of.k) + "]";
    };
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma_pair: expected ") + expected +
                                ", found results of " + said(shape) + " and " + said(other));
  }
}

Source source_of(const Conv2dShape& shape, ElementType compute_type) {
  return {is_tiled(shape),  shape.stride_h,
          shape.stride_w,   shape.pad_top,
          shape.pad_left,   shape.dilation_h,
          shape.dilation_w, shape.s,
          shape.r,          chunks_of(shape, compute_type)};
}

// Bytes of packed weights, without float32's scales of filters.
std::int64_t unit_bytes(const Conv2dShape& shape, ElementType compute_type) {
  return std::int64_t{kUnitBytes} * divided(shape.k, kFilters) * shape.r * shape.s *
         chunks_of(shape, compute_type);
}
// Where those lie behind units of so many bytes; null of other types.
template <typename Void>
auto scales_at(Void* packed, std::int64_t bytes, ElementType compute_type) {
  using Scale = std::conditional_t<std::is_const_v<Void>, const float, float>;
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  const bool some = compute_type == ElementType::float32;
  return some ? reinterpret_cast<Scale*>(static_cast<Byte*>(packed) + bytes) : nullptr;
}

// For compensated(): what sums of kernel offsets of so many channels lose, measured on an H100.
float cut_off_of(int channels) {
  const float lost = channels <= 16 ? 0.63f : channels <= 32 ? 0.75f : channels <= 48 ? 0.8f : 0.9f;
  return cut_off_for(lost);
}

// What is summed; `other` may be null. With `beside` its filters follow the first's.
Gemm gemm_of(const Conv2dShape& shape, const Conv2dShape* other, bool beside,
             ElementType compute_type) {
  Gemm p = {};
  static_cast<Source&>(p) = source_of(shape, compute_type);
  p.channels = shape.c;
  p.cut_off = cut_off_of(other ? std::max(shape.c, other->c) : shape.c);
  p.filters = shape.k;
  p.out_h = shape.out_h();
  p.out_w = shape.out_w();
  p.both = other != nullptr;
  if (other) p.second = source_of(*other, compute_type);
  p.steps = p.own_steps() + p.second.own_steps();
  p.first_steps = beside ? p.own_steps() : p.steps;
  p.second_filter = divided(shape.k, kFilters) * kFilters;
  if (beside) p.filters += other->k;
  p.floor = -std::numeric_limits<float>::infinity();
  return p;
}

// Says of a product how its end may be computed.
void choose_epilogue(Gemm& p, ElementType compute_type) {
  const bool is_relu = p.activation == UnaryFunction::relu;
  p.low = is_relu ? 0.0f : p.alpha;
  p.high = is_relu ? std::numeric_limits<float>::infinity() : p.beta;
  const bool is_clamp = is_relu || p.activation == UnaryFunction::clip;
  const bool all_rounded = p.y_is_rounded && (!p.residual || p.residual_is_rounded);
  const bool in_tiles = p.in_pieces && p.filters % 8 == 0;
  p.in_fragments = all_rounded && in_tiles && is_clamp;
  p.at_once = !has_16_bits(compute_type) && is_clamp;
  const bool persistent_epilogue =
      p.residual ? is_clamp && !p.both
                 : is_clamp || p.activation == UnaryFunction::hard_swish ||
                       p.activation == UnaryFunction::swish || p.activation == UnaryFunction::gelu;
  p.may_persist = (all_rounded || compute_type == ElementType::tf32) && in_tiles &&
                  !p.has_prologue() && persistent_epilogue;
  p.in_rows = p.in_fragments && !p.residual && !p.both && p.offsets_per_row == 3 &&
              p.offsets_per_column == 3 &&
              p.stride_h * p.stride_w * p.dilation_h * p.dilation_w == 1;
}

// Steps of the first source that need no more than its `known` channels.
int prefetched_steps(const Gemm& p, ElementType compute_type, int known) {
  if (known >= p.channels) return p.own_steps();
  return p.offsets_per_row * p.offsets_per_column == 1 ? known / channels_of(compute_type) : 0;
}

// Of what lies in memory.
struct Storage {
  ElementType x, residual, y;
};

// Sets what follows the accumulators, and how early steps are read.
void set_epilogue(Gemm& p, const Images& output, const Epilogue& epilogue) {
  p.bias = epilogue.bias;
  p.residual = epilogue.residual.data;
  p.residual_pitch = epilogue.residual.pitch;
  p.y = output.data;
  p.y_pitch = output.pitch;
  p.activation = epilogue.activation.function;
  p.alpha = epilogue.activation.alpha;
  p.beta = epilogue.activation.beta;
  p.overflow = epilogue.overflow;
}

// Launches a GEMM of a whole batch, of which its output pixels and what depends on them are not
// set.
void launch_batch(const Sources& from, const Gemm& batch, const Storage& storage,
                  ElementType compute_type, const Launch& launch) {
  if (from.first.shape.n == 0) return;
  const int multiprocessors = target_here().multiprocessors;
  const std::int64_t positions = std::int64_t{batch.out_h} * batch.out_w;
  const std::int64_t made =
      batch.pools ? std::int64_t{batch.out_h / 2} * (batch.out_w / 2) : positions;
  for_each_part_of_batch(from.first.shape.n, positions, [&](std::int64_t first, int images) {
    const std::int64_t before = first * made;
    Sources part = from;
    for (SourceImages* source : {&part.first, &part.second}) {
      if (!source->x) continue;
      const Conv2dShape& shape = source->shape;
      source->x = element(source->x, storage.x, first * shape.h * shape.w * source->pitch);
      source->shape.n = images;
    }
    Gemm p = batch;
    if (p.scale_per_image) p.scale += first * p.channels;
    if (p.residual) p.residual = element(p.residual, storage.residual, before * p.residual_pitch);
    p.y = element(p.y, storage.y, before * p.y_pitch);
    p.residual_is_rounded = storage.residual != ElementType::float32;
    p.y_is_rounded = storage.y != ElementType::float32;
    p.in_pieces = in_pieces(p.y, p.y_pitch, storage.y) &&
                  (!p.residual || in_pieces(p.residual, p.residual_pitch, storage.residual));
    p.rows = static_cast<int>(images * positions);
    choose_epilogue(p, compute_type);
    const Choice choice = choose(p, compute_type, multiprocessors, launch.rank);
    with_type(compute_type, [&](auto* type) {
      launch_gemm<std::remove_pointer_t<decltype(type)>>(part, p, choice, launch.stream);
    });
  });
}

// What a function of such results, stored as what is multiplied, takes.
double time_of(Gemm p, const Conv2dShape& shape, ElementType compute_type, const void* residual,
               int multiprocessors, UnaryFunction function = UnaryFunction::relu) {
  p.activation = function;
  p.residual = residual;
  p.residual_is_rounded = p.y_is_rounded = has_16_bits(compute_type);
  p.in_pieces = true;
  p.rows = static_cast<int>(std::min<std::int64_t>(std::int64_t{shape.n} * p.out_h * p.out_w,
                                                   std::numeric_limits<int>::max()));
  choose_epilogue(p, compute_type);
  return least_time(p, compute_type, multiprocessors);
}

}  // namespace

double gemm_time(const Conv2dShape& shape, const void* residual, UnaryFunction function,
                 ElementType compute_type, int multiprocessors) {
  const Gemm p = gemm_of(shape, nullptr, false, compute_type);
  return time_of(p, shape, compute_type, residual, multiprocessors, function);
}

}  // namespace wgmma

std::int64_t conv2d_nhwc_wgmma_takes(const Conv2dShape& shape, ElementType compute_type,
                                     const Target&) {
  return wgmma::why_not(shape, compute_type) == nullptr;
}

std::int64_t conv2d_nhwc_wgmma_packed(const Conv2dShape& shape, ElementType compute_type, int) {
  wgmma::check(shape, compute_type);
  const bool scaled = compute_type == ElementType::float32;
  return wgmma::unit_bytes(shape, compute_type) + (scaled ? 4 * wgmma::padded_filters(shape) : 0);
}

void conv2d_nhwc_wgmma_pack(const float* weight, void* packed, const Conv2dShape& shape,
                            ElementType compute_type, Stream stream) {
  wgmma::check(shape, compute_type);
  const wgmma::Gemm p = wgmma::gemm_of(shape, nullptr, false, compute_type);
  wgmma::with_type(compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    float* const scales =
        wgmma::scales_at(packed, wgmma::unit_bytes(shape, compute_type), compute_type);
    wgmma::launch_scales<T>(weight, scales, shape, false, stream);
    wgmma::launch_pack<T>(weight, packed, scales, shape, p.chunks, 0, p.steps, stream);
  });
  // conv2d_nhwc_wgmma reads them before it waits for the kernels before it.
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void conv2d_nhwc_wgmma(const ConstImages& input, const void* packed, const Images& output,
                       const Conv2dShape& shape, ElementType compute_type, const Prologue& prologue,
                       const Epilogue& epilogue, const Launch& launch) {
  const ConstImages& residual = epilogue.residual;
  wgmma::check(shape, compute_type);
  check_storage("residual", residual.storage, compute_type);
  check_storage("y", output.storage, compute_type);
  wgmma::check_source(input, compute_type);
  wgmma::check_packed(packed);
  wgmma::Gemm p = wgmma::gemm_of(shape, nullptr, false, compute_type);
  p.packed = static_cast<const char*>(packed);
  p.filter_scales = wgmma::scales_at(packed, wgmma::unit_bytes(shape, compute_type), compute_type);
  p.scale = prologue.scale;
  p.shift = prologue.shift;
  p.floor = prologue.floor;
  p.scale_per_image = prologue.scale_per_image;
  if (p.has_prologue() &&
      !(is_aligned(p.scale, 16) && is_aligned(p.shift, 16) && shape.r * shape.s == 1 &&
        shape.pad_top + shape.pad_left + shape.pad_bottom + shape.pad_right == 0)) {
    throw std::invalid_argument(
        "scale, shift, floor: expected a kernel of 1x1 without padding, and addresses that are "
        "multiples of 16");
  }
  wgmma::set_epilogue(p, output, epilogue);
  p.ahead = wgmma::prefetched_steps(p, compute_type, launch.ready);
  p.holds = launch.holds;
  wgmma::launch_batch({{input.data, shape, input.pitch}, {}}, p,
                      {input.storage, residual.storage, output.storage}, compute_type, launch);
}

std::int64_t conv2d_nhwc_wgmma_pool_takes(const Conv2dShape& shape, ElementType compute_type,
                                          const Target& target) {
  if (!conv2d_nhwc_wgmma_takes(shape, compute_type, target) ||
      wgmma::why_not_pooled(shape, compute_type)) {
    return 0;
  }
  wgmma::Gemm p = wgmma::gemm_of(shape, nullptr, false, compute_type);
  const int multiprocessors = target.multiprocessors;
  const double apart = wgmma::time_of(p, shape, compute_type, nullptr, multiprocessors);
  p.pools = true;
  const double together = wgmma::time_of(p, shape, compute_type, nullptr, multiprocessors);
  const double made = 2.0 * shape.n * shape.out_h() * shape.out_w() * shape.k;  // bytes
  return together < apart + wgmma::pool_time(1.25 * made);
}

void conv2d_nhwc_wgmma_pool(const ConstImages& input, const void* packed, const Images& output,
                            const Conv2dShape& shape, ElementType compute_type,
                            const Epilogue& epilogue, const Launch& launch) {
  wgmma::check_pooled(shape, output, compute_type);
  wgmma::check_source(input, compute_type);
  wgmma::check_packed(packed);
  const UnaryFunction function = epilogue.activation.function;
  if (function != UnaryFunction::relu && function != UnaryFunction::clip) {
    throw std::invalid_argument("conv2d_nhwc_wgmma_pool: expected a clamp");
  }
  if (output.storage != compute_type || epilogue.residual.data) {
    throw std::invalid_argument(std::string("conv2d_nhwc_wgmma_pool: expected y in ") +
                                name_of(compute_type) + " and no residual");
  }
  wgmma::Gemm p = wgmma::gemm_of(shape, nullptr, false, compute_type);
  p.pools = true;
  p.packed = static_cast<const char*>(packed);
  wgmma::set_epilogue(p, output, epilogue);
  wgmma::launch_batch({{input.data, shape, input.pitch}, {}}, p,
                      {input.storage, ElementType::float32, output.storage}, compute_type, launch);
}

std::int64_t conv2d_nhwc_wgmma_pair_takes(const Conv2dPairShape& both, ElementType compute_type,
                                          const Target& target) {
  const Conv2dShape &shape = both.first, &other = both.second;
  const bool beside = both.beside;
  if (!conv2d_nhwc_wgmma_takes(shape, compute_type, target) ||
      !conv2d_nhwc_wgmma_takes(other, compute_type, target) ||
      wgmma::why_apart(shape, other, beside)) {
    return 0;
  }
  const int multiprocessors = target.multiprocessors;
  const auto time = [&](const Conv2dShape& first, const Conv2dShape* second, const void* residual) {
    const wgmma::Gemm p = wgmma::gemm_of(first, second, second && beside, compute_type);
    return wgmma::time_of(p, first, compute_type, residual, multiprocessors);
  };
  const void* const some = &shape;
  return time(shape, &other, nullptr) <
         time(shape, nullptr, nullptr) + time(other, nullptr, beside ? nullptr : some);
}

std::int64_t conv2d_nhwc_wgmma_pair_packed(const Conv2dPairShape& both, ElementType compute_type,
                                           int) {
  wgmma::check_pair(both, compute_type);
  return conv2d_nhwc_wgmma_packed(both.first, compute_type, 0) +
         conv2d_nhwc_wgmma_packed(both.second, compute_type, 0);
}

void conv2d_nhwc_wgmma_pair_pack(const float* weight, const float* other_weight, void* packed,
                                 const Conv2dPairShape& both, ElementType compute_type,
                                 Stream stream) {
  wgmma::check_pair(both, compute_type);
  const Conv2dShape &shape = both.first, &other = both.second;
  const bool beside = both.beside;
  const wgmma::Gemm p = wgmma::gemm_of(shape, &other, beside, compute_type);
  wgmma::with_type(compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const std::int64_t first = wgmma::unit_bytes(shape, compute_type);
    float* const scales =
        wgmma::scales_at(packed, first + wgmma::unit_bytes(other, compute_type), compute_type);
    float* const others = scales && beside ? scales + wgmma::padded_filters(shape) : scales;
    wgmma::launch_scales<T>(weight, scales, shape, false, stream);
    wgmma::launch_scales<T>(other_weight, others, other, !beside, stream);
    const int own = p.own_steps(), more = p.second.own_steps();
    char* const behind = static_cast<char*>(packed) + (beside ? first : 0);
    wgmma::launch_pack<T>(weight, packed, scales, shape, p.chunks, 0, beside ? own : p.steps,
                          stream);
    wgmma::launch_pack<T>(other_weight, behind, others, other, p.second.chunks, beside ? 0 : own,
                          beside ? more : p.steps, stream);
  });
  CUDA_CHECK(cudaStreamSynchronize(stream));  // as conv2d_nhwc_wgmma_pack
}

void conv2d_nhwc_wgmma_pair(const ConstImages& input, const ConstImages& other_input,
                            const void* packed, const Images& output, const Conv2dPairShape& both,
                            ElementType compute_type, const Epilogue& epilogue,
                            const Launch& launch) {
  wgmma::check_pair(both, compute_type);
  check_storage("y", output.storage, compute_type);
  wgmma::check_source(input, compute_type);
  wgmma::check_source(other_input, compute_type);
  wgmma::check_packed(packed);
  if (other_input.storage != input.storage || epilogue.residual.data) {
    throw std::invalid_argument(
        "conv2d_nhwc_wgmma_pair: expected inputs of one storage type and no residual");
  }
  const Conv2dShape &shape = both.first, &other = both.second;
  wgmma::Gemm p = wgmma::gemm_of(shape, &other, both.beside, compute_type);
  p.packed = static_cast<const char*>(packed);
  p.filter_scales = wgmma::scales_at(
      packed, wgmma::unit_bytes(shape, compute_type) + wgmma::unit_bytes(other, compute_type),
      compute_type);
  wgmma::set_epilogue(p, output, epilogue);
  p.ahead = wgmma::prefetched_steps(p, compute_type, launch.ready);
  p.holds = launch.holds;
  wgmma::launch_batch(
      {{input.data, shape, input.pitch}, {other_input.data, other, other_input.pitch}}, p,
      {input.storage, ElementType::float32, output.storage}, compute_type, launch);
}

}  // namespace cnn_engine::cuda
