// The inner loop of blocked products: a tile of y[m, p] += sum over c of a[c, m] * b[c, p], with p
// on SIMD lanes and the tile in registers. A part of the depth is summed in the order of c by
// itself, and then added to what the parts before it gave: rounding errors are those of short sums.
// Included only by files that are compiled once for each instruction set.
#pragma once

#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/fused/vector.h"
#include "ops/panels.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

// What is added to a sum and what bounds it.
struct Epilogue {
  const float* bias;      // one for each row of y, or null
  const float* residual;  // as y, or null
  float lowest, highest;
  bool hard_swish = false;  // in place of the bounds

  // Of the filters from `k` on.
  Epilogue at(std::int64_t k) const {
    Epilogue moved = *this;
    if (moved.bias) moved.bias += k;
    return moved;
  }
};

namespace {

// A value of another type from memory. (Copied to where it is used, vectors would pass through the
// stack.)
template <typename To, typename From>
CNN_ENGINE_INLINE To load_as(const From* from) {
  To value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// Vectors of a tile's row: with 8 rows they fill 32 registers, with 4 rows 16. (SSE multiplies into
// one of its operands, and so needs registers for copies.)
constexpr int kTileVectors = kRegisters == 16 && kWide == 4 ? 2 : 3;
constexpr int kTileRows = kRegisters == 32 ? 8 : 4;  // of a panel, that are computed together
constexpr int kTileColumns = kTileVectors * kWide;
// Products that are summed before the next tile's turn: b's part stays in the first-level cache.
constexpr int kTileDepth = 6144 / kTileColumns;

// The larger and the smaller of a bound and a value; a NaN stays, as it is the second operand. The
// compiler makes two instructions of a comparison, but the CPU has one.
CNN_ENGINE_INLINE Vec<4> raised(Vec<4> lowest, Vec<4> value) {
#if defined(__x86_64__)
  return _mm_max_ps(lowest, value);
#else
  return value < lowest ? lowest : value;
#endif
}
CNN_ENGINE_INLINE Vec<4> lowered(Vec<4> highest, Vec<4> value) {
#if defined(__x86_64__)
  return _mm_min_ps(highest, value);
#else
  return value > highest ? highest : value;
#endif
}
#if defined(__AVX2__)
CNN_ENGINE_INLINE Vec<8> raised(Vec<8> lowest, Vec<8> value) {
  return _mm256_max_ps(lowest, value);
}
CNN_ENGINE_INLINE Vec<8> lowered(Vec<8> highest, Vec<8> value) {
  return _mm256_min_ps(highest, value);
}
#endif
#if defined(__AVX512F__)
// With a mask of all lanes, for which GCC 12 does not warn of an operand that it made up itself.
constexpr __mmask16 kAll16 = 0xffff;
CNN_ENGINE_INLINE Vec<16> raised(Vec<16> lowest, Vec<16> value) {
  return _mm512_maskz_max_ps(kAll16, lowest, value);
}
CNN_ENGINE_INLINE Vec<16> lowered(Vec<16> highest, Vec<16> value) {
  return _mm512_maskz_min_ps(kAll16, highest, value);
}
#endif

template <typename V>
CNN_ENGINE_INLINE V clamp(V value, float lowest, float highest) {
  return lowered(highest - V{}, raised(lowest - V{}, value));
}

CNN_ENGINE_INLINE float clamp_one(float value, float lowest, float highest) {
  value = value < lowest ? lowest : value;
  return value > highest ? highest : value;
}

// x * (x / 6 + 1/2 held between 0 and 1), with math.h's sixth32.
template <typename V>
CNN_ENGINE_INLINE V hard_swish(V x) {
  constexpr float kHigh = 1.0f / 6.0f;
  constexpr float kLow = static_cast<float>(1.0 / 6.0 - static_cast<double>(kHigh));
  const V shifted = clamp(x + 3.0f, 0.0f, 8.0f);
  return x * lowered(1.0f - V{}, shifted * kHigh + shifted * kLow);
}

// What follows a sum, in registers.
template <typename V>
CNN_ENGINE_INLINE V finished(const Epilogue& epilogue, V value) {
  if (epilogue.hard_swish) return hard_swish(value);
  return clamp(value, epilogue.lowest, epilogue.highest);
}
CNN_ENGINE_INLINE float finished_one(const Epilogue& epilogue, float value) {
  Vec<4> wide{};
  wide[0] = value;
  return finished(epilogue, wide)[0];
}

// Rows of one panel from `a`, columns of V vectors from `b`. The part of the depth may be the first
// (y is not read), the last (the epilogue follows), both or neither.
template <int M, int V>
CNN_ENGINE_INLINE void multiply_tile(const float* a, int a_stride, const float* b, int b_stride,
                                     int depth, float* y, std::int64_t y_stride, bool first,
                                     const Epilogue* last) {
  Vec<kWide> sum[M][V] = {};
  for (int c = 0; c < depth; ++c, a += a_stride, b += b_stride) {
    Vec<kWide> columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = load<kWide>(b + v * kWide);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const float value = a[m];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[m][v] += columns[v] * value;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      Vec<kWide> value = sum[m][v];
      if (!first) value += load<kWide>(y + m * y_stride + v * kWide);
      if (last) {
        if (last->bias) value += last->bias[m];
        if (last->residual) {
          value += load<kWide>(last->residual + m * y_stride + v * kWide);
        }
        value = clamp(value, last->lowest, last->highest);
      }
      store<kWide>(y + m * y_stride + v * kWide, value);
    }
  }
}

// The same where some rows or columns of the tile lie outside y: through a tile of its own.
template <int M, int V>
void multiply_edge(const float* a, int a_stride, const float* b, int b_stride, int depth, float* y,
                   std::int64_t y_stride, bool first, const Epilogue* last, int rows, int columns) {
  constexpr int width = V * kWide;
  float tile[M * width];
  if (!first) {
    for (int m = 0; m < M; ++m) {
      for (int p = 0; p < width; ++p) {
        tile[m * width + p] = m < rows && p < columns ? y[m * y_stride + p] : 0.0f;
      }
    }
  }
  multiply_tile<M, V>(a, a_stride, b, b_stride, depth, tile, width, first, nullptr);
  for (int m = 0; m < rows; ++m) {
    for (int p = 0; p < columns; ++p) {
      float value = tile[m * width + p];
      if (last) {
        if (last->bias) value += last->bias[m];
        if (last->residual) value += last->residual[m * y_stride + p];
        value = clamp_one(value, last->lowest, last->highest);
      }
      y[m * y_stride + p] = value;
    }
  }
}

// `rows` of one panel and the columns of one tile, whose rows in `b` are whole vectors.
CNN_ENGINE_INLINE void multiply_panel(const float* a, int panel_rows, const float* b, int depth,
                                      float* y, std::int64_t y_stride, bool first,
                                      const Epilogue* last, int rows, int columns) {
  const auto tile = [&](auto rows_size, auto vectors, int row) {
    constexpr int M = decltype(rows_size)::value, V = decltype(vectors)::value;
    Epilogue part;
    if (last) {
      part = *last;
      if (part.bias) part.bias += row;
      if (part.residual) part.residual += row * y_stride;
    }
    const Epilogue* end = last ? &part : nullptr;
    float* to = y + row * y_stride;
    if (rows - row >= M && columns == V * kWide) {
      multiply_tile<M, V>(a + row, panel_rows, b, V * kWide, depth, to, y_stride, first, end);
    } else {
      multiply_edge<M, V>(a + row, panel_rows, b, V * kWide, depth, to, y_stride, first, end,
                          rows - row < M ? rows - row : M, columns);
    }
  };
  const auto panel = [&](auto vectors) {
    if (kTileRows == 8 && panel_rows == 8) {
      tile(std::integral_constant<int, 8>(), vectors, 0);
    } else {
      for (int row = 0; row < rows; row += 4) tile(std::integral_constant<int, 4>(), vectors, row);
    }
  };
  const int vectors = (columns + kWide - 1) / kWide;
  if (vectors == 1) panel(std::integral_constant<int, 1>());
  if (vectors == 2) panel(std::integral_constant<int, 2>());
  if (vectors == 3) panel(std::integral_constant<int, kTileVectors>());
}

// Columns are cut into tiles of nearly the same number of vectors.
struct ColumnTiles {
  int count;
  int columns, vectors;

