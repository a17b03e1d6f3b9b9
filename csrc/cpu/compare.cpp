// compare and to_float32 on the CPU: runs along the last dimension, in which each operand has one
// stride.
#include "ops/compare.h"

#include <stdexcept>

#include "cpu/binary_walk.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

struct Less {
  template <typename T>
  static inline __attribute__((always_inline)) bool of(T x, T y) {
    return x < y;
  }
};
struct LessOrEqual {
  template <typename T>
  static inline __attribute__((always_inline)) bool of(T x, T y) {
    return x <= y;
  }
};
struct Equal {
  template <typename T>
  static inline __attribute__((always_inline)) bool of(T x, T y) {
    return x == y;
  }
};

template <typename Function, typename T>
void compare_run(const T* x, std::int64_t x_step, const T* y, std::int64_t y_step,
                 std::uint8_t* out, std::int64_t out_step, std::int64_t count) {
  if (out_step == 1 && x_step == 1 && y_step == 1) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) out[i] = Function::of(x[i], y[i]);
  } else if (out_step == 1 && x_step == 1 && y_step == 0) {
    const T value = *y;
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) out[i] = Function::of(x[i], value);
  } else if (out_step == 1 && x_step == 0 && y_step == 1) {
    const T value = *x;
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) out[i] = Function::of(value, y[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      out[i * out_step] = Function::of(x[i * x_step], y[i * y_step]);
    }
  }
}

template <typename Function, typename T>
void compare_all(const void* x, const void* y, std::uint8_t* out, const BinaryShape& shape,
                 int threads) {
  const Strided<3> walk = walk_of(shape);
  if (walk.size == 0) return;
  std::int64_t step[3] = {1, 0, 0};
  for (int k = 0; k < 3 && walk.rank; ++k) step[k] = walk.strides[k][walk.rank - 1];
  for_each_run(walk, 1, threads, [=](const std::int64_t* at, std::int64_t count) {
    compare_run<Function, T>(static_cast<const T*>(x) + at[1], step[1],
                             static_cast<const T*>(y) + at[2], step[2], out + at[0], step[0],
                             count);
  });
}

template <typename T>
void compare_type(const void* x, const void* y, std::uint8_t* out, const BinaryShape& shape,
                  bool less, bool or_equal, int threads) {
  const auto compare = !less      ? compare_all<Equal, T>
                       : or_equal ? compare_all<LessOrEqual, T>
                                  : compare_all<Less, T>;
  compare(x, y, out, shape, threads);
}

template <typename T, bool truth>
void floats_of(const void* x, float* out, std::int64_t count, int threads) {
  const T* const from = static_cast<const T*>(x);
  parallel_for(count, 1, threads, [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      out[i] = truth ? (from[i] != 0 ? 1.0f : 0.0f) : static_cast<float>(from[i]);
    }
  });
}

}  // namespace

void compare(const void* x, const void* y, std::uint8_t* out, const BinaryShape& shape,
             NumberType type, bool less, bool or_equal, int threads) {
  const auto compare = type == NumberType::float32 ? compare_type<float>
                       : type == NumberType::int32 ? compare_type<std::int32_t>
                       : type == NumberType::int64 ? compare_type<std::int64_t>
                                                   : nullptr;
  if (compare == nullptr || !(less || or_equal)) {
    throw std::invalid_argument("compare: expected float32, int32 or int64, and a comparison");
  }
  compare(x, y, out, shape, less, or_equal, threads);
}

void to_float32(const void* x, float* out, std::int64_t count, NumberType type, int threads) {
  switch (type) {
    case NumberType::boolean:
      return floats_of<std::uint8_t, true>(x, out, count, threads);
    case NumberType::uint8:
      return floats_of<std::uint8_t, false>(x, out, count, threads);
    case NumberType::int8:
      return floats_of<std::int8_t, false>(x, out, count, threads);
    case NumberType::int32:
      return floats_of<std::int32_t, false>(x, out, count, threads);
    case NumberType::int64:
      return floats_of<std::int64_t, false>(x, out, count, threads);
    case NumberType::float32:
      break;
  }
  throw std::invalid_argument("to_float32: expected whole numbers, found float32");
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
