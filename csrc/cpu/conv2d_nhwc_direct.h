// The direct and planar methods of conv2d_nhwc, in float32 or with what is multiplied rounded to
// bfloat16: pairs of channels are then what a channel is otherwise, four bytes.
//
// Work is shared out in bands of output rows (1x1 convolutions: runs of places) and, where those
// are few, in shares of the filters. What is read with a border, through a prologue or in bfloat16
// is first written out for the band. Included only by files that are compiled once for each
// instruction set.
#pragma once

#include "cpu/nhwc.h"
#include "ops/conv2d_nhwc.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr std::int64_t kBandFloats = 48 << 10;  // of a band: a part of the second-level cache
// The same where the weights do not fit beside it: they are read for every band.
constexpr std::int64_t kLargeBandFloats = 144 << 10;
// Of a band whose inputs are unrolled, at most, and the outputs of a row that is short.
constexpr std::int64_t kUnrolledFloats = 256 << 10;
constexpr int kShortRow = 16;
// Places of a run of a 1x1 convolution.
constexpr int kRunRows = 96, kLeastRunRows = 24;
// Of what a 1x1 convolution reads and writes: more may have left the second-level cache, and is
// asked for a run ahead, where there are channels and filters enough to do so beside their
// products.
constexpr std::int64_t kCachedFloats = 256 << 10;
constexpr int kLongRow = 64;

// Numbers of four bytes that hold so many channels of a place.
constexpr int units(int channels) { return kPairs ? (channels + 1) / 2 : channels; }

struct Prologue {
  const float* scale;
  const float* shift;
  bool per_image;
  float floor;

  bool any() const { return scale != nullptr || shift != nullptr || floor > kNone; }
  static constexpr float kNone = -std::numeric_limits<float>::infinity();
};

// max(x * scale + shift, floor) of the channels of one place; a NaN stays.
inline void write_place(const float* from, float* to, int channels, const float* scale,
                        const float* shift, float floor) {
#if defined(CNN_ENGINE_PAIRS)
  constexpr int W = 16;
  const Vec<W> lowest = splat<W>(floor);
  for (int c = 0; c < channels; c += W) {
    const int count = channels - c;
    Vec<W> value = load_some<W>(from + c, count);
    if (scale) value *= load_some<W>(scale + c, count);
    if (shift) value += load_some<W>(shift + c, count);
    const __m256bh rounded = _mm512_cvtneps_pbh(raised(lowest, value));
    const int bytes = 4 * units(count < W ? count : W);
    __builtin_memcpy(to + c / 2, &rounded, bytes);
  }
#else
#pragma omp simd
  for (int c = 0; c < channels; ++c) {
    float value = from[c];
    if (scale) value *= scale[c];
    if (shift) value += shift[c];
    to[c] = value < floor ? floor : value;
  }
#endif
}

inline bool is_pointwise(const Conv2dShape& p) {
  return p.r == 1 && p.s == 1 && p.stride_h == 1 && p.stride_w == 1 && p.pad_top == 0 &&
         p.pad_left == 0 && p.pad_bottom == 0 && p.pad_right == 0;
}

inline bool is_padded(const Conv2dShape& p) {
  return p.pad_top != 0 || p.pad_left != 0 || p.pad_bottom != 0 || p.pad_right != 0;
}

// Whether what each output reads is written out for it, taps side by side: output rows then follow
// one another, and tiles of products need not end where short rows do. With a stride it is little
// more than what is read.
inline bool is_unrolled(const Conv2dShape& p, bool planar) {
  return !planar && p.stride_w > 1 && p.groups == 1 && p.out_w() <= kShortRow;
}

// A band of output rows, and what is read for them.
struct Bands {
  int rows;       // of outputs, at most
  int count;      // of bands an image
  int shares;     // of the filters
  int in_rows;    // of inputs, at most
  int width;      // of inputs with their border
  bool unrolled;  // see is_unrolled()