  CNN_ENGINE_INLINE explicit ColumnTiles(int all)
      : count(0), columns(all), vectors((all + kWide - 1) / kWide) {
    count = (vectors + kTileVectors - 1) / kTileVectors;
  }
  CNN_ENGINE_INLINE int first(int tile) const {
    const int at = static_cast<int>(std::int64_t{vectors} * tile / count) * kWide;
    return at < columns ? at : columns;
  }
};

// The depth is cut into parts of nearly the same length.
struct DepthParts {
  int depth, count;

  CNN_ENGINE_INLINE explicit DepthParts(int all)
      : depth(all), count((all + kTileDepth - 1) / kTileDepth) {}
  CNN_ENGINE_INLINE int first(int part) const {
    return static_cast<int>(std::int64_t{depth} * part / count);
  }
};

// Products of a part of such a sum.
constexpr int kPartOfColumn = 256;

// The transposed tile: y[t, m] for T columns x[t], each with its values side by side, and the rows
// of B panels on SIMD lanes. For matrices with few columns, or whose columns lie so.
template <int T, int B, int R>
CNN_ENGINE_INLINE void multiply_columns(const float* a, std::int64_t panel_size, int depth,
                                        const float* x, std::int64_t x_stride, float (*y)[B * R]) {
  Vec<R> sum[T][B] = {};
  for (int from = 0; from < depth; from += kPartOfColumn) {
    const int to = depth - from < kPartOfColumn ? depth : from + kPartOfColumn;
    Vec<R> part[T][B] = {};
    for (int c = from; c < to; ++c) {
      Vec<R> weights[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) weights[b] = load<R>(a + b * panel_size + std::int64_t{c} * R);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const float value = x[t * x_stride + c];
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) part[t][b] += weights[b] * value;
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) sum[t][b] += part[t][b];
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) store<R>(y[t] + b * R, sum[t][b]);
  }
}

