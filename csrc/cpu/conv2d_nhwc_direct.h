// The direct and planar methods of convolutions over channels that lie side by side, for every lane
// (nhwc.h): float32, bfloat16 and integers.
//
// Work is shared out in bands of output rows (1x1 convolutions: runs of positions) and, where those
// are few, in shares of the filters. What is read with a border, through a prologue or in another
// type is first written out for the band. Included only by files that are compiled once for each
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
// Packed weights of so many units leave a second-level cache no room for more: a task of whole
// images then has several, of which so much is written out.
constexpr std::int64_t kLargeWeights = 256 << 10, kTogetherFloats = 256 << 10;
// Positions of a run of a 1x1 convolution, at least: see Lane::kRunRows.
constexpr int kLeastRunRows = 24;
// Of what a 1x1 convolution reads and writes: more may have left the second-level cache, and is
// asked for a run ahead, where there are channels and filters enough to do so beside their
// products.
constexpr std::int64_t kCachedFloats = 256 << 10;
constexpr int kLongRow = 64;

// Units that hold so many channels of a position.
template <typename Lane>
constexpr int units(int channels) {
  return (channels + Lane::kChannels - 1) / Lane::kChannels;
}

struct Prologue {
  const float* scale;
  const float* shift;
  bool per_image;
  float floor;

  bool any() const { return scale != nullptr || shift != nullptr || floor > kNone; }
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  CNN_ENGINE_INLINE Prologue of_image(std::int64_t n, int channels) const {
    Prologue found = *this;
    if (per_image) found.scale += n * channels;
    return found;
  }
  // max(x * scale + shift, floor) of the channels of one position; a NaN stays.
  CNN_ENGINE_INLINE void write(const float* from, float* to, int channels, int first) const {
    const float* factors = scale ? scale + first : nullptr;
    const float* added = shift ? shift + first : nullptr;
#pragma omp simd
    for (int c = 0; c < channels; ++c) {
      float value = from[c];
      if (factors) value *= factors[c];
      if (added) value += added[c];
      to[c] = value < floor ? floor : value;
    }
  }
  // What lies outside of the image.
  void write_border(float* to, int count) const { fill_zero(to, count); }
};

inline bool is_pointwise(const Conv2dShape& p) {
  return p.r == 1 && p.s == 1 && p.stride_h == 1 && p.stride_w == 1 && p.pad_top == 0 &&
         p.pad_left == 0 && p.pad_bottom == 0 && p.pad_right == 0;
}

inline bool is_padded(const Conv2dShape& p) {
  return p.pad_top != 0 || p.pad_left != 0 || p.pad_bottom != 0 || p.pad_right != 0;
}

// Whether what each output reads is written out for it, kernel offsets side by side: output rows
// then follow one another, and tiles of products need not end where short rows do. With a stride it
// is little more than what is read.
template <typename Lane>
bool is_unrolled(const Conv2dShape& p, bool planar) {
  if (planar || p.groups != 1) return false;
  return p.out_w() <= (p.stride_w > 1 ? kShortRow : Lane::kUnrolledRow);
}

// A band of output rows, and what is read for them.
struct Bands {
  int rows;        // of outputs, at most
  int count;       // of bands an image
  int shares;      // of the filters
  int in_rows;     // of inputs, at most
  int width;       // of inputs with their border
  int position;    // units of one
  bool unrolled;   // see is_unrolled()
  int images = 1;  // of a task; more than one only where a band is a whole image

  // `channels`: of a unit.
  Bands(const Conv2dShape& p, int position, int channels, bool unrolled, int threads)
      : width(p.w + p.pad_left + p.pad_right), position(position), unrolled(unrolled) {
    const std::int64_t row = std::int64_t{width} * position;
    const int out_h = p.out_h();
    const std::int64_t weights = std::int64_t{p.filter_size()} * p.k;
    const std::int64_t cached = weights > kLargeBandFloats ? kLargeBandFloats : kBandFloats;
    std::int64_t most =
        unrolled ? kUnrolledFloats / unrolled_row(p)
                 : (cached / row - std::int64_t{p.dilation_h} * (p.r - 1) - 1) / p.stride_h + 1;
    if (most < 1) most = 1;
    if (most > out_h) most = out_h;
    const bool by_filters = weights > std::int64_t{p.n} * p.h * p.w * p.c;
    const TaskSplit split(out_h, most, 2, p.group_filters(), by_filters, threads, p.n);
    count = static_cast<int>(split.tasks);
    shares = split.shares;
    rows = (out_h + count - 1) / count;
    in_rows = (rows - 1) * p.stride_h + p.dilation_h * (p.r - 1) + 1;
    if (count == 1 && weights / channels > kLargeWeights) {
      const std::int64_t room = kTogetherFloats / floats(p), own = (p.n + threads - 1) / threads;
      images = static_cast<int>(room < 1 ? 1 : room < own ? room : own);
    }
  }
  int first(int band, int out_h) const {
    return static_cast<int>(std::int64_t{out_h} * band / count);
  }
  // Floats of an output row's unrolled inputs.
  std::int64_t unrolled_row(const Conv2dShape& p) const {
    return std::int64_t{p.out_w()} * p.r * p.s * position;
  }
  // The same of a band.
  std::int64_t floats(const Conv2dShape& p) const {
    return unrolled ? rows * unrolled_row(p) : std::int64_t{in_rows} * width * position;
  }
};