  Bands(const Conv2dShape& p, bool planar, int threads)
      : width(p.w + p.pad_left + p.pad_right), unrolled(is_unrolled(p, planar)) {
    const std::int64_t row = std::int64_t{width} * units(p.c);
    const int out_h = p.out_h();
    const std::int64_t weights = std::int64_t{p.taps()} * p.k;
    const std::int64_t floats = weights > kLargeBandFloats ? kLargeBandFloats : kBandFloats;
    std::int64_t most =
        unrolled ? kUnrolledFloats / unrolled_row(p)
                 : (floats / row - std::int64_t{p.dilation_h} * (p.r - 1) - 1) / p.stride_h + 1;
    if (most < 1) most = 1;
    if (most > out_h) most = out_h;
    const bool by_filters = weights > std::int64_t{p.n} * p.h * p.w * p.c;
    const TaskSplit split(out_h, most, 2, p.group_filters(), by_filters, threads, p.n);
    count = static_cast<int>(split.tasks);
    shares = split.shares;
    rows = (out_h + count - 1) / count;
    in_rows = (rows - 1) * p.stride_h + p.dilation_h * (p.r - 1) + 1;
  }
  int first(int band, int out_h) const {
    return static_cast<int>(std::int64_t{out_h} * band / count);
  }
  // Floats of an output row's unrolled inputs.
  static std::int64_t unrolled_row(const Conv2dShape& p) {
    return std::int64_t{p.out_w()} * p.r * p.s * units(p.c);
  }
  std::int64_t floats(const Conv2dShape& p) const {
    return unrolled ? rows * unrolled_row(p) : std::int64_t{in_rows} * width * units(p.c);
  }
};

// What is summed over: taps, and for each what lies side by side in memory. That are channels, and
// in the planes of a first layer the taps of a row.
struct Taps {
  int count, channels;
  int taps;  // that stand side by side, and are one here

  Taps(const Conv2dShape& p, bool planar) {
    taps = planar && p.dilation_w == 1 ? p.s : 1;
    count = (planar ? p.taps() : p.r * p.s) / taps;
    channels = planar ? taps : units(p.group_channels());
  }
  int first(int index) const { return index * taps; }
  // Of scratch memory for the taps' offsets, in whole cache lines.
  std::int64_t floats() const { return (std::int64_t{2} * count + 15) / 16 * 16; }
  ChannelParts parts() const { return ChannelParts(channels, count); }
};

inline std::int64_t direct_scratch(const Conv2dShape& p, Conv2dMethod method) {
  if (is_pointwise(p) && method == Conv2dMethod::direct) {
    return std::int64_t{kRunRows} * units(p.c);
  }
  // With more threads bands are smaller.
  const bool planar = method == Conv2dMethod::planar;
  return Taps(p, planar).floats() + Bands(p, planar, 1).floats(p);
}

// All arguments of a call but the shape.
struct Direct {
  const float* input;
  const float* packed;
  const float* bias;
  const float* residual;
  Prologue prologue;
  float* output;
  Conv2dPitches pitches;
  Activation activation;
};

inline Epilogue epilogue_of(const Direct& call, int g, int filters) {
  return call.activation.epilogue(call.bias ? call.bias + std::int64_t{g} * filters : nullptr);
}