// Columns and panels that together fit the registers.
constexpr int kColumnsTogether = 4;
constexpr int kPanelsTogether = kRegisters * (kWide < 8 ? kWide : 8) / 64;

// Calls finish(column, first row, its accumulators, how many) for all of `columns` and `count`
// panels.
template <int R, typename Finish>
void multiply_all_columns(const float* a, const Panels& panels, int count, const float* x,
                          std::int64_t x_stride, int columns, const Finish& finish) {
  const auto run = [&](auto t_size, auto b_size, int t, int panel) {
    constexpr int T = decltype(t_size)::value, B = decltype(b_size)::value;
    float accumulators[T][B * R];
    multiply_columns<T, B, R>(a + panel * panels.panel_size(), panels.panel_size(), panels.depth,
                              x + t * x_stride, x_stride, accumulators);
    for (int i = 0; i < T; ++i) finish(t + i, panel * R, accumulators[i], B * R);
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Columns = std::integral_constant<int, kColumnsTogether>;
  using PanelCount = std::integral_constant<int, kPanelsTogether>;
  int t = 0;
  for (; t + kColumnsTogether <= columns; t += kColumnsTogether) {
    int panel = 0;
    for (; panel + kPanelsTogether <= count; panel += kPanelsTogether) {
      run(Columns(), PanelCount(), t, panel);
    }
    for (; kPanelsTogether > 2 && panel + 2 <= count; panel += 2) run(Columns(), Two(), t, panel);
    for (; panel < count; ++panel) run(Columns(), One(), t, panel);
  }
  for (; t < columns; ++t) {
    int panel = 0;
    for (; panel + kPanelsTogether <= count; panel += kPanelsTogether) {
      run(One(), PanelCount(), t, panel);
    }
    for (; panel < count; ++panel) run(One(), One(), t, panel);
  }
}

// Packs rows of a matrix, `columns` apart each value and `stride` apart each row, as one panel.
inline void pack_panel(const float* matrix, std::int64_t stride, std::int64_t columns, int rows,
                       const Panels& panels, float* to) {
  if (stride == 1 && rows >= panels.rows) {
    for (int c = 0; c < panels.depth; ++c, to += panels.rows) {
      std::memcpy(to, matrix + c * columns, panels.rows * sizeof(float));
    }
    return;
  }
  for (int c = 0; c < panels.depth; ++c) {
    for (int m = 0; m < panels.rows; ++m) {
      *to++ = m < rows ? matrix[m * stride + c * columns] : 0.0f;
    }
  }
}

template <int W>
CNN_ENGINE_INLINE Vec<W> every_second(Vec<W> a, Vec<W> b) {
  IntVec<W> positions;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) positions[i] = 2 * i;
  return __builtin_shuffle(a, b, positions);
}

