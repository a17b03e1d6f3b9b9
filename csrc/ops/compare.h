// compare: out = x <, <= or == y for every element, x and y broadcast to out's shape; and
// to_float32: whole numbers and truth values as floats, rounded half to even. On the CPU only.
//
// Layouts: out, [dims] as uint8 of 0 and 1, x and y of one type, all through strides of their own
// (ops/strided.h); nothing is compared with NaN but as unequal. to_float32 reads and writes arrays
// of `count` elements; of truth values all but 0 are 1.
#pragma once

#include "ops/binary.h"

namespace cnn_engine {

enum class NumberType { boolean, uint8, int8, int32, int64, float32 };

inline const char* name_of(NumberType type) {
  constexpr const char* kNames[] = {"bool", "uint8", "int8", "int32", "int64", "float32"};
  return static_cast<int>(type) < 6 ? kNames[static_cast<int>(type)] : nullptr;
}

namespace cpu {
// `less` and `or_equal`: whether it is true where x is less than y, and where they are equal.
void compare(const void* x, const void* y, std::uint8_t* out, const BinaryShape& shape,
             NumberType type, bool less, bool or_equal, int threads);

void to_float32(const void* x, float* out, std::int64_t count, NumberType type, int threads);
}  // namespace cpu
}  // namespace cnn_engine
