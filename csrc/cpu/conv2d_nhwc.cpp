// conv2d_nhwc on the CPU: the direct methods here, the others in conv2d_nhwc_winograd.h
// and conv2d_nhwc_depthwise.h.
//
// Work is shared out in bands of output rows (1x1 convolutions: runs of places) and, where those
// are few, in shares of the filters. What is read with a border, or through a prologue, is first
// written out for the band.
#include "ops/conv2d_nhwc.h"

#include "cpu/conv2d_nhwc_depthwise.h"
#include "cpu/conv2d_nhwc_winograd.h"
#include "cpu/nhwc.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr std::int64_t kBandFloats = 48 << 10;  // of a band: a part of the second-level cache
constexpr int kRunRows = 96;                    // places of a run of a 1x1 convolution
constexpr int kMostTaps = 1024;

struct Prologue {
  const float* scale;
  const float* shift;
  bool per_image;
  float floor;

  bool any() const { return scale != nullptr || shift != nullptr || floor > kNone; }
  static constexpr float kNone = -std::numeric_limits<float>::infinity();
};

// max(x * scale + shift, floor) of the channels of one place.
void write_place(const float* from, float* to, int channels, const float* scale, const float* shift,
                 float floor) {
#pragma omp simd
  for (int c = 0; c < channels; ++c) {
    float value = from[c];
    if (scale) value *= scale[c];
    if (shift) value += shift[c];
    to[c] = value < floor ? floor : value;
  }
}

bool is_pointwise(const Conv2dShape& p) {
  return p.r == 1 && p.s == 1 && p.stride_h == 1 && p.stride_w == 1 && p.pad_top == 0 &&
         p.pad_left == 0 && p.pad_bottom == 0 && p.pad_right == 0;
}

bool is_padded(const Conv2dShape& p) {
  return p.pad_top != 0 || p.pad_left != 0 || p.pad_bottom != 0 || p.pad_right != 0;
}

// A band of output rows, and the input rows under it.
struct Bands {
  int rows;      // of outputs, at most
  int count;     // of bands an image
  int in_rows;   // of inputs, at most
  int width;     // of inputs with their border
  int channels;  // side by side in what is written out

  Bands(const Conv2dShape& p, Conv2dMethod method, int threads)
      : width(p.w + p.pad_left + p.pad_right), channels(method == Conv2dMethod::planar ? 1 : p.c) {
    const std::int64_t row = std::int64_t{width} * p.c;
    const int out_h = p.out_h();
    std::int64_t most =
        (kBandFloats / row - std::int64_t{p.dilation_h} * (p.r - 1) - 1) / p.stride_h + 1;
    if (most < 1) most = 1;
    if (most > out_h) most = out_h;
    count = static_cast<int>((out_h + most - 1) / most);
    const int wanted = 4 * threads;
    if (threads > 1 && count * p.n < wanted) {
      count = (wanted + p.n - 1) / p.n;
      if (count > (out_h + 1) / 2) count = (out_h + 1) / 2;
    }
    rows = (out_h + count - 1) / count;
    in_rows = (rows - 1) * p.stride_h + p.dilation_h * (p.r - 1) + 1;
  }
  int first(int band, int out_h) const {
    return static_cast<int>(std::int64_t{out_h} * band / count);
  }
  std::int64_t floats(const Conv2dShape& p) const { return std::int64_t{in_rows} * width * p.c; }
};

std::int64_t direct_scratch(const Conv2dShape& p, Conv2dMethod method, int threads) {
  if (is_pointwise(p) && method == Conv2dMethod::direct) return std::int64_t{kRunRows} * p.c;
  return Bands(p, method, 1).floats(p);  // with more threads bands are smaller
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

Epilogue epilogue_of(const Direct& call, int g, int filters) {
  return {call.bias ? call.bias + std::int64_t{g} * filters : nullptr, nullptr,
          call.activation.lowest, call.activation.highest};
}

void pointwise(const Direct& call, const Scratch& scratch, const Conv2dShape& p, int threads) {
  const std::int64_t area = std::int64_t{p.h} * p.w, places = p.n * area;
  const int channels = p.group_channels(), filters = p.group_filters();
  const std::int64_t zero = 0;
  std::int64_t runs = (places + kRunRows - 1) / kRunRows;
  if (threads > 1 && runs < 4 * threads) {
    const std::int64_t most = (places + 23) / 24;
    runs = most < 4 * threads ? (most > runs ? most : runs) : 4 * threads;
  }
  const int shares = filter_shares(runs * p.groups, filters, threads);
  const std::int64_t cost = (places / runs + 1) * p.c * filters / shares;
  const bool copies = call.prologue.any();
  parallel_for(runs * shares, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t run = index / shares;
      const int share = static_cast<int>(index % shares);
      const std::int64_t first = places * run / runs;
      const int count = static_cast<int>(places * (run + 1) / runs - first);
      const float* x = call.input + first * call.pitches.x;
      std::int64_t stride = call.pitches.x;
      if (copies) {
        for (int i = 0; i < count; ++i) {
          const Prologue& z = call.prologue;
          const float* scale = z.per_image ? z.scale + (first + i) / area * p.c : z.scale;
          write_place(x + i * stride, part.data() + std::int64_t{i} * p.c, p.c, scale, z.shift,
                      z.floor);
        }
        x = part.data();
        stride = p.c;
      }
      const int from = share_begin(filters, share, shares);
      const int to = share_begin(filters, share + 1, shares);
      for (int g = 0; g < p.groups; ++g) {
        Product product{&zero,
                        1,
                        ChannelParts(channels, 1),
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
        multiply_runs(product, from, to, epilogue_of(call, g, filters), [&](const auto& body) {
          body(x + std::int64_t{g} * channels, y, residual, count);
        });
        call.activation.apply(y + from, call.pitches.y, count, to - from);
      }
    }
  });
}

