// Weights of quantized_conv2d as CUDA's kernels read them, made on the host:
//
//   header                        passes, and 16 bytes of x_zero that stand for what is outside
//   bias [K], scale [K]           the bias less x_zero times the sum of the filter's weights
//   weights                       of tensor cores: [groups][ceil(K / groups / 8)][units of 32
//   terms]
//                                 [32 lanes][8]; lane 4 g + t has of filter g the terms 4 t to 4 t
//                                 + 3 and 16 + 4 t to 16 + 4 t + 3, as integer_mma.cuh's B
//                                 depthwise: int16 [R][S][C]
//
// Terms are (r, s, c). Weights past 8 bits are summed in passes, each over a share of every weight.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ops/conv2d.h"

namespace cnn_engine::cuda {

constexpr int kStepBytes = 64;                    // terms of a step
constexpr int kFilterStepBytes = 8 * kStepBytes;  // of the weights of eight filters

// Steps of a sum of so many passes.
CNN_ENGINE_INLINE int steps_of(const Conv2dShape& p, int passes) {
  return (passes * p.filter_size() + kStepBytes - 1) / kStepBytes;
}

// One channel and one filter a group: no sum over channels.
CNN_ENGINE_INLINE bool is_depthwise(const Conv2dShape& p) { return p.depthwise() && p.k == p.c; }

// Byte is char, or const char.
template <typename Byte>
class QuantizedPacked {
 public:
  struct Header {
    std::int32_t passes, none[3];
    std::uint8_t zeros[16];
  };

  CNN_ENGINE_INLINE QuantizedPacked(Byte* memory, const Conv2dShape& p) : memory_(memory), p_(p) {}

  CNN_ENGINE_INLINE auto& header() const { return *at<Header>(0); }
  CNN_ENGINE_INLINE auto* bias() const { return at<std::int32_t>(sizeof(Header)); }
  CNN_ENGINE_INLINE auto* scale() const { return at<float>(sizeof(Header) + numbers()); }
  CNN_ENGINE_INLINE auto* depthwise() const { return at<std::int16_t>(before()); }
  // Of a step of eight filters.
  CNN_ENGINE_INLINE Byte* weights(int group, int block, int step, int steps) const {
    const std::int64_t first = std::int64_t{group} * blocks() + block;
    return memory_ + before() + (first * steps + step) * kFilterStepBytes;
  }
  CNN_ENGINE_INLINE std::int64_t bytes(int passes) const {
    if (is_depthwise(p_)) return before() + 2 * p_.weight_size();
    return before() + std::int64_t{p_.groups} * blocks() * steps_of(p_, passes) * kFilterStepBytes;
  }
  CNN_ENGINE_INLINE int blocks() const { return (p_.group_filters() + 7) / 8; }

 private:
  template <typename T>
  CNN_ENGINE_INLINE auto* at(std::int64_t offset) const {
    using To = std::conditional_t<std::is_const_v<Byte>, const T, T>;
    return reinterpret_cast<To*>(memory_ + offset);
  }
  CNN_ENGINE_INLINE std::int64_t numbers() const { return (std::int64_t{p_.k} + 3) / 4 * 16; }
  CNN_ENGINE_INLINE std::int64_t before() const { return sizeof(Header) + 2 * numbers(); }

  Byte* memory_;
  const Conv2dShape& p_;
};

}  // namespace cnn_engine::cuda
