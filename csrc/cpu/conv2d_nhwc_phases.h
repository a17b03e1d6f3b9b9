// The planar method of conv2d_nhwc for first layers of 7 or 8 columns with a stride of 2, as
// Winograd's convolution along rows.
//
// With a stride of 2 the columns of an image are two phases, and a pair of pixels is one position
// of 2 C channels: along a row the convolution is one of 4 kernel offsets with a stride of 1, a
// missing kernel offset is zero. A tile of 3 outputs is made of 6 positions: 12 products for each
// of C and row of the kernel, where 7 kernel offsets take 21. The points are those of winograd4,
// but rows are summed as they are: in one dimension alone rounding errors grow by half as much, and
// those of a first layer all layers multiply.
//
// Outputs whose windows do not allow a tile's rounding errors (window_bound.h) are computed
// directly after it. Work is shared out in bands of output rows. All frequencies of some tiles and
// filters are summed in registers, some rows of the kernel at a time, and transformed there.
#pragma once

#include "cpu/conv2d_nhwc_winograd.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr int kPhaseKernelOffsets = 4, kPhaseSide = 6, kPhaseOutputs = 3;
// Of a position, in floats: as many channels as there may be.
constexpr int kPhasePosition = 8;
constexpr int kPhaseTile = kPhaseSide * kPhasePosition;  // of V
// Output rows of a task, which reads five rows more than twice as many.
constexpr int kPhaseRows = 14;
constexpr int kPhaseLeastOutputs = 8;
// Rows of the kernel whose products are summed by themselves: with four the error of DenseNet-121's
// logits is 4 % larger (RMS), and the time the same.
constexpr int kPhaseSum = 2;
// Vectors of filters, and tiles, of which all sums are in registers.
constexpr int kPhaseVectors = kRegisters == 32 ? 2 : 1, kPhaseTiles = 2;

inline bool is_phased(const Conv2dShape& p) {
  return p.groups == 1 && p.stride_h == 2 && p.stride_w == 2 && p.dilation_h == 1 &&
         p.dilation_w == 1 && p.s > 2 * (kPhaseKernelOffsets - 1) &&
         p.s <= 2 * kPhaseKernelOffsets && 2 * p.c <= kPhasePosition && p.k >= kFilterGroup &&
         p.out_w() >= kPhaseLeastOutputs;
}

struct PhasesShape;

// Of a task: what window_bound.h asks of its input rows, for each output that a row takes part in.
struct PhaseSums {
  float* sizes;    // [rows][outputs]: l(x), times the columns' factors
  float* squares;  // [rows][outputs]: e(x)
  float* tiles;    // [rows][tiles]: e(x) of a tile's positions
  float* columns;  // [2][columns of a row]: scratch memory

  PhaseSums(float* memory, const PhasesShape& shape, const Conv2dShape& p);
  static std::int64_t floats(const PhasesShape& shape, const Conv2dShape& p);
};

struct PhasesShape {
  int channels;  // of a position
  int tiles;     // of a row
  int tasks;     // of an image
  int width;     // positions of a row

  explicit PhasesShape(const Conv2dShape& p)
      : channels(2 * p.c),
        tiles((p.out_w() + kPhaseOutputs - 1) / kPhaseOutputs),
        tasks((p.out_h() + kPhaseRows - 1) / kPhaseRows),
        width((tiles + 1) * kPhaseOutputs) {}
  std::int64_t group(const Conv2dShape& p) const {
    return std::int64_t{p.r} * channels * kPhaseSide * kFilterGroup;
  }
  std::int64_t positions() const { return std::int64_t{width} * kPhasePosition; }
  std::int64_t row() const { return std::int64_t{tiles} * kPhaseTile; }         // of V
  int in_rows(const Conv2dShape& p) const { return 2 * kPhaseRows + p.r - 2; }  // at most
  std::int64_t outputs() const { return std::int64_t{tiles} * kPhaseOutputs; }  // of a row
  std::int64_t floats(const Conv2dShape& p) const {
    return positions() + in_rows(p) * row() + PhaseSums::floats(*this, p) +
           DirectOutputs::floats(p.filter_size(), p.k);
  }
};

