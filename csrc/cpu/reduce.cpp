// reduce and arg_extreme on the CPU: along the memory where the axis is the last dimension, else
// for columns side by side. Sums are of doubles, on SIMD lanes.
#include "ops/reduce.h"

#include <memory>

#include "cpu/blocked.h"
#include "cpu/math.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr int kDoubles = kWide / 2;  // of a vector
using Doubles = double __attribute__((vector_size(8 * kDoubles)));

// So many floats as doubles, by one instruction: GCC 12 converts wide vectors by halves.
CNN_ENGINE_INLINE Doubles widened(const float* from) {
#if defined(__AVX512F__)
  return _mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif defined(__AVX2__)
  return _mm256_cvtps_pd(_mm_loadu_ps(from));
#else
  using Floats = float __attribute__((vector_size(4 * kDoubles)));
  return __builtin_convertvector(load_as<Floats>(from), Doubles);
#endif
}

// What is summed for an element, or for each of a vector.
struct Itself {
  template <typename T>
  CNN_ENGINE_INLINE static T of(T x) {
    return x;
  }
};
struct Magnitude {
  template <typename T>
  CNN_ENGINE_INLINE static T of(T x) {
    return x < 0.0 ? -x : x;
  }
};
struct Square {
  template <typename T>
  CNN_ENGINE_INLINE static T of(T x) {
    return x * x;
  }
};

// The results of four lines by vectors of doubles.
template <typename Kind>
CNN_ENGINE_INLINE void four_in_doubles(const float* const (&x)[4], std::int64_t count,
                                       double (&results)[4]) {
  Doubles value[4];
  for (Doubles& each : value) each = Kind::kStart - Doubles{};
  std::int64_t i = 0;
  for (; i + kDoubles <= count; i += kDoubles) {
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      value[line] = Kind::take(value[line], widened(x[line] + i));
    }
  }
#pragma GCC unroll 4
  for (int line = 0; line < 4; ++line) {
    double result = value[line][0];
#pragma GCC unroll 8
    for (int lane = 1; lane < kDoubles; ++lane) result = Kind::join(result, value[line][lane]);
    for (std::int64_t rest = i; rest < count; ++rest) result = Kind::take(result, x[line][rest]);
    results[line] = result;
  }
}

// Each reduction: what it starts with, how it takes an element in, and how it joins two results.
// `four` makes the results of four lines at once: the additions of a single one would wait for each
// other.

template <typename Map>
struct Sum {
  using State = double;
  static constexpr double kStart = 0.0;
  template <typename T, typename X>
  CNN_ENGINE_INLINE static T take(T sum, X x) {
    return sum + Map::of(static_cast<T>(x));
  }
  CNN_ENGINE_INLINE static double join(double a, double b) { return a + b; }
  static void four(const float* const (&x)[4], std::int64_t count, double (&results)[4]) {
    four_in_doubles<Sum>(x, count, results);
  }
};

struct Product {
  using State = double;
  static constexpr double kStart = 1.0;
  template <typename T, typename X>
  CNN_ENGINE_INLINE static T take(T product, X x) {
    return product * static_cast<T>(x);
  }
  CNN_ENGINE_INLINE static double join(double a, double b) { return a * b; }
  static void four(const float* const (&x)[4], std::int64_t count, double (&results)[4]) {
    four_in_doubles<Product>(x, count, results);
  }
};

