// gather on the CPU: rows along the last dimension, with the other dimensions' offsets added once.
// A row that is the one before it again, as nearest neighbours have them, is copied.
#include "ops/gather.h"

#include <cstring>

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

template <typename Item>
void gather_items(const void* input, const std::int64_t* tables, void* output,
                  const GatherShape& shape, int threads) {
  const GatherShape p = shape;
  const auto* x = static_cast<const Item*>(input);
  auto* y = static_cast<Item*>(output);
  const Item value = static_cast<Item>(p.fill);
  const int end_dim = p.rank - 1;
  const std::int64_t length = p.dims[end_dim];
  std::int64_t rows = 1;
  const std::int64_t* table[kMaxDims];
  for (int d = 0; d < p.rank; ++d) {
    table[d] = tables;
    tables += p.dims[d];
    if (d < end_dim) rows *= p.dims[d];
  }
  if (length == 0 || p.run == 0) return;
  bool whole = p.run == 1;  // whether the last dimension has nothing to fill, and so no branch
  for (std::int64_t i = 0; i < length && whole; ++i) whole = table[end_dim][i] >= 0;
  bool doubled = whole && length % 2 == 0;  // whether it is each of a run of elements twice
  for (std::int64_t i = 0; i < length && doubled; ++i) {
    doubled = table[end_dim][i] == table[end_dim][0] + i / 2;
  }
  parallel_for(rows, length * p.run, threads, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t before = -1;  // the start of the row before
    for (std::int64_t row = begin; row < end; ++row) {
      std::int64_t start = 0;
      bool inside = true;
      std::int64_t rest = row;
      for (int d = end_dim - 1; d >= 0; --d) {
        const std::int64_t offset = table[d][rest % p.dims[d]];
        rest /= p.dims[d];
        inside = inside && offset >= 0;
        start += offset;
      }
      Item* to = y + row * length * p.run;
      const std::int64_t* last = table[end_dim];
      if (!inside) {
        for (std::int64_t i = 0; i < length * p.run; ++i) to[i] = value;
      } else if (start == before) {
        std::memcpy(to, to - length * p.run, length * p.run * sizeof(Item));
      } else if (doubled) {
        const Item* from = x + start + last[0];
#pragma omp simd
        for (std::int64_t i = 0; i < length / 2; ++i) {
          to[2 * i] = from[i];
          to[2 * i + 1] = from[i];
        }
      } else if (whole) {
        for (std::int64_t i = 0; i < length; ++i) to[i] = x[start + last[i]];
      } else if (p.run == 1) {
        for (std::int64_t i = 0; i < length; ++i) to[i] = last[i] < 0 ? value : x[start + last[i]];
      } else {
        for (std::int64_t i = 0; i < length; ++i, to += p.run) {
          if (last[i] < 0) {
            for (std::int64_t r = 0; r < p.run; ++r) to[r] = value;
          } else {
            std::memcpy(to, x + start + last[i], p.run * sizeof(Item));
          }
        }
      }
      before = inside ? start : -1;
    }
  });
}

}  // namespace

void gather(const void* input, const std::int64_t* tables, void* output, const GatherShape& shape,
            int threads) {
  switch (shape.itemsize) {
    case 1:
      return gather_items<std::uint8_t>(input, tables, output, shape, threads);
    case 2:
      return gather_items<std::uint16_t>(input, tables, output, shape, threads);
    case 4:
      return gather_items<std::uint32_t>(input, tables, output, shape, threads);
    default:
      return gather_items<std::uint64_t>(input, tables, output, shape, threads);
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
