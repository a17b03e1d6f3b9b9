// copy_nd on the CPU: runs by memcpy, transposes in tiles, the rest element by element.
#include "ops/copy_nd.h"

#include <cstring>

#include "cpu/strided.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Elements a side of a tile: its lines of input, one a column, stay in the first cache while the
// output is written row by row. Tiles are done in strips of four along the input's lines, each
// while the next one's lines come from memory: too many lines for the processor to foresee by
// itself.
constexpr std::int64_t kTile = 16;
constexpr std::int64_t kStrip = 4 * kTile;

template <typename Item>
struct Vector;
template <>
struct Vector<std::uint32_t> {
  typedef std::uint32_t Type __attribute__((vector_size(16), aligned(4), may_alias));
};

// Transposes 4 x 4 elements in registers: to[j * to_step + i] = from[i * from_step + j].
static inline __attribute__((always_inline)) void transpose4(const std::uint32_t* from,
                                                             std::int64_t from_step,
                                                             std::uint32_t* to,
                                                             std::int64_t to_step) {
  using V = Vector<std::uint32_t>::Type;
  const V a = *reinterpret_cast<const V*>(from);
  const V b = *reinterpret_cast<const V*>(from + from_step);
  const V c = *reinterpret_cast<const V*>(from + 2 * from_step);
  const V d = *reinterpret_cast<const V*>(from + 3 * from_step);
  typedef std::int32_t Mask __attribute__((vector_size(16)));
  const V ac_low = __builtin_shuffle(a, c, Mask{0, 4, 1, 5});
  const V ac_high = __builtin_shuffle(a, c, Mask{2, 6, 3, 7});
  const V bd_low = __builtin_shuffle(b, d, Mask{0, 4, 1, 5});
  const V bd_high = __builtin_shuffle(b, d, Mask{2, 6, 3, 7});
  *reinterpret_cast<V*>(to) = __builtin_shuffle(ac_low, bd_low, Mask{0, 4, 1, 5});
  *reinterpret_cast<V*>(to + to_step) = __builtin_shuffle(ac_low, bd_low, Mask{2, 6, 3, 7});
  *reinterpret_cast<V*>(to + 2 * to_step) = __builtin_shuffle(ac_high, bd_high, Mask{0, 4, 1, 5});
  *reinterpret_cast<V*>(to + 3 * to_step) = __builtin_shuffle(ac_high, bd_high, Mask{2, 6, 3, 7});
}

// to[j * to_step + i] = from[i * from_step + j] for i < columns, j < rows, at most a tile's.
template <typename Item>
void transpose_tile(const Item* from, std::int64_t from_step, Item* to, std::int64_t to_step,
                    std::int64_t rows, std::int64_t columns) {
  if constexpr (sizeof(Item) == 4) {
    if (rows == kTile && columns == kTile) {
      for (std::int64_t j = 0; j < kTile; j += 4) {
        for (std::int64_t i = 0; i < kTile; i += 4) {
          transpose4(from + i * from_step + j, from_step, to + j * to_step + i, to_step);
        }
      }
      return;
    }
  }
  for (std::int64_t j = 0; j < rows; ++j) {
    for (std::int64_t i = 0; i < columns; ++i) to[j * to_step + i] = from[i * from_step + j];
  }
}

// The dimension before the last in which the input's elements lie side by side, or -1: with the
// last, in which the output's do, it makes a transpose.
int transposed_dimension(const Strided<2>& walk) {
  const int last = walk.rank - 1;
  if (walk.rank < 2 || walk.strides[0][last] != 1 || walk.strides[1][last] == 1) return -1;
  for (int d = 0; d < last; ++d) {
    if (walk.strides[1][d] == 1 && walk.dims[d] >= 4 && walk.dims[last] >= 4) return d;
  }
  return -1;
}

