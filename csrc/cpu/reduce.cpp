// reduce and arg_extreme on the CPU: along the memory where the axis is the last dimension, else
// for columns side by side. Sums are of doubles, on SIMD lanes.
#include "ops/reduce.h"

#include <memory>

#include "cpu/math.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// What is summed for an element.
struct Itself {
  static inline __attribute__((always_inline)) double of(double x) { return x; }
};
struct Magnitude {
  static inline __attribute__((always_inline)) double of(double x) { return math::magnitude(x); }
};
struct Square {
  static inline __attribute__((always_inline)) double of(double x) { return x * x; }
};

// Each reduction: what it starts with, how it takes an element in, how it joins two results, and
// how it ends. `line` is that of elements side by side.

template <typename Map>
struct Sum {
  using State = double;
  static constexpr double kStart = 0.0;
  static inline __attribute__((always_inline)) double take(double sum, double x) {
    return sum + Map::of(x);
  }
  static inline __attribute__((always_inline)) double join(double a, double b) { return a + b; }
  static double line(const float* x, std::int64_t count) {
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < count; ++i) sum += Map::of(x[i]);
    return sum;
  }
};

struct Product {
  using State = double;
  static constexpr double kStart = 1.0;
  static inline __attribute__((always_inline)) double take(double product, double x) {
    return product * x;
  }
  static inline __attribute__((always_inline)) double join(double a, double b) { return a * b; }
  static double line(const float* x, std::int64_t count) {
    double product = 1.0;
#pragma omp simd reduction(* : product)
    for (std::int64_t i = 0; i < count; ++i) product *= x[i];
    return product;
  }
};

// The largest, or the smallest: of the numbers with their sign turned, the largest. NaN wins.
template <int sign>
struct Extreme {
  using State = float;
  static constexpr float kStart = sign * -__builtin_inff();
  static inline __attribute__((always_inline)) float take(float best, float x) {
    return (sign * x > sign * best) | (x != x) ? x : best;
  }
  static inline __attribute__((always_inline)) float join(float a, float b) { return take(a, b); }
  static float line(const float* x, std::int64_t count) {
    float best = -__builtin_inff();
    int nan = 0;
#pragma omp simd reduction(max : best) reduction(| : nan)
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = sign * x[i];
      best = value > best ? value : best;
      nan |= value != value;
    }
    return nan ? __builtin_nanf("") : sign * best;
  }
};

// Of a column's sum after the first `count` elements, and of its result.
double finish(Reduction reduction, double value, std::int64_t axis) {
  switch (reduction) {
    case Reduction::mean:
      return value / static_cast<double>(axis);
    case Reduction::l2:
      return __builtin_sqrt(value);
    case Reduction::log_sum:
      return math::log(value);
    default:
      return value;
  }
}

// Elements of a part of a long line: parts are shared out, and their results joined in order, so
// that a single line keeps all threads busy.
constexpr std::int64_t kPart = 1 << 16;
// Columns side by side that are reduced together.
constexpr std::int64_t kColumns = 256;
// Rows of many columns, such as the positions of an image, are reduced in so many pieces at most,
// of so many elements and rows at least: a thread reads those that it wrote itself, and what a
// piece comes to is little beside what it reads.
constexpr std::int64_t kMostPieces = 8, kPiece = 1 << 13, kPieceRows = 16;

template <typename Kind>
void reduce_lines(const float* x, float* y, const AxisShape& p, Reduction reduction, int threads) {
  if (p.axis <= kPart) {
    parallel_for(p.outer, p.axis, threads, [=](std::int64_t begin, std::int64_t end) {
      for (std::int64_t o = begin; o < end; ++o) {
        y[o] = static_cast<float>(finish(reduction, Kind::line(x + o * p.axis, p.axis), p.axis));
      }
    });
    return;
  }
  const std::int64_t parts = (p.axis + kPart - 1) / kPart;
  using State = typename Kind::State;
  const std::unique_ptr<State[]> results(new State[p.outer * parts]);
  State* const result = results.get();
  parallel_for(p.outer * parts, kPart, threads, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i % parts * kPart;
      const std::int64_t count = p.axis - first < kPart ? p.axis - first : kPart;
      result[i] = Kind::line(x + i / parts * p.axis + first, count);
    }
  });
  for (std::int64_t o = 0; o < p.outer; ++o) {
    State value = Kind::kStart;
    for (std::int64_t i = 0; i < parts; ++i) value = Kind::join(value, result[o * parts + i]);
    y[o] = static_cast<float>(finish(reduction, value, p.axis));
  }
}