inline PhaseSums::PhaseSums(float* memory, const PhasesShape& shape, const Conv2dShape& p) {
  sizes = memory;
  squares = sizes + shape.in_rows(p) * shape.outputs();
  tiles = squares + shape.in_rows(p) * shape.outputs();
  columns = tiles + std::int64_t{shape.in_rows(p)} * shape.tiles;
}
inline std::int64_t PhaseSums::floats(const PhasesShape& shape, const Conv2dShape& p) {
  return shape.in_rows(p) * (2 * shape.outputs() + shape.tiles) + 4 * std::int64_t{shape.width};
}

// y = A^T m
template <typename V>
CNN_ENGINE_INLINE void output_transform(const V (&m)[6], V (&y)[3]) {
  const V sum1 = m[1] + m[2], difference1 = kPointA * (m[1] - m[2]);
  const V sum2 = m[3] + m[4], difference2 = kPointB * (m[3] - m[4]);
  y[0] = (m[0] + sum1) + sum2;
  y[1] = difference1 + difference2;
  y[2] = (kSquareA * sum1 + m[5]) + kSquareB * sum2;
}

// The weights as they are, one position of all terms.
inline Conv2dShape phases_direct(const Conv2dShape& p) {
  return {1, p.filter_size(), 1, 1, p.k, 1, 1, 1, 1, 0, 0};
}

inline std::int64_t phases_packed(const Conv2dShape& p) {
  return kBoundFloats + direct_packed<Float32>(p, true) +
         filter_groups(p.k) * PhasesShape(p).group(p);
}

inline WindowBound phases_bound(const float* weight, const Conv2dShape& p) {
  const double tile_part = 2.0 * kPhaseSide / p.s;
  return window_bound(weight, p.k, p.c, p.r, p.s,
                      {kProductRounding * 12 / std::sqrt(p.r), tile_part});
}

// The bound; the weights for direct outputs; U = G g: [groups][rows][channels of a
// position][frequencies][kFilterGroup].
inline void phases_pack(const float* weight, float* packed, const WindowBound& bound,
                        const Conv2dShape& p) {
  __builtin_memcpy(packed, &bound, sizeof bound);
  packed += kBoundFloats;
  direct_pack<Float32>(weight, packed, phases_direct(p));
  packed += direct_packed<Float32>(p, true);
  constexpr double points[7] = {0, kPointA, -kPointA, kPointB, -kPointB};
  double g[8][5];
  fused::kernel_transform(points, kPhaseSide - 1, kPhaseKernelOffsets, g);
  const PhasesShape shape(p);
  for (int k = 0; k < filter_groups(p.k) * kFilterGroup; ++k) {
    float* to = packed + k / kFilterGroup * shape.group(p) + k % kFilterGroup;
    for (int r = 0; r < p.r; ++r) {
      for (int channel = 0; channel < shape.channels; ++channel) {
        const int c = channel / 2, phase = channel % 2;
        for (int i = 0; i < kPhaseSide; ++i, to += kFilterGroup) {
          double u = 0;
          for (int s = phase; k < p.k && s < p.s; s += 2) {
            u += g[i][s / 2] * weight[((std::int64_t{k} * p.c + c) * p.r + r) * p.s + s];
          }
          *to = static_cast<float>(u);
        }
      }
    }
  }
}

// V of row y of an image, which may lie outside: [tiles][frequencies][kPhasePosition]. `positions`
// is scratch memory.
inline void write_phase_row(const float* image, const Conv2dShape& p, const PhasesShape& shape,
                            int y, float* positions, float* v) {
  if (y < 0 || y >= p.h) return fill_zero(v, shape.row());
  // Positions with both pixels inside the image.
  int begin = (p.pad_left + 1) / 2, end = (p.w + p.pad_left) / 2;
  if (end > shape.width) end = shape.width;
  if (begin > end) begin = end;
  for (int c = 0; c < p.c; ++c) {
    const float* row = image + (std::int64_t{c} * p.h + y) * p.w - p.pad_left;
    float* to = positions + 2 * c;
    const auto write_some = [&](int from, int past) {
      for (int x = 2 * from; x < 2 * past; ++x) {
        const bool is_inside = x >= p.pad_left && x < p.w + p.pad_left;
        to[x / 2 * kPhasePosition + x % 2] = is_inside ? row[x] : 0.0f;
      }
    };
    write_some(0, begin);
    for (int x = begin; x < end; ++x) {
      __builtin_memcpy(to + x * kPhasePosition, row + 2 * x, 2 * sizeof(float));
    }
    write_some(end, shape.width);
  }
  for (int tile = 0; tile < shape.tiles; ++tile, v += kPhaseTile) {
    const float* from = positions + std::int64_t{tile} * kPhaseOutputs * kPhasePosition;
    for (int c = 0; c < shape.channels; c += kNarrow) {
      Vec<kNarrow> d[kPhaseSide], o[kPhaseSide];
#pragma GCC unroll 6
      for (int i = 0; i < kPhaseSide; ++i) d[i] = load<kNarrow>(from + i * kPhasePosition + c);
      input_transform(d, o);
#pragma GCC unroll 6
      for (int i = 0; i < kPhaseSide; ++i) store<kNarrow>(v + i * kPhasePosition + c, o[i]);
    }
  }
}

