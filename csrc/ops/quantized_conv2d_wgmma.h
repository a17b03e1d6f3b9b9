// quantized_conv2d on GPUs of compute capability 9.0, whose engines bring what is multiplied to
// shared memory and multiply from there: the same integers. One group, channels in sixteens,
// weights of 8 bits, strides up to 8, and windows that reach up to 128 pixels beyond the image; x
// at an address and with a pitch that are multiples of 16.
#pragma once

#include "ops/quantized_conv2d.h"
#include "runtime/target.h"

namespace cnn_engine::cuda {

// 1 where a GPU runs it: better than quantized_conv2d.
std::int64_t quantized_conv2d_wgmma_takes(const Conv2dShape& shape, int largest,
                                          const Target& target);
std::int64_t quantized_conv2d_wgmma_packed(const Conv2dShape& shape, int largest);  // bytes
void quantized_conv2d_wgmma_pack(const std::int16_t* weight,  // weight, bias, scale: the host's
                                 const std::int32_t* bias, const float* scale, void* packed,
                                 const Conv2dShape& shape, const QuantizedTypes& types, int largest,
                                 Stream stream);

// What a launch reads and writes, as quantized_conv2d's.
struct QuantizedOperands {
  static constexpr bool kPassedByMember = true;

  const void *input, *packed, *residual, *table;
  void* output;
};

// The tile is that of a rank: 0 is the fastest by the model of times.
void quantized_conv2d_wgmma(const QuantizedOperands& at, const Conv2dShape& shape,
                            const Conv2dPitches& pitches, const QuantizedTypes& types, int rank,
                            Stream stream);

}  // namespace cnn_engine::cuda