// Calls body(first element of x, first of y, columns) for groups of columns side by side.
template <typename Body>
void for_columns(const AxisShape& p, std::int64_t cost, int threads, const Body& body) {
  const std::int64_t groups = (p.inner + kColumns - 1) / kColumns;
  parallel_for(p.outer * groups, p.axis * kColumns * cost, threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t column = i % groups * kColumns;
                   const std::int64_t o = i / groups;
                   const std::int64_t left = p.inner - column;
                   body(o * p.axis * p.inner + column, o * p.inner + column,
                        left < kColumns ? left : kColumns);
                 }
               });
}

// What `rows` rows of columns come to, four at a time: what they came to so far is read and written
// once for these.
template <typename Kind>
void reduce_rows(const float* x, std::int64_t rows, std::int64_t step, std::int64_t columns,
                 typename Kind::State* value) {
  for (std::int64_t i = 0; i < columns; ++i) value[i] = Kind::kStart;
  std::int64_t a = 0;
  for (; a + 4 <= rows; a += 4, x += 4 * step) {
#pragma omp simd
    for (std::int64_t i = 0; i < columns; ++i) {
      typename Kind::State taken = Kind::take(value[i], x[i]);
      taken = Kind::take(taken, x[step + i]);
      taken = Kind::take(taken, x[2 * step + i]);
      value[i] = Kind::take(taken, x[3 * step + i]);
    }
  }
  for (; a < rows; ++a, x += step) {
#pragma omp simd
    for (std::int64_t i = 0; i < columns; ++i) value[i] = Kind::take(value[i], x[i]);
  }
}

// Pieces of the rows first, then what they came to, in order.
template <typename Kind>
void reduce_pieces(const float* x, float* y, const AxisShape& p, std::int64_t pieces,
                   Reduction reduction, int threads) {
  using State = typename Kind::State;
  const std::unique_ptr<State[]> results(new State[p.outer * pieces * p.inner]);
  State* const result = results.get();
  const std::int64_t cost = p.axis / pieces * p.inner;
  parallel_for(p.outer * pieces, cost, threads, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = p.axis * (i % pieces) / pieces;
      const std::int64_t rows = p.axis * (i % pieces + 1) / pieces - first;
      const float* from = x + (i / pieces * p.axis + first) * p.inner;
      for (std::int64_t c = 0; c < p.inner; c += kColumns) {
        const std::int64_t columns = p.inner - c < kColumns ? p.inner - c : kColumns;
        reduce_rows<Kind>(from + c, rows, p.inner, columns, result + i * p.inner + c);
      }
    }
  });
  parallel_for(p.outer, pieces * p.inner, threads, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t o = begin; o < end; ++o) {
      for (std::int64_t c = 0; c < p.inner; ++c) {
        const State* from = result + o * pieces * p.inner + c;
        State value = from[0];
        for (std::int64_t i = 1; i < pieces; ++i) value = Kind::join(value, from[i * p.inner]);
        y[o * p.inner + c] = static_cast<float>(finish(reduction, value, p.axis));
      }
    }
  });
}

template <typename Kind>
void reduce_kind(const float* x, float* y, const AxisShape& p, Reduction reduction, int threads) {
  if (p.inner == 1) return reduce_lines<Kind>(x, y, p, reduction, threads);
  std::int64_t pieces = p.axis * p.inner / kPiece;
  if (pieces > kMostPieces) pieces = kMostPieces;
  if (pieces > p.axis / kPieceRows) pieces = p.axis / kPieceRows;
  if (pieces > 1) return reduce_pieces<Kind>(x, y, p, pieces, reduction, threads);
  for_columns(p, 1, threads, [=](std::int64_t from, std::int64_t to, std::int64_t columns) {
    typename Kind::State value[kColumns];
    reduce_rows<Kind>(x + from, p.axis, p.inner, columns, value);
    for (std::int64_t i = 0; i < columns; ++i) {
      y[to + i] = static_cast<float>(finish(reduction, value[i], p.axis));
    }
  });
}