// Units of a position: each group of channels has its own.
template <typename Lane>
constexpr int position_units(const Conv2dShape& p) {
  return p.groups * units<Lane>(p.group_channels());
}

// What is summed over: kernel offsets, and for each what lies side by side in memory. That are
// channels, and the kernel offsets of a row in the planes of a first layer or where a lane joins
// them.
template <typename Lane>
struct KernelOffsets {
  int count, channels;
  int joined;  // kernel offsets that stand side by side, and are one here

  // `passes`: times that all of it is multiplied, each by weights of its own.
  KernelOffsets(const Conv2dShape& p, bool planar, int passes = 1) {
    const bool joins = planar || (Lane::kJoinsKernelOffsets && p.groups == 1);
    joined = joins && p.dilation_w == 1 ? p.s : 1;
    count_ = (planar ? p.filter_size() : p.r * p.s) / joined;
    count = count_ * passes;
    channels = planar ? joined : Lane::padded(joined * units<Lane>(p.group_channels()));
  }
  int first(int index) const { return index % count_ * joined; }
  int pass(int index) const { return index / count_; }
  // Of scratch memory for the kernel offsets' offsets, in whole cache lines.
  std::int64_t floats() const { return (std::int64_t{2} * count + 15) / 16 * 16; }
  ChannelParts parts() const {
    return Lane::kInParts ? ChannelParts(channels, count) : ChannelParts(channels);
  }

 private:
  int count_;  // of one pass
};

template <typename Lane>
std::int64_t direct_scratch(const Conv2dShape& p, bool planar = false) {
  if (is_pointwise(p) && !planar) {
    return std::int64_t{Lane::kRunRows} * position_units<Lane>(p) + Lane::kSlack;
  }
  // With more threads bands are smaller, and a task's images fewer.
  const Bands bands(p, position_units<Lane>(p), Lane::kChannels, is_unrolled<Lane>(p, planar), 1);
  return KernelOffsets<Lane>(p, planar, Lane::kMostPasses).floats() +
         bands.images * bands.floats(p) + Lane::kSlack;
}

// All arguments of a call but the shape.
template <typename L, typename P = Prologue, typename A = Activation>
struct DirectOf {
  using Lane = L;
  const typename Lane::Input* input;
  const typename Lane::Unit* packed;
  const typename Lane::Residual* residual;
  P prologue;
  typename Lane::Output* output;
  Conv2dPitches pitches;
  typename Lane::Last last;
  A activation;
  int y_step = 1;  // of the output, from filter to filter
  int passes = 1;  // see KernelOffsets
};
using Direct = DirectOf<Float32>;

template <typename Lane, typename P>
CNN_ENGINE_INLINE void write_position(const P& prologue, const typename Lane::Input* from,
                                      typename Lane::Unit* to, const Conv2dShape& p) {
  // Groups that fill their units follow one another as they are.
  const bool fills = p.group_channels() % Lane::kChannels == 0;
  const int groups = fills ? 1 : p.groups, channels = p.c / groups;
  for (int g = 0; g < groups; ++g) {
    prologue.write(from + g * channels, to + g * units<Lane>(channels), channels, g * channels);
  }
}