inline void pointwise(const Direct& call, const Scratch& scratch, const Conv2dShape& p,
                      int threads) {
  const std::int64_t area = std::int64_t{p.h} * p.w, places = p.n * area;
  const int channels = p.group_channels(), filters = p.group_filters();
  const std::int64_t zero = 0;
  // What passes from one thread's caches to the other's is the weights, or what is read and
  // written.
  const bool by_filters = std::int64_t{p.c} * filters > places * (p.c + p.k);
  const TaskSplit split(places, kRunRows, kLeastRunRows, filters, by_filters, threads);
  const int shares = split.shares;
  const std::int64_t cost = (places / split.tasks + 1) * p.c * filters / shares;
  const bool copies = kPairs || call.prologue.any();
  const int moved = p.c + (call.residual ? 2 : 1) * p.k;
  const bool has_time = !copies && p.c >= kLongRow && filters >= kLongRow;
  const bool asks_ahead = has_time && places * moved > kCachedFloats;
  // A thread has all runs of its filters, or all filters of its runs; what is written out is used
  // for all shares of a run.
  const bool runs_inside = by_filters && !copies;
  parallel_for(split.tasks * shares, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    for (std::int64_t index = begin; index < end; ++index) {
      const int run = static_cast<int>(runs_inside ? index % split.tasks : index / shares);
      const int share = static_cast<int>(runs_inside ? index / split.tasks : index % shares);
      const std::int64_t first = split.first(run);
      const int count = static_cast<int>(split.first(run + 1) - first);
      const float* x = call.input + first * call.pitches.x;
      std::int64_t stride = call.pitches.x;
      if (copies) {
        for (int i = 0; i < count && part.holds() != run; ++i) {
          const Prologue& z = call.prologue;
          const float* scale = z.per_image ? z.scale + (first + i) / area * p.c : z.scale;
          write_place(x + i * stride, part.data() + std::int64_t{i} * units(p.c), p.c, scale,
                      z.shift, z.floor);
        }
        part.holds() = run;
        x = part.data();
        stride = units(p.c);
      }
      const int from = share_begin(filters, share, shares);
      const int to = share_begin(filters, share + 1, shares);
      // Of the places that this body comes to next.
      const std::int64_t next = index + 1 < end && run + 1 < split.tasks ? first + count : places;
      const std::int64_t more = next + count < places ? count : places - next;
      const auto rows_of = [&](const float* rows, int pitch, int size, Ahead* then) {
        const bool asks = asks_ahead && rows && pitch == size;
        const std::int64_t lines = asks ? more * pitch / kFilterGroup : 0;
        return Ahead{asks ? rows + next * pitch : rows, lines, 0, lines > 0, then};
      };
      for (int g = 0; g < p.groups; ++g) {
        Product product{&zero,
                        1,
                        ChannelParts(units(channels), 1),
                        stride,
                        nullptr,
                        filters,
                        call.pitches.y,
                        call.pitches.residual};
        product.weights = call.packed + g * filter_groups(filters) * product.group_size();
        float* y = call.output + first * call.pitches.y + std::int64_t{g} * filters;
        const float* residual = call.residual ? call.residual + first * call.pitches.residual +
                                                    std::int64_t{g} * filters
                                              : nullptr;
        Ahead written = rows_of(call.output, call.pitches.y, p.k, nullptr);
        Ahead added = rows_of(call.residual, call.pitches.residual, p.k, &written);
        Ahead read = rows_of(call.input, call.pitches.x, p.c, &added);
        const Epilogue epilogue = epilogue_of(call, g, filters);
        multiply_runs(product, from, to, epilogue, &read, [&](const auto& body) {
          body(x + std::int64_t{g} * units(channels), y, residual, count);
        });
        call.activation.apply(y + from, call.pitches.y, count, to - from);
      }
    }
  });
}

// Writes input rows [top, top + rows), which may lie outside, with their border and the prologue.
inline void write_band(const Direct& call, const Conv2dShape& p, const Bands& bands, int n, int top,
                       int rows, bool planar, float* to) {
  const Prologue& z = call.prologue;
  const int width = bands.width;
  if (planar) {
    for (int c = 0; c < p.c; ++c) {
      const float* plane = call.input + (std::int64_t{n} * p.c + c) * p.h * p.w;
      for (int i = 0; i < rows; ++i) {
        float* row = to + (std::int64_t{c} * bands.in_rows + i) * width;
        const int y = top + i;
        if (y < 0 || y >= p.h) {
          fill_zero(row, width);
          continue;
        }
        fill_zero(row, p.pad_left);
        __builtin_memcpy(row + p.pad_left, plane + std::int64_t{y} * p.w, sizeof(float) * p.w);
        fill_zero(row + p.pad_left + p.w, p.pad_right);
      }
    }
    return;
  }
  const float* image = call.input + std::int64_t{n} * p.h * p.w * call.pitches.x;
  const float* scale = z.per_image ? z.scale + std::int64_t{n} * p.c : z.scale;
  const bool plain = !kPairs && !z.any();
  const int place = units(p.c);
  for (int i = 0; i < rows; ++i) {
    float* row = to + std::int64_t{i} * width * place;
    const int y = top + i;
    if (y < 0 || y >= p.h) {
      fill_zero(row, width * place);
      continue;
    }
    fill_zero(row, p.pad_left * place);
    row += std::int64_t{p.pad_left} * place;
    const float* from = image + std::int64_t{y} * p.w * call.pitches.x;
    if (plain && call.pitches.x == p.c) {
      __builtin_memcpy(row, from, sizeof(float) * p.w * p.c);
    } else {
      for (int x = 0; x < p.w; ++x) {
        float* at = row + std::int64_t{x} * place;
        if (plain) {
          __builtin_memcpy(at, from, sizeof(float) * p.c);
        } else {
          write_place(from, at, p.c, scale, z.shift, z.floor);
        }
        from += call.pitches.x;
      }
    }
    fill_zero(row + std::int64_t{p.w} * place, p.pad_right * place);
  }
}

