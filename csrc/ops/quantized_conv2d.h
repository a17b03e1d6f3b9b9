// quantized_conv2d: a convolution of 8-bit integers over images whose channels lie side by side:
//
//   total[k] = bias[k] + sum over the window of (x - x_zero) * w[k]       int32, modulo 2^32
//   v        = float(total[k]) * scale[k]                                 float32
//   v        = float(clamp(round_half_even(v), inner_low, inner_high)) * inner_scale
//                                                 with an inner scale: rounded before the residual
//   v        = v + float(residual - residual_zero) * residual_scale       float32, with a residual
//   y        = clamp(round_half_even(v) + y_zero, low, high)              int8 or uint8
//   y        = table[y], by its bits                                      with a table
//
// The formula of the window is conv2d.h's; padding stands for 0, so it is x_zero. Sums are exact,
// and each operation on floats is rounded by itself (no fused multiply-add), so that every
// instruction set, batch and number of threads makes equal bits. A NaN gives low. A float32 y is v
// itself, an int32 y the total. A matrix product is a convolution of images of one position.
//
// Weights are packed once, less their zero points. On the CPU they are for the instruction set that
// is selected then: calls with others throw. They are between -largest - 1 and largest; past 127
// there are two or three times as many products where an instruction multiplies 8 bits by 8.
//
// Layouts: x [N,H,W,pitches.x], or planar [N,C,H,W]; residual (8 bits; may be null, not y)
// [N,OH,OW,pitches.residual]; table [256] (may be null; of y of 8 bits); y [N,OH,OW,pitches.y].
#pragma once

#include "ops/conv2d_nhwc.h"
#include "ops/types.h"

namespace cnn_engine {

// What integers stand for, and the range of y.
struct QuantizedTypes {
  ElementType x;
  int x_zero;
  ElementType y;
  int y_zero, low, high;
  ElementType residual;
  int residual_zero;
  float residual_scale;
  float inner_scale = 0;  // 0: none
  int inner_low = 0, inner_high = 0;
  static constexpr int kOptionalMembers = 3;

  void validate() const {
    check("x", x, x_zero);
    check("residual", residual, residual_zero);
    if (y == ElementType::float32 || y == ElementType::int32) return;
    check("y", y, y_zero);
    check("y", y, low);
    check("y", y, high);
  }

 private:
  static void check(const char* what, ElementType type, int value) {
    if (type != ElementType::int8 && type != ElementType::uint8) {
      throw std::invalid_argument(std::string(what) + ": expected int8 or uint8, found " +
                                  name_of(type));
    }
    const int lowest = type == ElementType::int8 ? -128 : 0;
    if (value < lowest || value > lowest + 255) {
      throw std::invalid_argument(std::string(what) + ": expected a number of " + name_of(type) +
                                  ", found " + std::to_string(value));
    }
  }
};

// The share of a weight that one of several passes multiplies, all of nearly the same size.
CNN_ENGINE_INLINE int share_of(int weight, int pass, int passes) {
  return weight * (pass + 1) / passes - weight * pass / passes;
}

// What a layer reads and writes whose parameters are computed.
struct ComputedOperands {
  static constexpr bool kPassedByMember = true;

  const void *input, *packed;
  const std::uint8_t* x_zero;  // [1]; null: 0
  const std::int32_t* bias;    // [K]; null: 0
  const float* scale;          // [scales]; null where y is int32
  void *output, *workspace;
};

namespace cpu {
std::int64_t quantized_conv2d_packed(const Conv2dShape& shape, int largest);  // bytes
void quantized_conv2d_pack(const std::int16_t* weight,  // [K, C / groups, R, S], less zero points
                           const std::int32_t* bias,    // [K] or null
                           const float* scale,          // [K]; null where y is int32
                           void* packed,                // [quantized_conv2d_packed]
                           const Conv2dShape& shape, const QuantizedTypes& types, int largest);
std::int64_t quantized_conv2d_workspace(const Conv2dShape& shape, bool planar, int threads);
void quantized_conv2d(const void* input, const void* packed, const void* residual,
                      const void* table, void* output, void* workspace, const Conv2dShape& shape,
                      const Conv2dPitches& pitches, const QuantizedTypes& types, bool planar,
                      int threads);

// The same where x_zero, the bias and the scale are computed: x is uint8, y float32 or int32. The
// weights are packed without a bias and a scale, and with an x_zero of 1: their biases are then
// what a computed one is multiplied by.
std::int64_t quantized_conv2d_computed_workspace(const Conv2dShape& shape, bool planar,
                                                 int threads);
void quantized_conv2d_computed(const ComputedOperands& at, const Conv2dShape& shape,
                               const Conv2dPitches& pitches, ElementType y,
                               int scales,  // 1 or K
                               bool planar, int threads);

// Does nothing but the multiply-adds of 8-bit integers that the selected instructions are for, and
// returns how many: timed, they are the peak of one core.
std::int64_t integer_burst(std::int64_t rounds);
}  // namespace cpu
namespace cuda {
std::int64_t quantized_conv2d_packed(const Conv2dShape& shape, int largest);
std::int64_t quantized_conv2d_workspace(const Conv2dShape& shape);  // bytes
void quantized_conv2d_pack(const std::int16_t* weight,  // weight, bias and scale: the host's memory
                           const std::int32_t* bias, const float* scale, void* packed,
                           const Conv2dShape& shape, const QuantizedTypes& types, int largest,
                           Stream stream);
void quantized_conv2d(const void* input, const void* packed, const void* residual,
                      const void* table, void* output, void* workspace, const Conv2dShape& shape,
                      const Conv2dPitches& pitches, const QuantizedTypes& types, bool planar,
                      Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