// PhaseSums of row y of an image, which is row `index` of the task's.
inline void measure_phase_row(const float* image, const Conv2dShape& p, const PhasesShape& shape,
                              const WindowBound& bound, int y, int index, const PhaseSums& sums) {
  const std::int64_t outputs = shape.outputs();
  float* size = sums.sizes + index * outputs;
  float* square = sums.squares + index * outputs;
  float* tile = sums.tiles + std::int64_t{index} * shape.tiles;
  fill_zero(size, outputs);
  fill_zero(square, outputs);
  fill_zero(tile, shape.tiles);
  if (y < 0 || y >= p.h) return;
  // Even columns, then odd ones.
  float* sizes = sums.columns;
  float* squares = sums.columns + 2 * shape.width;
  fill_zero(sizes, 4 * shape.width);
  int end = p.w + p.pad_left;
  if (end > 2 * shape.width) end = 2 * shape.width;
  for (int c = 0; c < p.c; ++c) {
    const float* row = image + (std::int64_t{c} * p.h + y) * p.w - p.pad_left;
    for (int phase = 0; phase < 2; ++phase) {
      const int first = (p.pad_left + 1 - phase) / 2;
      float* l = sizes + phase * shape.width;
      float* e = squares + phase * shape.width;
      for (int i = first; i < (end + 1 - phase) / 2; ++i) {
        const float x = row[2 * i + phase];
        l[i] += absolute(x);
        e[i] += x * x + (x != 0.0f ? kSomething : 0.0f);
      }
    }
  }
  for (int s = 0; s < p.s; ++s) {
    const float* l = sizes + s % 2 * shape.width + s / 2;
    const float* e = squares + s % 2 * shape.width + s / 2;
    const float factor = bound.columns[s];
    for (std::int64_t j = 0; j < outputs; ++j) {
      size[j] += factor * l[j];
      square[j] += e[j];
    }
  }
  for (int i = 0; i < shape.width; ++i) squares[i] += squares[shape.width + i];
  // Tiles share half of their positions with the next.
  static_assert(kPhaseSide == 2 * kPhaseOutputs && kPhaseOutputs == 3);
  float half = (squares[0] + squares[1]) + squares[2];
  for (int t = 0; t < shape.tiles; ++t) {
    const float* next = squares + (t + 1) * kPhaseOutputs;
    tile[t] = half;
    half = (next[0] + next[1]) + next[2];
    tile[t] += half;
  }
}