// Writes what output rows [first, first + rows) read, for each output its taps side by side.
inline void write_unrolled(const Direct& call, const Conv2dShape& p, int n, int first, int rows,
                           float* to) {
  const Prologue& z = call.prologue;
  const float* image = call.input + std::int64_t{n} * p.h * p.w * call.pitches.x;
  const float* scale = z.per_image ? z.scale + std::int64_t{n} * p.c : z.scale;
  const bool plain = !kPairs && !z.any();
  const int place = units(p.c), out_w = p.out_w();
  for (int i = first; i < first + rows; ++i) {
    for (int j = 0; j < out_w; ++j) {
      for (int r = 0; r < p.r; ++r) {
        for (int s = 0; s < p.s; ++s, to += place) {
          const int y = i * p.stride_h - p.pad_top + r * p.dilation_h;
          const int x = j * p.stride_w - p.pad_left + s * p.dilation_w;
          if (y < 0 || y >= p.h || x < 0 || x >= p.w) {
            fill_zero(to, place);
            continue;
          }
          const float* from = image + (std::int64_t{y} * p.w + x) * call.pitches.x;
          if (plain) {
            __builtin_memcpy(to, from, sizeof(float) * p.c);
          } else {
            write_place(from, to, p.c, scale, z.shift, z.floor);
          }
        }
      }
    }
  }
}