template <typename Call>
void pointwise(const Call& call, const Scratch& scratch, const Conv2dShape& p, int threads) {
  using Lane = typename Call::Lane;
  using Unit = typename Lane::Unit;
  const std::int64_t area = std::int64_t{p.h} * p.w, positions = p.n * area;
  const int channels = p.group_channels(), filters = p.group_filters();
  const int position = position_units<Lane>(p);
  const std::int64_t zeros[Lane::kMostPasses] = {};
  // What passes from one thread's caches to the other's is the weights, or what is read and
  // written.
  const bool by_filters = std::int64_t{p.c} * filters > positions * (p.c + p.k);
  const TaskSplit split(positions, Lane::kRunRows, kLeastRunRows, filters, by_filters, threads);
  const int shares = split.shares;
  const std::int64_t cost = (positions / split.tasks + 1) * p.c * filters / shares;
  const bool copies = Lane::kWritten || call.prologue.any();
  const int moved = p.c + (call.residual ? 2 : 1) * p.k;
  const bool has_time = !copies && p.c >= kLongRow && filters >= kLongRow;
  const bool prefetches = Lane::kInParts && has_time && positions * moved > kCachedFloats;
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
      const typename Lane::Input* input = call.input + first * call.pitches.x;
      auto* x = reinterpret_cast<const Unit*>(input);
      std::int64_t stride = call.pitches.x * sizeof *input / sizeof *x;
      if (copies) {
        auto* to = reinterpret_cast<Unit*>(part.data());
        for (int i = 0; i < count && part.holds() != run; ++i) {
          write_position<Lane>(call.prologue.of_image((first + i) / area, p.c),
                               input + std::int64_t{i} * call.pitches.x,
                               to + std::int64_t{i} * position, p);
        }
        part.holds() = run;
        x = to;
        stride = position;
      }
      const int from = share_begin(filters, share, shares);
      const int to = share_begin(filters, share + 1, shares);
      // Of the positions that this body comes to next.
      const std::int64_t next =
          index + 1 < end && run + 1 < split.tasks ? first + count : positions;
      const std::int64_t more = next + count < positions ? count : positions - next;
      const auto rows_of = [&](const void* rows, int pitch, int size, Prefetch* then) {
        const auto* floats = static_cast<const float*>(rows);
        const bool asks = prefetches && rows && pitch == size;
        const std::int64_t lines = asks ? more * pitch / kFilterGroup : 0;
        return Prefetch{asks ? floats + next * pitch : floats, lines, 0, lines > 0, then};
      };
      for (int g = 0; g < p.groups; ++g) {
        GemmOf<Lane> gemm{
            zeros,      call.passes, KernelOffsets<Lane>(p, false).parts(), stride,
            nullptr,    filters,     call.pitches.y * call.y_step,          call.pitches.residual,
            call.y_step};
        gemm.weights = call.packed + g * filter_groups(filters) * gemm.group_size();
        const std::int64_t at = std::int64_t{g} * filters;
        auto* y = call.output + (first * call.pitches.y + at) * call.y_step;
        const auto* residual =
            call.residual ? call.residual + first * call.pitches.residual + at : nullptr;
        Prefetch written = rows_of(call.output, call.pitches.y, p.k, nullptr);
        Prefetch added = rows_of(call.residual, call.pitches.residual, p.k, &written);
        Prefetch read = rows_of(call.input, call.pitches.x, p.c, &added);
        multiply_runs(gemm, from, to, call.last.at(at), &read, [&](const auto& body) {
          body(x + std::int64_t{g} * units<Lane>(channels), y, residual, count);
        });
        call.activation.apply(y + from, call.pitches.y, count, to - from);
      }
    }
  });
}