// to[i] = from[i * stride] for i < count. Whole vectors where they end before `end`: what is
// written past `count` is written again later, or is past the tile.
CNN_ENGINE_INLINE void copy_run(float* to, const float* from, int count, int stride,
                                const float* end) {
  int i = 0;
  if (stride == 1) {
    for (; i < count && end - from >= i + kWide; i += kWide) {
      store<kWide>(to + i, load<kWide>(from + i));
    }
  } else if (stride == 2) {
    for (; i < count && end - from >= 2 * (i + kWide); i += kWide) {
      store<kWide>(to + i, every_second<kWide>(load<kWide>(from + 2 * i),
                                               load<kWide>(from + 2 * i + kWide)));
    }
  }
  for (; i < count; ++i) to[i] = from[std::int64_t{i} * stride];
}

CNN_ENGINE_INLINE void fill_zero(float* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = 0.0f;
}

// Scratch for the threads of one call, from the call's workspace: a body takes a part when it
// begins, its thread's own if it can, and gives it back when it ends, so there are as many parts as
// threads.
class Scratch {
 public:
  static constexpr std::int64_t kHeader = 64;

  static std::int64_t bytes(int threads, std::int64_t floats) {
    return threads * (kHeader + (floats + 15) / 16 * 64) + 64;
  }

  Scratch(void* workspace, int threads, std::int64_t floats)
      : memory_(
            reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(workspace) + 63) / 64 * 64)),
        step_(kHeader + (floats + 15) / 16 * 64),
        threads_(threads) {
    for (int i = 0; i < threads; ++i) {
      flag(i)[0] = 0;
      flag(i)[1] = -1;
    }
  }

  class Part {
   public:
    explicit Part(const Scratch& scratch) {
      int i = loop_thread() % scratch.threads_;
      // At most as many bodies run as there are parts: one is free.
      while (__atomic_exchange_n(scratch.flag(i), 1, __ATOMIC_ACQUIRE) != 0) {
        i = (i + 1) % scratch.threads_;
      }
      flag_ = scratch.flag(i);
    }
    ~Part() { __atomic_store_n(flag_, 0, __ATOMIC_RELEASE); }
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;
    float* data() const {
      return reinterpret_cast<float*>(reinterpret_cast<char*>(flag_) + kHeader);
    }
    // What the body before left here, whatever thread it was on: a number of the caller's, at first
    // -1.
    int& holds() const { return flag_[1]; }

   private:
    int* flag_;
  };

 private:
  int* flag(int i) const { return reinterpret_cast<int*>(memory_ + i * step_); }

  char* memory_;
  std::int64_t step_;
  int threads_;
};

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
