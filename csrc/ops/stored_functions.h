// Functions of tensors of which some lie in memory in 16 bits (types.h), on CUDA: unary.h,
// binary.h, affine_channel.h, normalize_rows.h and the mean of reduce.h with a type for each
// tensor, float32 or the same one of 16 bits. What is computed is float32.
//
// Layouts: as there; of affine_channel inner is 1, of normalize_rows groups and span are 1 and
// channels at most kMostRowChannels; parameters are float32.
#pragma once

#include "ops/affine_channel.h"
#include "ops/binary.h"
#include "ops/epilogue.h"
#include "ops/images.h"
#include "ops/normalize_rows.h"
#include "ops/reduce.h"
#include "ops/types.h"
#include "ops/unary.h"

namespace cnn_engine::cuda {

constexpr int kMostRowChannels = 2048;

void unary_stored(const ConstValues& input,  // [size]
                  const Values& output,  // [size]; may be the input, where their types are the same
                  std::int64_t size, const Activation& activation, const Overflow& overflow,
                  Stream stream);
void binary_stored(const ConstValues& x, const ConstValues& y, const Values& out,
                   const BinaryShape& shape, BinaryFunction function, const Overflow& overflow,
                   Stream stream);
void affine_channel_stored(const ConstValues& x,  // [outer, channels]
                           const float* center,   // [channels]; null: 0
                           const float* scale,    // [channels]
                           const float* shift,    // [channels]
                           const Values& y,       // [outer, channels]
                           const ChannelShape& shape, const Overflow& overflow, Stream stream);
void normalize_rows_stored(const ConstValues& x,  // [rows, channels]
                           const float* scale,    // [channels]; null: 1
                           const float* shift,    // [channels]; null: 0
                           const Values& y,       // [rows, channels]
                           const NormalizeRowsShape& shape, const Overflow& overflow,
                           Stream stream);
void mean_stored(const ConstValues& x,  // [outer, axis, inner]
                 const Values& y,       // [outer, inner]
                 const AxisShape& shape, const Overflow& overflow, Stream stream);

}  // namespace cnn_engine::cuda
