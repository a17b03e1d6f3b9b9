// Arithmetic of tensors of 8-bit integers on the CPU; see the contract.
#include "ops/quantized_pointwise.h"

#include "cpu/binary_walk.h"
#include "cpu/byte_table.h"
#include "cpu/channels.h"
#include "cpu/requantize.h"
#include "ops/window.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr std::int64_t kBlock = 4096;

// run(first, count) for blocks that cover [0, size), by threads.
template <typename Run>
void for_blocks(std::int64_t size, int threads, const Run& run) {
  parallel_for((size + kBlock - 1) / kBlock, kBlock, threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t block = begin; block < end; ++block) {
                   const std::int64_t first = block * kBlock, left = size - first;
                   run(first, left < kBlock ? left : kBlock);
                 }
               });
}

template <int W>
CNN_ENGINE_INLINE void store_as(const Steps& steps, Vec<W> v, std::uint8_t* y) {
  store_rounded<W>(v, steps.zero, steps.low, steps.high, y);
}

// Stores value(width, i), floats in steps of the output, of i in [0, count) at y: four vectors at
// once where there are so many. The last ones may begin earlier.
template <typename Value>
CNN_ENGINE_INLINE void store_run(const Steps& steps, std::int64_t count, std::uint8_t* y,
                                 const Value& value) {
  constexpr int kFour = 4 * kWide;
  constexpr std::integral_constant<int, kWide> wide;
  for (std::int64_t first = 0; count >= kFour && first < count; first += kFour) {
    const std::int64_t i = first + kFour > count ? count - kFour : first;
    Vec<kWide> v[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) v[j] = value(wide, i + j * kWide);
    const auto bytes = in_order<kWide>(to_bytes<kWide>(v, steps.zero, steps.low, steps.high));
    __builtin_memcpy(y + i, &bytes, sizeof bytes);
  }
  if (count >= kFour) return;
  for_channels(static_cast<int>(count), [&](auto width, int i) {
    store_as<decltype(width)::value>(steps, value(width, i), y + i);
  });
}

template <int W>
CNN_ENGINE_INLINE Vec<W> steps_of(const std::uint8_t* q, const Steps& steps) {
  return as_floats<W>(widened<W>(q, steps.type == ElementType::int8) - steps.zero);
}

// y = value(width, a, b) of every element of two tensors that are broadcast to y's shape, where a
// and b point to `width` bytes.
template <typename Value>
void combine(const void* a, const void* b, void* y, const BinaryShape& shape, const Steps& given,
             int threads, const Value& value) {
  const Strided<3> walk = walk_of(shape);
  if (walk.size == 0) return;
  const Steps steps = given;
  const int last = walk.rank - 1;
  const auto step = [&](int operand) {
    return walk.rank ? walk.strides[operand][last] : 1;
  };
  const std::int64_t y_step = step(0), a_step = step(1), b_step = step(2);
  const auto* first = static_cast<const std::uint8_t*>(a);
  const auto* second = static_cast<const std::uint8_t*>(b);
  auto* to = static_cast<std::uint8_t*>(y);
  for_each_run(walk, 1, threads, [=](const std::int64_t* at, std::int64_t count) {
    std::uint8_t a_same[kWide], b_same[kWide];  // what repeats along the run
    __builtin_memset(a_same, first[at[1]], kWide);
    __builtin_memset(b_same, second[at[2]], kWide);
    const auto* own = first + at[1];
    const auto* other = second + at[2];
    std::uint8_t* out = to + at[0];
    if (y_step == 1 && a_step >> 1 == 0 && b_step >> 1 == 0) {
      return store_run(steps, count, out, [&](auto width, std::int64_t i) {
        return value(width, a_step ? own + i : a_same, b_step ? other + i : b_same);
      });
    }
    for (std::int64_t i = 0; i < count; ++i) {
      constexpr std::integral_constant<int, 1> one;
      store_as<1>(steps, value(one, own + i * a_step, other + i * b_step), out + i * y_step);
    }
  });
}

// Kernel offsets of a window in [first, end).
int inside_count(int first, int end, int dilation) {
  return end > first ? (end - first + dilation - 1) / dilation : 0;
}