inline void banded(const Direct& call, const Scratch& scratch, const Conv2dShape& p, bool planar,
                   int threads) {
  const Bands bands(p, planar, threads);
  const int out_h = p.out_h(), out_w = p.out_w();
  const int channels = p.group_channels(), filters = p.group_filters();
  const std::int64_t tasks = std::int64_t{p.n} * bands.count;
  const int shares = bands.shares;
  const std::int64_t cost = std::int64_t{bands.rows} * out_w * p.taps() * p.k / shares;
  const bool copies = kPairs || planar || bands.unrolled || is_padded(p) || call.prologue.any();
  const std::int64_t pitch = planar ? 1 : copies ? units(p.c) : call.pitches.x;
  const std::int64_t row = (copies ? bands.width : p.w) * pitch;
  const Taps sums(p, planar);
  parallel_for(tasks * shares, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    auto* taps = reinterpret_cast<std::int64_t*>(part.data());
    float* written_out = part.data() + sums.floats();
    for (int index = 0; index < sums.count; ++index) {
      const int a = sums.first(index);
      const int s = a % p.s, r = a / p.s % p.r, c = a / p.s / p.r;
      taps[index] = c * bands.in_rows * row + r * p.dilation_h * row + s * p.dilation_w * pitch;
      if (bands.unrolled) taps[index] = index * pitch;
    }
    for (std::int64_t index = begin; index < end; ++index) {
      const int task = static_cast<int>(index / shares);
      const int share = static_cast<int>(index % shares);
      const int n = task / bands.count, band = task % bands.count;
      const int first = bands.first(band, out_h);
      const int rows = bands.first(band + 1, out_h) - first;
      const int top = first * p.stride_h - p.pad_top;
      const float* x = written_out;
      if (!copies) {
        x = call.input + (std::int64_t{n} * p.h + top) * row;
      } else if (part.holds() != task) {
        const int in_rows = (rows - 1) * p.stride_h + p.dilation_h * (p.r - 1) + 1;
        if (bands.unrolled) {
          write_unrolled(call, p, n, first, rows, written_out);
        } else {
          write_band(call, p, bands, n, top, in_rows, planar, written_out);
        }
        part.holds() = task;
      }
      const int from = share_begin(filters, share, shares);
      const int to = share_begin(filters, share + 1, shares);
      const std::int64_t place = (std::int64_t{n} * out_h + first) * out_w;
      for (int g = 0; g < p.groups; ++g) {
        const std::int64_t step = (bands.unrolled ? p.r * p.s : p.stride_w) * pitch;
        Product product{taps,    sums.count, sums.parts(),   step,
                        nullptr, filters,    call.pitches.y, call.pitches.residual};
        product.weights = call.packed + g * filter_groups(filters) * product.group_size();
        float* y = call.output + place * call.pitches.y + std::int64_t{g} * filters;
        const float* residual = call.residual ? call.residual + place * call.pitches.residual +
                                                    std::int64_t{g} * filters
                                              : nullptr;
        const Epilogue epilogue = epilogue_of(call, g, filters);
        multiply_runs(product, from, to, epilogue, nullptr, [&](const auto& body) {
          if (bands.unrolled) return body(x, y, residual, rows * out_w);
          for (int i = 0; i < rows; ++i) {
            const std::int64_t at = std::int64_t{i} * out_w;
            body(x + i * p.stride_h * row + std::int64_t{g} * units(channels),
                 y + at * call.pitches.y,
                 residual ? residual + at * call.pitches.residual : nullptr, out_w);
          }
        });
        call.activation.apply(y + from, call.pitches.y, std::int64_t{rows} * out_w, to - from);
      }
    }
  });
}

// One number of four bytes: a channel's weight, or those of a pair of channels in bfloat16.
inline float packed_unit(const float* weight, int c, int channels, int area) {
#if defined(CNN_ENGINE_PAIRS)
  Vec<4> pair{};
  for (int i = 0; i < 2 && 2 * c + i < channels; ++i) pair[i] = weight[(2 * c + i) * area];
  const __m128bh rounded = _mm_cvtneps_pbh(pair);
  float both;
  __builtin_memcpy(&both, &rounded, sizeof both);
  return both;
#else
  static_cast<void>(channels);
  return weight[std::int64_t{c} * area];
#endif
}

inline std::int64_t direct_packed(const Conv2dShape& p, Conv2dMethod method) {
  const std::int64_t filters = std::int64_t{filter_groups(p.group_filters())} * kFilterGroup;
  if (method == Conv2dMethod::planar) return filters * p.taps();
  return p.groups * filters * p.r * p.s * units(p.group_channels());
}

inline void direct_pack(const float* weight, float* packed, const Conv2dShape& p,
                        Conv2dMethod method) {
  const bool planar = method == Conv2dMethod::planar;
  const int area = p.r * p.s, filters = p.group_filters();
  const Taps taps(p, planar);
  const ChannelParts parts = taps.parts();
  for (int g = 0; g < p.groups; ++g) {
    for (int group = 0; group < filter_groups(filters); ++group) {
      for (int part = 0; part < parts.count; ++part) {
        for (int a = 0; a < taps.count; ++a) {
          for (int c = parts.first(part); c < parts.first(part + 1); ++c) {
            for (int i = 0; i < kFilterGroup; ++i) {
              const int k = group * kFilterGroup + i;
              const std::int64_t filter = (std::int64_t{g} * filters + k) * p.taps();
              if (k >= filters) {
                *packed++ = 0.0f;
              } else if (planar) {
                *packed++ = weight[filter + a * taps.channels + c];
              } else {
                *packed++ = packed_unit(weight + filter + a, c, p.group_channels(), area);
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
