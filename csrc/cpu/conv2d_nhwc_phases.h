// The planar method of conv2d_nhwc for first layers of 7 or 8 columns with a stride of 2, as
// Winograd's convolution along rows.
//
// With a stride of 2 the columns of an image are two phases, and a pair of pixels is one place of
// 2 C channels: along a row the convolution is one of 4 taps with a stride of 1, a missing tap is
// zero. A tile of 3 outputs is made of 6 places: 12 products for each of C and row of the kernel,
// where 7 taps take 21. The points are those of winograd4, but rows are summed as they are: in one
// dimension alone rounding errors grow by half as much, and those of a first layer all layers
// multiply.
//
// Work is shared out in bands of output rows. All frequencies of some tiles and filters are summed
// in registers, some rows of the kernel at a time, and transformed there.
#pragma once

#include "cpu/conv2d_nhwc_winograd.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr int kPhaseTaps = 4, kPhaseSide = 6, kPhaseOutputs = 3;
// Of a place, in floats: as many channels as there may be.
constexpr int kPhasePlace = 8;
constexpr int kPhaseTile = kPhaseSide * kPhasePlace;  // of V
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
         p.dilation_w == 1 && p.s > 2 * (kPhaseTaps - 1) && p.s <= 2 * kPhaseTaps &&
         2 * p.c <= kPhasePlace && p.k >= kFilterGroup && p.out_w() >= kPhaseLeastOutputs;
}

struct PhasesShape {
  int channels;  // of a place
  int tiles;     // of a row
  int tasks;     // of an image
  int width;     // places of a row

  explicit PhasesShape(const Conv2dShape& p)
      : channels(2 * p.c),
        tiles((p.out_w() + kPhaseOutputs - 1) / kPhaseOutputs),
        tasks((p.out_h() + kPhaseRows - 1) / kPhaseRows),
        width((tiles + 1) * kPhaseOutputs) {}
  std::int64_t group(const Conv2dShape& p) const {
    return std::int64_t{p.r} * channels * kPhaseSide * kFilterGroup;
  }
  std::int64_t places() const { return std::int64_t{width} * kPhasePlace; }
  std::int64_t row() const { return std::int64_t{tiles} * kPhaseTile; }  // of V
  std::int64_t floats(const Conv2dShape& p) const {
    return places() + (2 * kPhaseRows + p.r - 2) * row();
  }
};

// y = A^T m
template <typename V>
CNN_ENGINE_INLINE void tile_output(const V (&m)[6], V (&y)[3]) {
  const V sum1 = m[1] + m[2], difference1 = kPointA * (m[1] - m[2]);
  const V sum2 = m[3] + m[4], difference2 = kPointB * (m[3] - m[4]);
  y[0] = (m[0] + sum1) + sum2;
  y[1] = difference1 + difference2;
  y[2] = (kSquareA * sum1 + m[5]) + kSquareB * sum2;
}

inline std::int64_t phases_packed(const Conv2dShape& p) {
  return filter_groups(p.k) * PhasesShape(p).group(p);
}

// U = G g: [groups][rows][channels of a place][frequencies][kFilterGroup].
inline void phases_pack(const float* weight, float* packed, const Conv2dShape& p) {
  constexpr double points[7] = {0, kPointA, -kPointA, kPointB, -kPointB};
  double g[8][5];
  fused::kernel_transform(points, kPhaseSide - 1, kPhaseTaps, g);
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

// V of row y of an image, which may lie outside: [tiles][frequencies][kPhasePlace]. `places` is
// scratch memory.
inline void write_phase_row(const float* image, const Conv2dShape& p, const PhasesShape& shape,
                            int y, float* places, float* v) {
  if (y < 0 || y >= p.h) return fill_zero(v, shape.row());
  // Places with both pixels inside the image.
  int begin = (p.pad_left + 1) / 2, end = (p.w + p.pad_left) / 2;
  if (end > shape.width) end = shape.width;
  if (begin > end) begin = end;
  for (int c = 0; c < p.c; ++c) {
    const float* row = image + (std::int64_t{c} * p.h + y) * p.w - p.pad_left;
    float* to = places + 2 * c;
    const auto write_some = [&](int from, int past) {
      for (int x = 2 * from; x < 2 * past; ++x) {
        const bool is_inside = x >= p.pad_left && x < p.w + p.pad_left;
        to[x / 2 * kPhasePlace + x % 2] = is_inside ? row[x] : 0.0f;
      }
    };
    write_some(0, begin);
    for (int x = begin; x < end; ++x) {
      __builtin_memcpy(to + x * kPhasePlace, row + 2 * x, 2 * sizeof(float));
    }
    write_some(end, shape.width);
  }
  for (int tile = 0; tile < shape.tiles; ++tile, v += kPhaseTile) {
    const float* from = places + std::int64_t{tile} * kPhaseOutputs * kPhasePlace;
    for (int c = 0; c < shape.channels; c += kNarrow) {
      Vec<kNarrow> d[kPhaseSide], o[kPhaseSide];
#pragma GCC unroll 6
      for (int i = 0; i < kPhaseSide; ++i) d[i] = load<kNarrow>(from + i * kPhasePlace + c);
      tile_input(d, o);
#pragma GCC unroll 6
      for (int i = 0; i < kPhaseSide; ++i) store<kNarrow>(v + i * kPhasePlace + c, o[i]);
    }
  }
}

// A row of outputs.
struct PhaseOutput {
  float* y;
  const float* residual;  // or null
  std::int64_t pitch, residual_pitch;
  int columns;
};

// Outputs of T tiles side by side and of B vectors of filters from k on, of which there are `count`
// or more. v is the first tile's in the first row that is read.
template <int W, int B, int T>
void phase_tiles(const float* u, const float* v, const Conv2dShape& p, const PhasesShape& shape,
                 const PhaseOutput& to, const Epilogue& epilogue, int k, int count) {
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
            const float value = x[t * kPhaseTile + i * kPhasePlace];
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
        tile_output(sum[t][b], o);
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

inline void phases(const Winograd& call, const Scratch& scratch, const Conv2dShape& p,
                   int threads) {
  constexpr int W = kWide < kFilterGroup ? kWide : kFilterGroup;
  const PhasesShape shape(p);
  const int out_h = p.out_h(), out_w = p.out_w();
  const Conv2dPitches& pitches = call.pitches;
  const std::int64_t cost = kPhaseRows * shape.row() * p.r * p.k;
  const std::int64_t tasks = std::int64_t{p.n} * shape.tasks;
  parallel_for(tasks, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    float* places = part.data();
    float* v = places + shape.places();
    fill_zero(places, shape.places());
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t n = index / shape.tasks;
      const int task = static_cast<int>(index % shape.tasks);
      const int first = static_cast<int>(std::int64_t{out_h} * task / shape.tasks);
      const int rows = static_cast<int>(std::int64_t{out_h} * (task + 1) / shape.tasks) - first;
      for (int i = 0; i < 2 * rows + p.r - 2; ++i) {
        write_phase_row(call.input + n * p.c * p.h * p.w, p, shape, 2 * first + i - p.pad_top,
                        places, v + i * shape.row());
      }
      const std::int64_t place = (n * out_h + first) * out_w;
      float* y = call.output + place * pitches.y;
      const float* residual = call.residual ? call.residual + place * pitches.residual : nullptr;
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
    }
  });
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