// The largest of a window of 8-bit integers; `flip` makes signed ones unsigned, in their order.
void max_window(const std::uint8_t* corner, std::int64_t row, std::int64_t column, int rows,
                int columns, int channels, std::uint8_t flip, std::uint8_t* y) {
  constexpr int kTogether = 256;
  for (int first = 0; first < channels; first += kTogether) {
    const int count = channels - first < kTogether ? channels - first : kTogether;
    std::uint8_t best[kTogether] = {};
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        const std::uint8_t* x = corner + i * row + j * column + first;
        for (int c = 0; c < count; ++c) {
          const std::uint8_t value = x[c] ^ flip;
          best[c] = value > best[c] ? value : best[c];
        }
      }
    }
    for (int c = 0; c < count; ++c) y[first + c] = best[c] ^ flip;
  }
}

float lower_or_nan(float a, float b) { return a < b || a != a ? a : b; }

// The least and the largest of `count` numbers and 0; NaN where one is.
void range_of(const float* x, std::int64_t count, float& low, float& high) {
  Vec<kWide> least{}, most{}, wrong{};
  std::int64_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    const Vec<kWide> v = load_as<Vec<kWide>>(x + i);
    least = v < least ? v : least;
    most = v > most ? v : most;
    wrong = v == v ? wrong : v;
  }
  low = high = 0.0f;
  const auto add = [&](float a, float b) {
    low = lower_or_nan(low, a);
    high = -lower_or_nan(-high, -b);
  };
  for (int j = 0; j < kWide; ++j) {
    add(least[j], most[j]);
    add(wrong[j], wrong[j]);
  }
  for (; i < count; ++i) add(x[i], x[i]);
}

}  // namespace

void quantize_linear(const float* x, void* y, std::int64_t size, const Steps& given, int threads) {
  const Steps steps = given;
  auto* to = static_cast<std::uint8_t*>(y);
  for_blocks(size, threads, [&](std::int64_t first, std::int64_t count) {
    store_run(steps, count, to + first, [&](auto width, std::int64_t i) {
      constexpr int W = decltype(width)::value;
      return load_as<Vec<W>>(x + first + i) / splat<W>(steps.scale);
    });
  });
}

std::int64_t dynamic_quantize_linear_workspace(std::int64_t size, int) {
  return (size + kBlock - 1) / kBlock * 2 * static_cast<int>(sizeof(float));
}

void dynamic_quantize_linear(const float* x, std::uint8_t* y, float* scale, std::uint8_t* zero,
                             float* workspace, std::int64_t size, int threads) {
  for_blocks(size, threads, [&](std::int64_t first, std::int64_t count) {
    float* to = workspace + first / kBlock * 2;
    range_of(x + first, count, to[0], to[1]);
  });
  float low = 0.0f, high = 0.0f;
  for (std::int64_t block = 0; block < (size + kBlock - 1) / kBlock; ++block) {
    low = lower_or_nan(low, workspace[2 * block]);
    high = -lower_or_nan(-high, -workspace[2 * block + 1]);
  }
  *scale = (high - low) / 255.0f;
  if (*scale == 0.0f) *scale = 1.0f;
  Steps steps{ElementType::uint8, 0, *scale, 0, 255};
  store_as<1>(steps, splat<1>(-low / *scale), zero);
  steps.zero = *zero;
  quantize_linear(x, y, size, steps, threads);
}

void dequantize_linear(const void* q, float* y, std::int64_t size, const Steps& given,
                       int threads) {
  const Steps steps = given;
  const auto* from = static_cast<const std::uint8_t*>(q);
  for_blocks(size, threads, [&](std::int64_t first, std::int64_t count) {
    for_channels(static_cast<int>(count), [&](auto width, int i) {
      constexpr int W = decltype(width)::value;
      const Vec<W> value = steps_of<W>(from + first + i, steps) * steps.scale;
      __builtin_memcpy(y + first + i, &value, sizeof value);
    });
  });
}

void lookup(const void* q, const void* table, void* y, std::int64_t size, int entry_bytes,
            int threads) {
  const auto* from = static_cast<const std::uint8_t*>(q);
  for_blocks(size, threads, [&](std::int64_t first, std::int64_t count) {
    if (entry_bytes == 1) {
      return look_up_bytes(from + first, static_cast<const std::uint8_t*>(table),
                           static_cast<std::uint8_t*>(y) + first, count);
    }
    const auto* entries = static_cast<const std::uint32_t*>(table);
    auto* to = static_cast<std::uint32_t*>(y) + first;
    for (std::int64_t i = 0; i < count; ++i) to[i] = entries[from[first + i]];
  });
}