// Writes input rows [top, top + rows), which may lie outside, with their border and the prologue.
template <typename Call>
void write_band(const Call& call, const Conv2dShape& p, const Bands& bands, int n, int top,
                int rows, bool planar, typename Call::Lane::Unit* to) {
  using Lane = typename Call::Lane;
  const int width = bands.width;
  if constexpr (Lane::kChannels == 1) {
    for (int c = 0; planar && c < p.c; ++c) {
      const auto* plane = call.input + (std::int64_t{n} * p.c + c) * p.h * p.w;
      for (int i = 0; i < rows; ++i) {
        auto* row = to + (std::int64_t{c} * bands.in_rows + i) * width;
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
    if (planar) return;
  }
  const auto* image = call.input + std::int64_t{n} * p.h * p.w * call.pitches.x;
  const auto prologue = call.prologue.of_image(n, p.c);
  const bool plain = !Lane::kWritten && !call.prologue.any();
  const int position = bands.position;
  for (int i = 0; i < rows; ++i) {
    auto* row = to + std::int64_t{i} * width * position;
    const int y = top + i;
    if (y < 0 || y >= p.h) {
      prologue.write_border(row, width * position);
      continue;
    }
    prologue.write_border(row, p.pad_left * position);
    row += std::int64_t{p.pad_left} * position;
    const auto* from = image + std::int64_t{y} * p.w * call.pitches.x;
    if (plain && call.pitches.x * sizeof *from == position * sizeof *row) {
      __builtin_memcpy(row, from, sizeof *row * p.w * position);
    } else {
      for (int x = 0; x < p.w; ++x) {
        auto* at = row + std::int64_t{x} * position;
        if (plain) {
          __builtin_memcpy(at, from, sizeof *from * p.c);
        } else {
          write_position<Lane>(prologue, from, at, p);
        }
        from += call.pitches.x;
      }
    }
    prologue.write_border(row + std::int64_t{p.w} * position, p.pad_right * position);
  }
}

// Writes what output rows [first, first + rows) read, for each output its kernel offsets side by
// side.
template <typename Call>
void write_unrolled(const Call& call, const Conv2dShape& p, const Bands& bands, int n, int first,
                    int rows, typename Call::Lane::Unit* to) {
  using Lane = typename Call::Lane;
  const auto* image = call.input + std::int64_t{n} * p.h * p.w * call.pitches.x;
  const auto prologue = call.prologue.of_image(n, p.c);
  const bool plain = !Lane::kWritten && !call.prologue.any();
  const int position = bands.position, out_w = p.out_w();
  for (int i = first; i < first + rows; ++i) {
    for (int j = 0; j < out_w; ++j) {
      for (int r = 0; r < p.r; ++r) {
        for (int s = 0; s < p.s; ++s, to += position) {
          const int y = i * p.stride_h - p.pad_top + r * p.dilation_h;
          const int x = j * p.stride_w - p.pad_left + s * p.dilation_w;
          if (y < 0 || y >= p.h || x < 0 || x >= p.w) {
            prologue.write_border(to, position);
            continue;
          }
          const auto* from = image + (std::int64_t{y} * p.w + x) * call.pitches.x;
          if (plain) {
            __builtin_memcpy(to, from, sizeof *from * p.c);
          } else {
            write_position<Lane>(prologue, from, to, p);
          }
        }
      }
    }
  }
}

template <typename Call>
void banded(const Call& call, const Scratch& scratch, const Conv2dShape& p, bool planar,
            int threads) {
  using Lane = typename Call::Lane;
  using Unit = typename Lane::Unit;
  const int position = position_units<Lane>(p);
  const Bands bands(p, position, Lane::kChannels, is_unrolled<Lane>(p, planar), threads);
  const int out_h = p.out_h(), out_w = p.out_w();
  const int channels = p.group_channels(), filters = p.group_filters();
  const std::int64_t tasks = std::int64_t{(p.n + bands.images - 1) / bands.images} * bands.count;
  const int shares = bands.shares;
  const std::int64_t outputs = std::int64_t{bands.images} * bands.rows * out_w;
  const std::int64_t cost = outputs * p.filter_size() * p.k / shares;
  const KernelOffsets<Lane> offsets(p, planar, call.passes);
  const bool apart =
      Lane::kJoinsKernelOffsets && call.pitches.x != p.c;  // joined kernel offsets must not be
  const bool copies =
      Lane::kWritten || planar || bands.unrolled || is_padded(p) || call.prologue.any() || apart;
  const std::int64_t in_place = call.pitches.x * sizeof *call.input / sizeof(Unit);
  const std::int64_t pitch = planar ? 1 : copies ? position : in_place;
  const std::int64_t row = (copies ? bands.width : p.w) * pitch;
  const std::int64_t image_step = copies ? bands.floats(p) : p.h * row;
  parallel_for(tasks * shares, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    auto* kernel_offsets = reinterpret_cast<std::int64_t*>(part.data());
    auto* written_out = reinterpret_cast<Unit*>(part.data() + offsets.floats());
    for (int index = 0; index < offsets.count; ++index) {
      const int a = offsets.first(index);
      const int s = a % p.s, r = a / p.s % p.r, c = a / p.s / p.r;
      kernel_offsets[index] =
          c * bands.in_rows * row + r * p.dilation_h * row + s * p.dilation_w * pitch;
      if (bands.unrolled) kernel_offsets[index] = a * pitch;
    }
    for (std::int64_t index = begin; index < end; ++index) {
      const int task = static_cast<int>(index / shares);
      const int share = static_cast<int>(index % shares);
      const int n = task / bands.count * bands.images, band = task % bands.count;
      const int images = p.n - n < bands.images ? p.n - n : bands.images;
      const int first = bands.first(band, out_h);
      const int rows = bands.first(band + 1, out_h) - first;
      const int top = first * p.stride_h - p.pad_top;
      const Unit* x = written_out;
      if (!copies) {
        x = reinterpret_cast<const Unit*>(call.input) + (std::int64_t{n} * p.h + top) * row;
      } else if (part.holds() != task) {
        const int in_rows = (rows - 1) * p.stride_h + p.dilation_h * (p.r - 1) + 1;
        for (int image = 0; image < images; ++image) {
          Unit* own = written_out + image * image_step;
          if (bands.unrolled) {
            write_unrolled(call, p, bands, n + image, first, rows, own);
          } else {
            write_band(call, p, bands, n + image, top, in_rows, planar, own);
          }
        }
        part.holds() = task;
      }
      const int from = share_begin(filters, share, shares);
      const int to = share_begin(filters, share + 1, shares);
      const std::int64_t position_y = (std::int64_t{n} * out_h + first) * out_w;
      for (int g = 0; g < p.groups; ++g) {
        const std::int64_t step = (bands.unrolled ? p.r * p.s : p.stride_w) * pitch;
        GemmOf<Lane> gemm{kernel_offsets,
                          offsets.count,
                          offsets.parts(),
                          step,
                          nullptr,
                          filters,
                          call.pitches.y * call.y_step,
                          call.pitches.residual,
                          call.y_step};
        gemm.weights = call.packed + g * filter_groups(filters) * gemm.group_size();
        const std::int64_t at_filter = std::int64_t{g} * filters;
        auto* y = call.output + (position_y * call.pitches.y + at_filter) * call.y_step;
        const auto* residual = call.residual
                                   ? call.residual + position_y * call.pitches.residual + at_filter
                                   : nullptr;
        multiply_runs(gemm, from, to, call.last.at(at_filter), nullptr, [&](const auto& body) {
          if (bands.unrolled) return body(x, y, residual, images * rows * out_w);
          for (int i = 0; i < images * rows; ++i) {
            const std::int64_t at = std::int64_t{i} * out_w;
            const Unit* image = x + i / rows * image_step;
            body(image + i % rows * p.stride_h * row + std::int64_t{g} * units<Lane>(channels),
                 y + at * gemm.y_stride, residual ? residual + at * call.pitches.residual : nullptr,
                 out_w);
          }
        });
        call.activation.apply(y + from, call.pitches.y, std::int64_t{images} * rows * out_w,
                              to - from);
      }
    }
  });
}

// Calls each(filter or -1, index of the kernel offsets, unit) for every unit of the packed weights,
// in order.
template <typename Lane, typename Each>
void for_packed(const Conv2dShape& p, const KernelOffsets<Lane>& kernel_offsets, const Each& each) {
  const ChannelParts parts = kernel_offsets.parts();
  const int filters = p.group_filters();
  for (int g = 0; g < p.groups; ++g) {
    for (int group = 0; group < filter_groups(filters); ++group) {
      for (int part = 0; part < parts.count; ++part) {
        for (int a = 0; a < kernel_offsets.count; ++a) {
          for (int c = parts.first(part); c < parts.first(part + 1); ++c) {
            for (int i = 0; i < kFilterGroup; ++i) {
              const int k = group * kFilterGroup + i;
              each(k < filters ? g * filters + k : -1, a, c);
            }
          }
        }
      }
    }
  }
}

template <typename Lane>
std::int64_t direct_packed(const Conv2dShape& p, bool planar = false, int passes = 1) {
  const KernelOffsets<Lane> kernel_offsets(p, planar, passes);
  const std::int64_t filters = std::int64_t{filter_groups(p.group_filters())} * kFilterGroup;
  return p.groups * filters * kernel_offsets.count * kernel_offsets.channels;
}

template <typename Lane>
void direct_pack(const float* weight, float* packed, const Conv2dShape& p, bool planar = false) {
  const int area = p.r * p.s, channels = p.group_channels();
  const KernelOffsets<Lane> kernel_offsets(p, planar);
  for_packed<Lane>(p, kernel_offsets, [&](int filter, int index, int c) {
    const float* own =
        weight + std::int64_t{filter} * p.filter_size() + kernel_offsets.first(index);
    if (filter < 0) {
      *packed++ = 0.0f;
    } else if (planar) {
      *packed++ = own[c];
    } else {
      const int first = c * Lane::kChannels;
      *packed++ = Lane::packed(own + std::int64_t{first} * area, channels - first, area);
    }
  });
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
