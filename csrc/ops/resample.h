// resample: an image resized along both axes, each pixel a weighted sum of its neighbours, with
// Pillow's arithmetic: whole numbers, columns before rows, rounded to 8 bits after each. On the CPU
// only.
//
// Of output i along an axis: clip((2^21 + sum over t < taps of weight[t, i] * input[first[i] + t])
// >> 22), where first[i] + taps is at most the input's size, and sums fit in int32 (weights of an
// output add up to about 2^22). Firsts do not decrease.
#pragma once

#include "runtime/shape.h"

namespace cnn_engine {

struct ResampleShape {
  int channels;       // 1 or 3
  int rows, columns;  // of the input
  int out_rows, out_columns;
  int row_taps, column_taps;

  void validate() const {
    if (channels != 1 && channels != 3) {
      throw std::invalid_argument("channels: expected 1 or 3, found " + std::to_string(channels));
    }
    require_at_least("row_taps", row_taps, 1);
    require_at_least("column_taps", column_taps, 1);
    require_at_least("rows", rows, row_taps);
    require_at_least("columns", columns, column_taps);
    require_at_least("out_rows", out_rows, 1);
    require_at_least("out_columns", out_columns, 1);
    require_indexable("input", channels, rows, columns);
    require_indexable("output", channels, out_rows, out_columns);
  }
};

namespace cpu {
void resample(const std::uint8_t* input,          // [rows, columns, channels]
              const std::int32_t* row_first,      // [out_rows]
              const std::int32_t* row_weight,     // [out_rows, row_taps]
              const std::int32_t* column_first,   // [out_columns]
              const std::int32_t* column_weight,  // [out_columns, column_taps]
              std::uint8_t* output,               // [channels, out_rows, out_columns]
              const ResampleShape& shape);
}  // namespace cpu
}  // namespace cnn_engine