// The largest is subtracted first, so that exp() does not overflow; not where it is infinite, as
// infinities have no difference.
void log_sum_exp(const float* x, float* y, const AxisShape& p, int threads) {
  for_columns(p, 20, threads, [=](std::int64_t from, std::int64_t to, std::int64_t columns) {
    double largest[kColumns];
    double sum[kColumns];
    for (std::int64_t i = 0; i < columns; ++i) {
      largest[i] = -__builtin_inf();
      sum[i] = 0.0;
    }
    for (std::int64_t a = 0; a < p.axis; ++a) {
      const float* row = x + from + a * p.inner;
      for (std::int64_t i = 0; i < columns; ++i) {
        largest[i] = row[i] > largest[i] ? row[i] : largest[i];
      }
    }
    for (std::int64_t i = 0; i < columns; ++i) {
      if (math::magnitude(largest[i]) == __builtin_inf()) largest[i] = 0.0;
    }
    for (std::int64_t a = 0; a < p.axis; ++a) {
      const float* row = x + from + a * p.inner;
#pragma omp simd
      for (std::int64_t i = 0; i < columns; ++i) sum[i] += math::exp(row[i] - largest[i]);
    }
    for (std::int64_t i = 0; i < columns; ++i) {
      y[to + i] = static_cast<float>(largest[i] + math::log(sum[i]));
    }
  });
}

// Whether the element comes before the best so far: larger, or the first NaN; with `last`, equals
// and later NaNs do too. Both are turned round where the smallest is asked for.
static inline __attribute__((always_inline)) bool better(float x, float best, bool last) {
  const bool nan = x != x;
  const bool best_nan = best != best;
  const bool larger = nan ? !best_nan : x > best;
  return larger || (last && (nan ? best_nan : x == best));
}

}  // namespace

void reduce(const float* x, float* y, const AxisShape& shape, Reduction reduction, int threads) {
  const AxisShape p = shape;
  switch (reduction) {
    case Reduction::sum:
    case Reduction::mean:
    case Reduction::log_sum:
      return reduce_kind<Sum<Itself>>(x, y, p, reduction, threads);
    case Reduction::l1:
      return reduce_kind<Sum<Magnitude>>(x, y, p, reduction, threads);
    case Reduction::l2:
    case Reduction::sum_square:
      return reduce_kind<Sum<Square>>(x, y, p, reduction, threads);
    case Reduction::prod:
      return reduce_kind<Product>(x, y, p, reduction, threads);
    case Reduction::max:
      return reduce_kind<Extreme<1>>(x, y, p, reduction, threads);
    case Reduction::min:
      return reduce_kind<Extreme<-1>>(x, y, p, reduction, threads);
    case Reduction::log_sum_exp:
      return log_sum_exp(x, y, p, threads);
  }
}

void arg_extreme(const float* x, std::int64_t* y, const AxisShape& shape, bool largest, bool last,
                 int threads) {
  const AxisShape p = shape;
  const float sign = largest ? 1.0f : -1.0f;
  for_columns(p, 2, threads, [=](std::int64_t from, std::int64_t to, std::int64_t columns) {
    float best[kColumns];
    for (std::int64_t i = 0; i < columns; ++i) {
      best[i] = sign * x[from + i];
      y[to + i] = 0;
    }
    for (std::int64_t a = 1; a < p.axis; ++a) {
      const float* row = x + from + a * p.inner;
      for (std::int64_t i = 0; i < columns; ++i) {
        const float value = sign * row[i];
        const bool take = better(value, best[i], last);
        best[i] = take ? value : best[i];
        y[to + i] = take ? a : y[to + i];
      }
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