// Writes input rows [top, top + rows), which may lie outside, with their border and the prologue.
void write_band(const Direct& call, const Conv2dShape& p, const Bands& bands, int n, int top,
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
  const bool plain = !z.any();
  for (int i = 0; i < rows; ++i) {
    float* row = to + std::int64_t{i} * width * p.c;
    const int y = top + i;
    if (y < 0 || y >= p.h) {
      fill_zero(row, width * p.c);
      continue;
    }
    fill_zero(row, p.pad_left * p.c);
    row += std::int64_t{p.pad_left} * p.c;
    const float* from = image + std::int64_t{y} * p.w * call.pitches.x;
    if (plain && call.pitches.x == p.c) {
      __builtin_memcpy(row, from, sizeof(float) * p.w * p.c);
    } else {
      for (int x = 0; x < p.w; ++x) {
        if (plain) {
          __builtin_memcpy(row + std::int64_t{x} * p.c, from, sizeof(float) * p.c);
        } else {
          write_place(from, row + std::int64_t{x} * p.c, p.c, scale, z.shift, z.floor);
        }
        from += call.pitches.x;
      }
    }
    fill_zero(row + std::int64_t{p.w} * p.c, p.pad_right * p.c);
  }
}

void banded(const Direct& call, const Scratch& scratch, const Conv2dShape& p, bool planar,
            int threads) {
  const Bands bands(p, planar ? Conv2dMethod::planar : Conv2dMethod::direct, threads);
  const int out_h = p.out_h(), out_w = p.out_w();
  const int channels = p.group_channels(), filters = p.group_filters();
  const std::int64_t tasks = std::int64_t{p.n} * bands.count;
  const int shares = filter_shares(tasks, filters, threads);
  const std::int64_t cost = std::int64_t{bands.rows} * out_w * p.taps() * p.k / shares;
  const bool copies = planar || is_padded(p) || call.prologue.any();
  const std::int64_t pitch = planar ? 1 : copies ? p.c : call.pitches.x;
  const std::int64_t row = copies ? bands.width * (planar ? 1 : p.c) : p.w * pitch;
  const int tap_count = planar ? p.taps() : p.r * p.s;
  std::int64_t taps[kMostTaps];
  for (int a = 0; a < tap_count; ++a) {
    const int s = a % p.s, r = a / p.s % p.r, c = a / p.s / p.r;
    taps[a] = c * bands.in_rows * row + r * p.dilation_h * row + s * p.dilation_w * pitch;
  }
  parallel_for(tasks * shares, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    std::int64_t written = -1;
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t task = index / shares;
      const int share = static_cast<int>(index % shares);
      const int n = static_cast<int>(task / bands.count);
      const int band = static_cast<int>(task % bands.count);
      const int first = bands.first(band, out_h);
      const int rows = bands.first(band + 1, out_h) - first;
      const int top = first * p.stride_h - p.pad_top;
      const float* x = part.data();
      if (!copies) {
        x = call.input + (std::int64_t{n} * p.h + top) * row;
      } else if (task != written) {
        const int in_rows = (rows - 1) * p.stride_h + p.dilation_h * (p.r - 1) + 1;
        write_band(call, p, bands, n, top, in_rows, planar, part.data());
        written = task;
      }
      const int from = share_begin(filters, share, shares);
      const int to = share_begin(filters, share + 1, shares);
      const std::int64_t place = (std::int64_t{n} * out_h + first) * out_w;
      for (int g = 0; g < p.groups; ++g) {
        Product product{taps,
                        tap_count,
                        ChannelParts(planar ? 1 : channels, tap_count),
                        p.stride_w * pitch,
                        nullptr,
                        filters,
                        call.pitches.y,
                        call.pitches.residual};
        product.weights = call.packed + g * filter_groups(filters) * product.group_size();
        float* y = call.output + place * call.pitches.y + std::int64_t{g} * filters;
        const float* residual = call.residual ? call.residual + place * call.pitches.residual +
                                                    std::int64_t{g} * filters
                                              : nullptr;
        multiply_runs(product, from, to, epilogue_of(call, g, filters), [&](const auto& body) {
          for (int i = 0; i < rows; ++i) {
            const std::int64_t at = std::int64_t{i} * out_w;
            body(x + i * p.stride_h * row + std::int64_t{g} * channels, y + at * call.pitches.y,
                 residual ? residual + at * call.pitches.residual : nullptr, out_w);
          }
        });
        call.activation.apply(y + from, call.pitches.y, std::int64_t{rows} * out_w, to - from);
      }
    }
  });
}

}  // namespace