void quantized_add(const void* a, const void* b, void* y, const BinaryShape& shape,
                   const Steps& of_a, const Steps& of_b, const Steps& of_y, int threads) {
  const Steps a_steps = of_a, b_steps = of_b;
  combine(a, b, y, shape, of_y, threads, [&](auto width, const auto* first, const auto* second) {
    constexpr int W = decltype(width)::value;
    const Vec<W> own = steps_of<W>(first, a_steps) * a_steps.scale;
    return own + steps_of<W>(second, b_steps) * b_steps.scale;
  });
}

void quantized_mul(const void* a, const void* b, void* y, const BinaryShape& shape,
                   const Steps& of_a, const Steps& of_b, const Steps& of_y, int threads) {
  const Steps a_steps = of_a, b_steps = of_b;
  const float scale = of_y.scale;
  combine(a, b, y, shape, of_y, threads, [&](auto width, const auto* first, const auto* second) {
    constexpr int W = decltype(width)::value;
    return steps_of<W>(first, a_steps) * steps_of<W>(second, b_steps) * scale;  // exact, then not
  });
}

void quantized_mean(const void* x, void* y, const MeanShape& given, const Steps& of_x,
                    const Steps& of_y, int threads) {
  const MeanShape p = given;
  const Steps x_steps = of_x, y_steps = of_y;
  const auto* from = static_cast<const std::uint8_t*>(x);
  auto* to = static_cast<std::uint8_t*>(y);
  const bool is_signed = x_steps.type == ElementType::int8;
  if (p.inner == 1) {  // along what is contiguous, one after the other
    parallel_for(p.outer, p.count, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::uint8_t* row = from + i * p.count;
        std::int32_t sum = 0;
        for (std::int64_t j = 0; j < p.count; ++j) {
          sum += is_signed ? static_cast<std::int8_t>(row[j]) : row[j];
        }
        const IntVec<1> total = {static_cast<std::int32_t>(sum - p.count * x_steps.zero)};
        store_as<1>(y_steps, as_floats<1>(total) * x_steps.scale, to + i);
      }
    });
    return;
  }
  parallel_for(p.outer, p.count * p.inner, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      for_channels(static_cast<int>(p.inner), [&](auto width, int c) {
        constexpr int W = decltype(width)::value;
        IntVec<W> total{};
        for (std::int64_t j = 0; j < p.count; ++j) {
          total += widened<W>(from + (i * p.count + j) * p.inner + c, is_signed) - x_steps.zero;
        }
        store_as<W>(y_steps, as_floats<W>(total) * x_steps.scale, to + i * p.inner + c);
      });
    }
  });
}

void quantized_max_pool2d(const void* x, void* y, const MaxPool2dShape& shape, ElementType type,
                          int threads) {
  const MaxPool2dShape p = shape;
  const auto* images = static_cast<const std::uint8_t*>(x);
  auto* to = static_cast<std::uint8_t*>(y);
  const std::uint8_t flip = type == ElementType::int8 ? 0x80 : 0;
  const int out_h = p.out_h(), out_w = p.out_w();
  const std::int64_t column = p.c, row = column * p.w;
  const std::int64_t cost = std::int64_t{out_w} * p.r * p.s * p.c / 16;
  parallel_for(std::int64_t{p.n} * out_h, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      const std::uint8_t* image = images + index / out_h * p.h * row;
      const int top = static_cast<int>(index % out_h) * p.stride_h - p.pad_top;
      const int first_y = first_inside(top, p.dilation_h);
      const int rows = inside_count(first_y, end_inside(top, p.r, p.dilation_h, p.h), p.dilation_h);
      for (int j = 0; j < out_w; ++j) {
        const int left = j * p.stride_w - p.pad_left;
        const int first_x = first_inside(left, p.dilation_w);
        const int columns =
            inside_count(first_x, end_inside(left, p.s, p.dilation_w, p.w), p.dilation_w);
        max_window(image + first_y * row + first_x * column, p.dilation_h * row,
                   p.dilation_w * column, rows, columns, p.c, flip, to + (index * out_w + j) * p.c);
      }
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