template <typename Item>
void transpose(const Item* input, Item* output, const Strided<2>& walk, int other, int threads) {
  const int last = walk.rank - 1;
  const std::int64_t rows = walk.dims[other];
  const std::int64_t columns = walk.dims[last];
  const std::int64_t to_step = walk.strides[0][other];
  const std::int64_t from_step = walk.strides[1][last];
  const std::int64_t row_strips = (rows + kStrip - 1) / kStrip;
  const std::int64_t column_tiles = (columns + kTile - 1) / kTile;
  std::int64_t outer = 1;
  for (int d = 0; d < last; ++d) outer *= d == other ? 1 : walk.dims[d];
  const std::int64_t strips = outer * row_strips * column_tiles;
  parallel_for(strips, kStrip * kTile, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t strip = begin; strip < end; ++strip) {
      const std::int64_t column = strip % column_tiles * kTile;
      const std::int64_t first = strip / column_tiles % row_strips * kStrip;
      std::int64_t rest = strip / (column_tiles * row_strips);
      const Item* from = input + column * from_step;
      Item* to = output + column;
      for (int d = last - 1; d >= 0; --d) {
        if (d == other) continue;
        const std::int64_t position = rest % walk.dims[d];
        rest /= walk.dims[d];
        to += position * walk.strides[0][d];
        from += position * walk.strides[1][d];
      }
      const std::int64_t width = columns - column < kTile ? columns - column : kTile;
      for (std::int64_t row = first; row < first + kStrip && row < rows; row += kTile) {
        const std::int64_t next = row + kTile;
        if (next < rows) {
          for (std::int64_t i = 0; i < width; ++i) __builtin_prefetch(from + next + i * from_step);
          const std::int64_t prefetched = rows - next < kTile ? rows - next : kTile;
          for (std::int64_t j = 0; j < prefetched; ++j)
            __builtin_prefetch(to + (next + j) * to_step, 1);
        }
        transpose_tile(from + row, from_step, to + row * to_step, to_step,
                       rows - row < kTile ? rows - row : kTile, width);
      }
    }
  });
}

template <typename Item>
void copy_items(const void* input, void* output, const Strided<2>& walk, int threads) {
  const auto* x = static_cast<const Item*>(input);
  auto* y = static_cast<Item*>(output);
  const int other = transposed_dimension(walk);
  if (other >= 0) return transpose(x, y, walk, other, threads);
  const int last = walk.rank - 1;
  const std::int64_t to_step = walk.rank ? walk.strides[0][last] : 1;
  const std::int64_t from_step = walk.rank ? walk.strides[1][last] : 1;
  for_each_run(walk, 1, threads, [=](const std::int64_t* at, std::int64_t count) {
    Item* to = y + at[0];
    const Item* from = x + at[1];
    if (to_step == 1 && from_step == 1) {
      if (count * sizeof(Item) >= 64) {
        std::memcpy(to, from, count * sizeof(Item));
      } else {
        for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
      }
    } else if (to_step == 1 && from_step == 0) {
      const Item value = *from;
      for (std::int64_t i = 0; i < count; ++i) to[i] = value;
    } else {
      for (std::int64_t i = 0; i < count; ++i) to[i * to_step] = from[i * from_step];
    }
  });
}

}  // namespace

void copy_nd(const void* input, void* output, const CopyShape& shape, int threads) {
  std::int64_t strides[2][kMaxDims];
  for (int d = 0; d < kMaxDims; ++d) {
    strides[0][d] = shape.output_strides[d];
    strides[1][d] = shape.input_strides[d];
  }
  const Strided<2> walk = collapse<2>(shape.dims, strides);
  if (walk.size == 0) return;
  input = static_cast<const char*>(input) + shape.input_offset * shape.itemsize;
  output = static_cast<char*>(output) + shape.output_offset * shape.itemsize;
  switch (shape.itemsize) {
    case 1:
      return copy_items<std::uint8_t>(input, output, walk, threads);
    case 2:
      return copy_items<std::uint16_t>(input, output, walk, threads);
    case 4:
      return copy_items<std::uint32_t>(input, output, walk, threads);
    default:
      return copy_items<std::uint64_t>(input, output, walk, threads);
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