// The largest, or the smallest: of the numbers with their sign turned, the largest. NaN wins.
template <int sign>
struct Extreme {
  using State = float;
  static constexpr float kStart = sign * -__builtin_inff();
  CNN_ENGINE_INLINE static float take(float best, float x) {
    return (sign * x > sign * best) | (x != x) ? x : best;
  }
  CNN_ENGINE_INLINE static float join(float a, float b) { return take(a, b); }
  static void four(const float* const (&x)[4], std::int64_t count, float (&best)[4]) {
    const float *p = x[0], *q = x[1], *r = x[2], *s = x[3];
    float a = -__builtin_inff(), b = a, c = a, d = a;
    int nan_a = 0, nan_b = 0, nan_c = 0, nan_d = 0;
#pragma omp simd reduction(max : a, b, c, d) reduction(| : nan_a, nan_b, nan_c, nan_d)
    for (std::int64_t i = 0; i < count; ++i) {
      const float of_p = sign * p[i], of_q = sign * q[i], of_r = sign * r[i], of_s = sign * s[i];
      a = of_p > a ? of_p : a;
      b = of_q > b ? of_q : b;
      c = of_r > c ? of_r : c;
      d = of_s > d ? of_s : d;
      nan_a |= of_p != of_p;
      nan_b |= of_q != of_q;
      nan_c |= of_r != of_r;
      nan_d |= of_s != of_s;
    }
    const float largest[4] = {a, b, c, d};
    const int nan[4] = {nan_a, nan_b, nan_c, nan_d};
    for (int i = 0; i < 4; ++i) best[i] = nan[i] ? __builtin_nanf("") : sign * largest[i];
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
// Elements of a line up to which four lines are reduced at once; a longer one is cut in four.
constexpr std::int64_t kShortLine = 512;
// Columns side by side that are reduced together.
constexpr std::int64_t kColumns = 256;
// Rows of many columns, such as the positions of an image, are reduced in so many pieces at most,
// of so many elements and rows at least: a thread reads those that it wrote itself, and what a
// piece comes to is little beside what it reads.
constexpr std::int64_t kMostPieces = 8, kPiece = 1 << 13, kPieceRows = 16;

// The result of a line that is long enough to be cut in four.
template <typename Kind>
typename Kind::State reduce_line(const float* x, std::int64_t count) {
  const std::int64_t quarter = count / 4;
  typename Kind::State of[4];
  Kind::four({x, x + quarter, x + 2 * quarter, x + 3 * quarter}, quarter, of);
  typename Kind::State value = Kind::join(Kind::join(of[0], of[1]), Kind::join(of[2], of[3]));
  for (std::int64_t i = 4 * quarter; i < count; ++i) value = Kind::take(value, x[i]);
  return value;
}

// Lines that are no longer than that are taken four at a time. The last of fewer is repeated: a
// line's result depends neither on how many there are nor on how they are shared out.
template <typename Kind>
void reduce_short_lines(const float* x, float* y, const AxisShape& p, Reduction reduction,
                        int threads) {
  parallel_for((p.outer + 3) / 4, 4 * p.axis, threads, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t o = 4 * begin; o < 4 * end && o < p.outer; o += 4) {
      const int lines = p.outer - o < 4 ? static_cast<int>(p.outer - o) : 4;
      const auto line = [&](int i) {
        return x + (o + (i < lines ? i : lines - 1)) * p.axis;
      };
      typename Kind::State of[4];
      Kind::four({line(0), line(1), line(2), line(3)}, p.axis, of);
      for (int i = 0; i < lines; ++i) {
        y[o + i] = static_cast<float>(finish(reduction, of[i], p.axis));
      }
    }
  });
}

template <typename Kind>
void reduce_lines(const float* x, float* y, const AxisShape& p, Reduction reduction, int threads) {
  if (p.axis <= kShortLine) return reduce_short_lines<Kind>(x, y, p, reduction, threads);
  const std::int64_t parts = (p.axis + kPart - 1) / kPart;
  using State = typename Kind::State;
  const std::unique_ptr<State[]> results(new State[p.outer * parts]);
  State* const result = results.get();
  parallel_for(p.outer * parts, p.axis / parts, threads, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i % parts * kPart;
      const std::int64_t count = p.axis - first < kPart ? p.axis - first : kPart;
      result[i] = reduce_line<Kind>(x + i / parts * p.axis + first, count);
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
