// gather_at and scatter_at on the CPU. Rows of a scatter follow on each other on one thread, since
// several may name one run.
#include "ops/indexed.h"

#include <cstring>

#include "cpu/strided.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// The walk over rows: their number, their start in x, and their position among the indices.
Strided<3> rows_of(const IndexedShape& p) {
  std::int64_t strides[3][kMaxDims];
  row_major(p.dims, strides[0]);
  for (int d = 0; d < kMaxDims; ++d) {
    strides[1][d] = p.starts[d];
    strides[2][d] = p.steps[d];
  }
  return collapse<3>(p.dims, strides);
}

// Where a row's run begins, less its start; -1 where column `wrong` names none.
template <typename Index>
inline std::int64_t position_of(const Index* row, const IndexedShape& p, int& wrong) {
  std::int64_t position = 0;
  for (int k = 0; k < p.columns; ++k) {
    std::int64_t index = row[k];
    if (index < 0) index += p.sizes[k];
    if (index < 0 || index >= p.sizes[k]) {
      wrong = k;
      return -1;
    }
    position += index * p.strides[k];
  }
  return position;
}

template <typename Item, typename Index>
void gather_rows(const Item* x, const Index* indices, Item* y, const IndexedShape& p, int threads) {
  const Strided<3> rows = rows_of(p);
  if (rows.size == 0 || p.run == 0) return;
  const int last = rows.rank - 1;
  const std::int64_t start_step = rows.rank ? rows.strides[1][last] : 0;
  const std::int64_t index_step = rows.rank ? rows.strides[2][last] : 0;
  const Index* bad = nullptr;  // one of those that name no position
  for_each_run(rows, p.run + p.columns, threads, [&](const std::int64_t* at, std::int64_t count) {
    Item* to = y + at[0] * p.run;
    const Item* from = x + at[1];
    const Index* row = indices + at[2];
    for (std::int64_t i = 0; i < count; ++i, to += p.run, from += start_step, row += index_step) {
      int wrong = 0;
      const std::int64_t position = position_of(row, p, wrong);
      if (position < 0) {
        __atomic_store_n(&bad, row + wrong, __ATOMIC_RELAXED);
        return;
      }
      if (p.run == 1) {
        *to = from[position];
      } else {
        std::memcpy(to, from + position, p.run * sizeof(Item));
      }
    }
  });
  if (bad == nullptr) return;
  const Index* first = indices;  // the first of them, whatever thread met which
  for (;; first += p.columns) {
    int wrong = 0;
    if (position_of(first, p, wrong) < 0) refuse_index(first[wrong], p.sizes[wrong]);
  }
}

template <typename Item, typename Index, typename Join>
void scatter_rows(const Index* indices, const Item* updates, Item* y, const IndexedShape& p,
                  const Join& join) {
  const Strided<3> rows = rows_of(p);
  if (rows.size == 0 || p.run == 0) return;
  const int last = rows.rank - 1;
  const std::int64_t start_step = rows.rank ? rows.strides[1][last] : 0;
  const std::int64_t index_step = rows.rank ? rows.strides[2][last] : 0;
  for_each_run(rows, 1, 1, [&](const std::int64_t* at, std::int64_t count) {
    const Item* from = updates + at[0] * p.run;
    Item* start = y + at[1];
    const Index* row = indices + at[2];
    for (std::int64_t i = 0; i < count;
         ++i, from += p.run, start += start_step, row += index_step) {
      int wrong = 0;
      const std::int64_t position = position_of(row, p, wrong);
      if (position < 0) refuse_index(row[wrong], p.sizes[wrong]);
      Item* to = start + position;
      for (std::int64_t r = 0; r < p.run; ++r) to[r] = join(to[r], from[r]);
    }
  });
}

template <typename Item>
void gather_items(const void* x, const void* indices, void* y, const IndexedShape& p, int threads) {
  const auto* from = static_cast<const Item*>(x);
  auto* to = static_cast<Item*>(y);
  if (p.index_bytes == 4) {
    gather_rows(from, static_cast<const std::int32_t*>(indices), to, p, threads);
  } else {
    gather_rows(from, static_cast<const std::int64_t*>(indices), to, p, threads);
  }
}

template <typename Item, typename Join>
void scatter_items(const void* indices, const void* updates, void* y, const IndexedShape& p,
                   const Join& join) {
  const auto* from = static_cast<const Item*>(updates);
  auto* to = static_cast<Item*>(y);
  if (p.index_bytes == 4) {
    scatter_rows(static_cast<const std::int32_t*>(indices), from, to, p, join);
  } else {
    scatter_rows(static_cast<const std::int64_t*>(indices), from, to, p, join);
  }
}

}  // namespace

void gather_at(const void* x, const void* indices, void* y, const IndexedShape& shape,
               int threads) {
  switch (shape.itemsize) {
    case 1:
      return gather_items<std::uint8_t>(x, indices, y, shape, threads);
    case 2:
      return gather_items<std::uint16_t>(x, indices, y, shape, threads);
    case 4:
      return gather_items<std::uint32_t>(x, indices, y, shape, threads);
    default:
      return gather_items<std::uint64_t>(x, indices, y, shape, threads);
  }
}

void scatter_at(const void* x, const void* indices, const void* updates, void* y,
                const IndexedShape& shape, ScatterJoin join, int) {
  if (x != y && shape.elements > 0) std::memcpy(y, x, shape.elements * shape.itemsize);
  const auto written = [](auto, auto update) {
    return update;
  };
  switch (join) {
    case ScatterJoin::none:
      break;
    case ScatterJoin::add:
      return scatter_items<float>(indices, updates, y, shape,
                                  [](float a, float b) { return a + b; });
    case ScatterJoin::mul:
      return scatter_items<float>(indices, updates, y, shape,
                                  [](float a, float b) { return a * b; });
    case ScatterJoin::max:  // a NaN wins
      return scatter_items<float>(indices, updates, y, shape,
                                  [](float a, float b) { return b > a || b != b ? b : a; });
    case ScatterJoin::min:
      return scatter_items<float>(indices, updates, y, shape,
                                  [](float a, float b) { return b < a || b != b ? b : a; });
  }
  switch (shape.itemsize) {
    case 1:
      return scatter_items<std::uint8_t>(indices, updates, y, shape, written);
    case 2:
      return scatter_items<std::uint16_t>(indices, updates, y, shape, written);
    case 4:
      return scatter_items<std::uint32_t>(indices, updates, y, shape, written);
    default:
      return scatter_items<std::uint64_t>(indices, updates, y, shape, written);
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