// The outputs of some rows of image n, of which the first is `first`, that are computed directly.
inline void write_phase_direct(const Winograd& call, const Conv2dShape& p, const PhasesShape& shape,
                               const WindowBound& bound, const PhaseSums& sums, std::int64_t n,
                               int first, int rows, DirectOutputs outputs) {
  const int out_w = p.out_w();
  const float* image = call.input + n * p.c * p.h * p.w;
  for (int i = 0; i < rows; ++i) {
    float* held = sums.columns;
    float* part = held + shape.outputs();
    float* energy = part + shape.outputs();
    fill_zero(held, 4 * shape.width);
    for (int r = 0; r < p.r; ++r) {
      const std::int64_t row = 2 * i + r;
      const float factor = bound.rows[r];
      for (std::int64_t j = 0; j < shape.outputs(); ++j) {
        held[j] += factor * sums.sizes[row * shape.outputs() + j];
        part[j] += sums.squares[row * shape.outputs() + j];
      }
      for (int t = 0; t < shape.tiles; ++t) energy[t] += sums.tiles[row * shape.tiles + t];
    }
    for (int t = 0; t < shape.tiles; ++t) energy[t] = std::sqrt(bound.tile * energy[t]);
    for (int j = 0; j < out_w; ++j) {
      const float tile = energy[j / kPhaseOutputs];
      if (tile == 0.0f) continue;  // zeros alone: exact
      if (is_inside(bound, held[j], part[j], tile)) continue;
      const int top = 2 * (first + i) - p.pad_top, left = 2 * j - p.pad_left;
      float* to = outputs.window();
      bool any = false;
      for (int c = 0; c < p.c; ++c) {
        for (int r = 0; r < p.r; ++r) {
          for (int s = 0; s < p.s; ++s) {
            const int y = top + r, x = left + s;
            const bool inside = y >= 0 && y < p.h && x >= 0 && x < p.w;
            *to = inside ? image[(std::int64_t{c} * p.h + y) * p.w + x] : 0.0f;
            any |= *to++ != 0.0f;  // NaN, too
          }
        }
      }
      outputs.add((n * p.out_h() + first + i) * out_w + j, any);
    }
  }
  outputs.compute();
}

// A row of outputs.
struct PhaseOutput {
  float* y;
  const float* residual;  // or null
  std::int64_t pitch, residual_pitch;
  int columns;
};