std::int64_t conv2d_nhwc_packed(const Conv2dShape& p, Conv2dMethod method) {
  const std::int64_t filters = std::int64_t{filter_groups(p.group_filters())} * kFilterGroup;
  if (method == Conv2dMethod::winograd4) return 36 * filters * p.c;
  if (method == Conv2dMethod::winograd2) return 16 * filters * p.c;
  if (method == Conv2dMethod::depthwise) return depthwise_packed(p);
  return p.groups * filters * p.taps();
}

void conv2d_nhwc_pack(const float* weight, float* packed, const Conv2dShape& shape,
                      Conv2dMethod method, int threads) {
  const Conv2dShape p = shape;
  if (method == Conv2dMethod::winograd4 || method == Conv2dMethod::winograd2) {
    return winograd_pack(weight, packed, p, method, threads);
  }
  if (method == Conv2dMethod::depthwise) return depthwise_pack(weight, packed, p);
  const bool planar = method == Conv2dMethod::planar;
  const int area = p.r * p.s, filters = p.group_filters();
  const int tap_count = planar ? p.taps() : area, channels = planar ? 1 : p.group_channels();
  const ChannelParts parts(channels, tap_count);
  for (int g = 0; g < p.groups; ++g) {
    for (int group = 0; group < filter_groups(filters); ++group) {
      for (int part = 0; part < parts.count; ++part) {
        for (int a = 0; a < tap_count; ++a) {
          for (int c = parts.first(part); c < parts.first(part + 1); ++c) {
            for (int i = 0; i < kFilterGroup; ++i) {
              const int k = group * kFilterGroup + i;
              const std::int64_t filter = (std::int64_t{g} * filters + k) * p.taps();
              *packed++ = k < filters ? weight[filter + (planar ? a : c * area + a)] : 0.0f;
            }
          }
        }
      }
    }
  }
}

namespace {

std::int64_t scratch_floats(const Conv2dShape& p, Conv2dMethod method, int threads) {
  if (method == Conv2dMethod::winograd4 || method == Conv2dMethod::winograd2) {
    return winograd_scratch(p, method);
  }
  if (method == Conv2dMethod::depthwise) return depthwise_scratch(p);
  return direct_scratch(p, method, threads);
}

}  // namespace

std::int64_t conv2d_nhwc_workspace(const Conv2dShape& shape, Conv2dMethod method, int threads) {
  return Scratch::bytes(threads, scratch_floats(shape, method, threads));
}

void conv2d_nhwc(const float* input, const float* packed, const float* bias, const float* residual,
                 const float* scale, const float* shift, float* output, void* workspace,
                 const Conv2dShape& shape, const Conv2dPitches& pitches, Conv2dMethod method,
                 bool scale_per_image, float floor, UnaryFunction activation, float alpha,
                 float beta, int threads) {
  if (shape.n == 0) return;
  const Conv2dShape p = shape;
  const Scratch scratch(workspace, threads, scratch_floats(p, method, threads));
  const Direct call{input,
                    packed,
                    bias,
                    residual,
                    {scale, shift, scale_per_image, floor},
                    output,
                    pitches,
                    {activation, alpha, beta}};
  switch (method) {
    case Conv2dMethod::winograd2:
    case Conv2dMethod::winograd4:
      return winograd(input, packed, bias, residual, output, scratch, p, pitches, method,
                      call.activation, threads);
    case Conv2dMethod::planar:
      return banded(call, scratch, p, true, threads);
    case Conv2dMethod::depthwise:
      return depthwise(input, packed, bias, residual, output, scratch, p, pitches, call.activation,
                       threads);
    case Conv2dMethod::direct:
      if (is_pointwise(p)) return pointwise(call, scratch, p, threads);
      return banded(call, scratch, p, false, threads);
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
