// Arithmetic of tensors of 8-bit integers, which stand for (q - zero) * scale:
//
//   quantize_linear      y = clamp(round_half_even(x / scale) + zero, low, high)
//   dequantize_linear    y = float(q - zero) * scale
//   lookup               y = table[q], by the bits of q; entries of 1 or 4 bytes
//   quantized_add        v = float(a - a.zero) * a.scale + float(b - b.zero) * b.scale
//   quantized_mul        v = float((a - a.zero) * (b - b.zero)) * y.scale
//   quantized_mean       v = float(sum of (x - x.zero)) * x.scale; the sum is int32
//   quantized_max_pool2d the largest of a window, over images whose channels lie side by side
//
// and y = clamp(round_half_even(v) + y.zero, y.low, y.high). Every operation on floats is rounded
// by itself, and a NaN gives low. Layouts: contiguous, but a and b through strides of their own, as
// binary.h's; x of the mean is [outer, count, inner], y [outer, inner]; images [N,H,W,C].
#pragma once

#include "ops/binary.h"
#include "ops/max_pool2d.h"
#include "ops/types.h"

namespace cnn_engine {

// What the integers of a tensor stand for; of an output, their range.
struct Steps {
  ElementType type;
  int zero;
  float scale;
  int low = -128, high = 255;
  static constexpr int kOptionalMembers = 2;

  void validate() const {
    if (type != ElementType::int8 && type != ElementType::uint8) {
      throw std::invalid_argument(std::string("expected int8 or uint8, found ") + name_of(type));
    }
  }
};

struct MeanShape {
  std::int64_t outer, count, inner;

  void validate() const {}
};

namespace cpu {
void quantize_linear(const float* x, void* y, std::int64_t size, const Steps& steps, int threads);
// scale = (max - min) / 255 of x and 0, or 1 where that is 0; zero = saturated(-min / scale); y of
// both. A NaN in x makes the scale one, and y and zero 0.
std::int64_t dynamic_quantize_linear_workspace(std::int64_t size, int threads);  // bytes
void dynamic_quantize_linear(const float* x, std::uint8_t* y, float* scale, std::uint8_t* zero,
                             float* workspace, std::int64_t size, int threads);
void dequantize_linear(const void* q, float* y, std::int64_t size, const Steps& steps, int threads);
void lookup(const void* q, const void* table, void* y, std::int64_t size, int entry_bytes,
            int threads);
void quantized_add(const void* a, const void* b, void* y, const BinaryShape& shape,
                   const Steps& a_steps, const Steps& b_steps, const Steps& y_steps, int threads);
void quantized_mul(const void* a, const void* b, void* y, const BinaryShape& shape,
                   const Steps& a_steps, const Steps& b_steps, const Steps& y_steps, int threads);
void quantized_mean(const void* x, void* y, const MeanShape& shape, const Steps& x_steps,
                    const Steps& y_steps, int threads);
void quantized_max_pool2d(const void* x, void* y, const MaxPool2dShape& shape, ElementType type,
                          int threads);
}  // namespace cpu
namespace cuda {
void quantize_linear(const float* x, void* y, std::int64_t size, const Steps& steps, Stream stream);
void dequantize_linear(const void* q, float* y, std::int64_t size, const Steps& steps,
                       Stream stream);
void lookup(const void* q, const void* table, void* y, std::int64_t size, int entry_bytes,
            Stream stream);
void quantized_add(const void* a, const void* b, void* y, const BinaryShape& shape,
                   const Steps& a_steps, const Steps& b_steps, const Steps& y_steps, Stream stream);
void quantized_mul(const void* a, const void* b, void* y, const BinaryShape& shape,
                   const Steps& a_steps, const Steps& b_steps, const Steps& y_steps, Stream stream);
void quantized_mean(const void* x, void* y, const MeanShape& shape, const Steps& x_steps,
                    const Steps& y_steps, Stream stream);
void quantized_max_pool2d(const void* x, void* y, const MaxPool2dShape& shape, ElementType type,
                          Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