// Outputs of T tiles side by side and of B vectors of filters from k on, of which there are `count`
// or more. v is the first tile's in the first row that is read. Inlined, its sums would leave the
// registers.
template <int W, int B, int T>
[[gnu::noinline]] void phase_tiles(const float* u, const float* v, const Conv2dShape& p,
                                   const PhasesShape& shape, const PhaseOutput& to,
                                   const Epilogue& epilogue, int k, int count) {
  const std::int64_t group = shape.group(p);
  Vec<W> y[T][B][kPhaseOutputs];
  for (int first = 0; first < p.r; first += kPhaseSum) {
    const int last = first + kPhaseSum < p.r ? first + kPhaseSum : p.r;
    Vec<W> sum[T][B][kPhaseSide] = {};
    for (int r = first; r < last; ++r) {
      const float* x = v + r * shape.row();
      for (int c = 0; c < shape.channels; ++c, ++x, u += kPhaseSide * kFilterGroup) {
#pragma GCC unroll 6
        for (int i = 0; i < kPhaseSide; ++i) {
          Vec<W> weights[B];
#pragma GCC unroll 2
          for (int b = 0; b < B; ++b) {
            weights[b] =
                load<W>(u + i * kFilterGroup + b * W / kFilterGroup * group + b * W % kFilterGroup);
            keep(weights[b]);
          }
#pragma GCC unroll 2
          for (int t = 0; t < T; ++t) {
            const float value = x[t * kPhaseTile + i * kPhasePosition];
#pragma GCC unroll 2
            for (int b = 0; b < B; ++b) sum[t][b][i] += weights[b] * value;
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int b = 0; b < B; ++b) {
        Vec<W> o[kPhaseOutputs];
        output_transform(sum[t][b], o);
#pragma GCC unroll 3
        for (int j = 0; j < kPhaseOutputs; ++j) y[t][b][j] = first ? y[t][b][j] + o[j] : o[j];
      }
    }
  }
  if (count >= B * W && to.columns >= T * kPhaseOutputs) {
    const Epilogue last = epilogue;
#pragma GCC unroll 2
    for (int b = 0; b < B; ++b) {
      const int at = k + b * W;
      Vec<W> bias{};
      if (last.bias) bias = load<W>(last.bias + at);
#pragma GCC unroll 6
      for (int j = 0; j < T * kPhaseOutputs; ++j) {
        Vec<W> value = y[j / kPhaseOutputs][b][j % kPhaseOutputs] + bias;
        if (to.residual) value += load<W>(to.residual + j * to.residual_pitch + at);
        store<W>(to.y + j * to.pitch + at, finished(last, value));
      }
    }
    return;
  }
  for (int b = 0; b < B && b * W < count; ++b) {
    const int at = k + b * W, some = count - b * W;
    Vec<W> bias{};
    if (epilogue.bias) bias = load_some<W>(epilogue.bias + at, some);
    for (int j = 0; j < T * kPhaseOutputs && j < to.columns; ++j) {
      Vec<W> value = y[j / kPhaseOutputs][b][j % kPhaseOutputs] + bias;
      if (to.residual) value += load_some<W>(to.residual + j * to.residual_pitch + at, some);
      store_some<W>(to.y + j * to.pitch + at, finished(epilogue, value), some);
    }
  }
}

// A row of outputs of B vectors of filters from k on.
template <int W, int B>
void phase_row(const Winograd& call, const float* v, const Conv2dShape& p, const PhasesShape& shape,
               const PhaseOutput& to, int k) {
  const float* u = call.packed + k / kFilterGroup * shape.group(p) + k % kFilterGroup;
  PhaseOutput at = to;
  int tile = 0;
  const auto tiles = [&](auto size) {
    constexpr int T = decltype(size)::value;
    for (; tile + T <= shape.tiles; tile += T) {
      phase_tiles<W, B, T>(u, v + std::int64_t{tile} * kPhaseTile, p, shape, at, call.epilogue, k,
                           p.k - k);
      at.y += T * kPhaseOutputs * at.pitch;
      if (at.residual) at.residual += T * kPhaseOutputs * at.residual_pitch;
      at.columns -= T * kPhaseOutputs;
    }
  };
  tiles(std::integral_constant<int, kPhaseTiles>());
  tiles(std::integral_constant<int, 1>());
}

inline void phases(Winograd call, const Scratch& scratch, const Conv2dShape& p, int threads) {
  constexpr int W = kWide < kFilterGroup ? kWide : kFilterGroup;
  const PhasesShape shape(p);
  const int out_h = p.out_h(), out_w = p.out_w();
  const Conv2dPitches& pitches = call.pitches;
  const WindowBound bound = unpacked_bound(call.packed);
  const float* weights = call.packed + kBoundFloats;
  call.packed = weights + direct_packed<Float32>(p, true);
  const std::int64_t cost = kPhaseRows * shape.row() * p.r * p.k;
  const std::int64_t tasks = std::int64_t{p.n} * shape.tasks;
  parallel_for(tasks, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    float* positions = part.data();
    float* v = positions + shape.positions();
    float* memory = v + shape.in_rows(p) * shape.row();
    const PhaseSums sums(memory, shape, p);
    float* windows = memory + PhaseSums::floats(shape, p);
    fill_zero(positions, shape.positions());
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t n = index / shape.tasks;
      const int task = static_cast<int>(index % shape.tasks);
      const int first = static_cast<int>(std::int64_t{out_h} * task / shape.tasks);
      const int rows = static_cast<int>(std::int64_t{out_h} * (task + 1) / shape.tasks) - first;
      for (int i = 0; i < 2 * rows + p.r - 2; ++i) {
        const float* image = call.input + n * p.c * p.h * p.w;
        const int y = 2 * first + i - p.pad_top;
        write_phase_row(image, p, shape, y, positions, v + i * shape.row());
        measure_phase_row(image, p, shape, bound, y, i, sums);
      }
      const std::int64_t position = (n * out_h + first) * out_w;
      float* y = call.output + position * pitches.y;
      const float* residual = call.residual ? call.residual + position * pitches.residual : nullptr;
      for (int k = 0; k < p.k;) {
        const bool all = filter_groups(p.k) * kFilterGroup - k >= kPhaseVectors * W;
        for (int i = 0; i < rows; ++i) {
          const std::int64_t at = std::int64_t{i} * out_w;
          const PhaseOutput to{y + at * pitches.y,
                               residual ? residual + at * pitches.residual : nullptr, pitches.y,
                               pitches.residual, out_w};
          const float* from = v + 2 * i * shape.row();
          all ? phase_row<W, kPhaseVectors>(call, from, p, shape, to, k)
              : phase_row<W, 1>(call, from, p, shape, to, k);
        }
        k += all ? kPhaseVectors * W : W;
      }
      call.activation.apply(y, pitches.y, std::int64_t{rows} * out_w, p.k);
      write_phase_direct(call, p, shape, bound, sums, n, first, rows,
                         DirectOutputs(call, weights, p.filter_size(), p.k, 0, p.k, windows));
    }
  });
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
