#include "cpu/fused/operations.h"

#include <algorithm>
#include <cmath>

#include "cpu/fused/kernel_transform.h"

namespace cnn_engine::cpu::fused {
namespace {

Activation activation_of(LayerKind kind) {
  return kind == LayerKind::relu   ? Activation::relu
         : kind == LayerKind::tanh ? Activation::tanh
                                   : Activation::none;
}

// Estimated time in multiply-adds of one lane. A transform adds on pipes of its own beside the
// multiply-adds, and costs each element it touches about as much as two of them (measured).
double direct_cost(const Operation& op, bool bfloat16, const FusedKernels& kernels) {
  const auto& layer = *op.layer;
  const double k = round_up(layer.out_channels, pick_lanes(layer.out_channels, kernels));
  const int c = bfloat16 ? (op.c + 1) / 2 : op.c;  // VDPBF16PS: a pair of channels at once
  return double(op.conv_h) * op.conv_w * layer.kernel_h * layer.kernel_w * c * k;
}

struct Tile {
  int h, w;
  bool planar;
};

// Whether rows are summed as they are: of a first layer's few products, tiles of two dimensions
// would lose too much.
bool along_rows(const Tile& tile) { return tile.h < tile.w; }

double winograd_cost(const Operation& op, const Tile& tile, const FusedKernels& kernels) {
  const auto& layer = *op.layer;
  const double k = round_up(layer.out_channels, pick_lanes(layer.out_channels, kernels));
  const double columns = tile.w + layer.kernel_w - 1;
  const double frequencies = (tile.h + layer.kernel_h - 1) * columns;
  const double macs = along_rows(tile) ? tile.h * layer.kernel_h * columns : frequencies;
  const double sums = along_rows(tile) ? tile.h * columns : frequencies;
  const double tiles =
      std::ceil(double(op.conv_h) / tile.h) * std::ceil(double(op.conv_w) / tile.w);
  const double c = tile.planar ? op.c : round_up(op.c, kernels.channel_lanes);
  // Of windows, measured too.
  const double test = double(op.conv_h) * op.conv_w * ((op.pool ? 20 : 80) + 4 * c);
  return tiles * (macs * op.c * k + 2 * frequencies * c + 2 * sums * k) + test;
}

// A side of a tile: its outputs and kernel offsets, the steps of the kernel offsets of that side
// and of the other, and how channels add up (error_gains).
struct Side {
  int outputs, kernel_offsets, step, other_step;
  double alike;
  bool one_sum;
};

// How much of the input's square reaches the square of each output's rounding error,
// [output][input] of a side of a tile, with signs at random: the sum over frequencies of the
// squares of A^T's and B^T's factors and of the weights, each filter's as parts of its kernel
// offsets' square, the largest of all. Where an image's channels and neighbours are alike, products
// add up as the weights do: `alike` times the squares of partial sums, over channels and, in
// `one_sum`, the other side's kernel offsets.
void error_gains(const LayerDescription& layer, int channels, const Side& side,
                 double (&gains)[4][8]) {
  const auto [m, r, step, other_step, alike, one_sum] = side;
  const int finite = m + r - 2;
  const double (&points)[7] = points_of(finite);
  double g[8][5], weights[8] = {}, alike_weights[8] = {}, least = 1e300;
  kernel_transform(m, r, g);
  const float* w = layer.weight;
  for (int k = 0; k < layer.out_channels; ++k) {
    double sums[8] = {}, square = 0, size = 0, partial[5][8] = {}, partial_squares[8] = {};
    for (int i = 0; i < channels; ++i, w += r * r) {
      for (int j = 0; j < r; ++j) {
        for (int f = 0; f <= finite; ++f) {
          double sum = 0;
          for (int t = 0; t < r; ++t) sum += g[f][t] * w[j * other_step + t * step];
          sums[f] += sum * sum;
          double& part = partial[one_sum ? 0 : j][f];
          part += sum;
          partial_squares[f] += part * part;
        }
        for (int t = 0; t < r; ++t) {
          const double value = w[j * other_step + t * step];
          square += value * value;
          size += std::fabs(value);
        }
      }
    }
    if (size == 0) continue;
    least = std::min(least, size * size / square);
    for (int f = 0; f <= finite; ++f) {
      weights[f] = std::max(weights[f], sums[f] / (size * size));
      alike_weights[f] = std::max(alike_weights[f], partial_squares[f] / (size * size));
    }
  }
  for (int f = 0; f <= finite; ++f) {
    weights[f] = least * std::max(weights[f], alike * alike_weights[f]);
  }
  for (int f = 0; f <= finite; ++f) {
    double row[8] = {1};  // of B^T: the product of x - p over the other points p
    int degree = 0;
    for (int p = 0; p < finite; ++p) {
      if (p == f) continue;
      ++degree;
      for (int j = degree; j >= 0; --j) row[j] = (j > 0 ? row[j - 1] : 0) - points[p] * row[j];
    }
    double power = f < finite ? 1 : 0;
    for (int i = 0; i < m; ++i) {
      if (f == finite && i == m - 1) power = 1;
      for (int j = 0; j <= degree; ++j) gains[i][j] += power * power * weights[f] * row[j] * row[j];
      if (f < finite) power *= points[f];
    }
  }
}

// What the weights ask of windows (window_bound.h): that errors of so many standard deviations,
// with a sum |x||w| that is less than its mean by as many of its own, are within the bound.
constexpr double kDeviations = 4.0;

// Of a frequency's products, `sums` of which are added up, the rounding error's square by their
// own: measured, with signs at random and some of one sign, as smooth images and filters have them.
// Those of a bright position that an output does not read may all be of one sign.
double rounding(int sums, bool outside) {
  return 1 + 0.1 * sums + (outside ? 0.016 : 0.004) * sums * sums;
}

// The same by the squares of partial sums, of photographs and smooth filters: measured.
constexpr double kSameSign = 0.1;

TileBound bound_of(const Operation& op, const Tile& tile, bool first, bool bfloat16,
                   const FusedKernels& kernels) {
  const LayerDescription& layer = *op.layer;
  const int r = layer.kernel_h, step = op.pool ? 2 : 1;
  const int sums = along_rows(tile) ? op.c * r : op.c;
  const double outside = rounding(sums, true) / rounding(sums, false);
  double kappa = kernels.product_rounding * kDeviations * std::sqrt(rounding(sums, false));
  if (bfloat16) kappa /= 1 << 14;  // other layers round 2^15 times more

  double rows[4][8] = {}, columns[4][8] = {}, largest[2] = {};
  if (along_rows(tile)) {
    for (int i = 0; i < tile.h; ++i) std::fill_n(rows[i] + i, r, 1.0 / r);
  } else {
    error_gains(layer, op.c, {tile.h, r, r, 1, 0.0, false}, rows);
  }
  const double alike = op.c < kBoundChannels ? kSameSign / rounding(sums, false) : 0.0;
  error_gains(layer, op.c, {tile.w, r, 1, r, alike, along_rows(tile)}, columns);
  const auto complete = [&](double (&gains)[4][8], int outputs, double& most) {
    for (int i = 0; i < outputs; ++i) {
      double sum = 0;
      for (int j = 0; j < outputs + r - 1; ++j) {
        if (j < i || j >= i + r) gains[i][j] *= outside;
        sum += gains[i][j];
      }
      most = std::max(most, sum / (r + step - 1));
      if (step == 1) continue;
      for (int j = 0; j < 8; ++j) {
        gains[i / 2][j] = i % 2 ? std::max(gains[i / 2][j], gains[i][j]) : gains[i][j];
      }
    }
  };
  complete(rows, tile.h, largest[0]);
  complete(columns, tile.w, largest[1]);

  TileBound bound{};
  // Images are even beside what a ReLU leaves.
  bound.window = window_bound(
      layer.weight, layer.out_channels, op.c, r, r,
      {kappa, largest[0] * largest[1], first ? 0.6 : 0.15, kDeviations, /*squares=*/true, step,
       /*grey=*/op.c < kBoundChannels});
  for (int i = 0; i < tile.h / step; ++i) {
    for (int j = 0; j < 8; ++j) bound.rows[i][j] = static_cast<float>(rows[i][j]);
  }
  for (int lane = 0; lane < 16; ++lane) {
    const int output = lane % (tile.w / step);
    for (int j = 0; j < tile.w + r - 1; ++j) {
      bound.columns[kBefore + j - output * step][lane] =
          static_cast<float>(bound.window.tile * columns[output][j]);
    }
  }
  return bound;
}

// Tiles of 4x4 outputs of 5x5 kernels round most, so only bfloat16 has them; the last convolution,
// whose errors nothing after it averages out, has 2x2 (docs/explanation/numerics.md has the
// errors of each choice). So has one before a tanh: what tanh passes on is the small sums of large
// products, and a tile's error is that of its largest sum.
bool accurate(const Operation& op, const Tile& tile, bool last, bool tanh, bool bfloat16) {
  if (bfloat16) return !along_rows(tile);  // its tolerance is a thousand times theirs
  if (tanh) return tile.h == 2;
  if (op.layer->kernel_h == 3) return true;
  return last ? tile.h == 2 : tile.w == 2 || along_rows(tile);
}

void choose_tile(Operation& op, bool first, bool last, bool tanh, bool bfloat16,
                 const FusedKernels& kernels) {
  const auto& layer = *op.layer;
  op.kind = StepKind::direct;
  const bool square =
      layer.kernel_h == layer.kernel_w && layer.stride_h == 1 && layer.stride_w == 1;
  if (!square || (layer.kernel_h != 5 && layer.kernel_h != 3)) return;
  double best = direct_cost(op, bfloat16, kernels);
  const bool planar = first && op.c < kernels.channel_lanes;
  const Tile tiles[] = {{4, 4, planar}, {4, 2, planar}, {2, 4, planar}, {2, 2, planar}};
  for (const Tile& tile : tiles) {
    // A planar image has tiles of four columns, and it alone has those of rows.
    if (planar ? tile.w != 4 : along_rows(tile)) continue;
    // Square kernels of 3x3 have square tiles alone.
    if (layer.kernel_h == 3 && tile.h > tile.w) continue;
    if (!accurate(op, tile, last, tanh, bfloat16)) continue;
    const double cost = winograd_cost(op, tile, kernels);
    if (cost >= best) continue;
    const TileBound bound = bound_of(op, tile, first, bfloat16, kernels);
    if (bound.window.fits == 0.0f) continue;
    best = cost;
    op.kind = StepKind::winograd;
    op.tile_h = tile.h;
    op.tile_w = tile.w;
    op.bound = bound;
  }
}

// Whether a convolution that is computed in tiles can pool its outputs by this layer.
bool pools_tiles(const LayerDescription& layer) {
  return layer.kind == LayerKind::max_pool2d && layer.kernel_h == 2 && layer.kernel_w == 2 &&
         layer.stride_h == 2 && layer.stride_w == 2 && layer.pad_h == 0 && layer.pad_w == 0;
}

}  // namespace

int pick_lanes(int channels, const FusedKernels& kernels) {
  return round_up(channels, kernels.wide) == round_up(channels, kernels.narrow) ? kernels.wide
                                                                                : kernels.narrow;
}

bool is_tail(StepKind kind) {
  return kind == StepKind::linear || kind == StepKind::flatten || kind == StepKind::softmax;
}

Conv2dShape conv_shape(const LayerDescription& layer, int c, int h, int w) {
  return {1,
          c,
          h,
          w,
          layer.out_channels,
          layer.kernel_h,
          layer.kernel_w,
          layer.stride_h,
          layer.stride_w,
          layer.pad_h,
          layer.pad_w};
}

MaxPool2dShape pool_shape(const LayerDescription& layer, int c, int h, int w) {
  return {
      1,           c,          h, w, layer.kernel_h, layer.kernel_w, layer.stride_h, layer.stride_w,
      layer.pad_h, layer.pad_w};
}

std::vector<Operation> operations_of(const NetworkDescription& description, bool bfloat16,
                                     const FusedKernels& kernels) {
  std::vector<Operation> operations;
  int c = description.c, h = description.h, w = description.w;
  const auto& layers = description.layers;
  std::size_t pooled = layers.size();  // layer that the last convolution does
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerDescription& layer = layers[i];
    const int index = static_cast<int>(i);
    Operation op{StepKind::activate, &layer, c, h, w, c, h, w};
    op.layers = {index};
    Operation* last = operations.empty() ? nullptr : &operations.back();
    switch (layer.kind) {
      case LayerKind::conv2d: {
        const Conv2dShape shape = conv_shape(layer, c, h, w);
        op.out_c = shape.k;
        op.out_h = op.conv_h = shape.out_h();
        op.out_w = op.conv_w = shape.out_w();
        const bool final = std::none_of(
            layers.begin() + i + 1, layers.end(),
            [](const LayerDescription& later) { return later.kind == LayerKind::conv2d; });
        const auto next = std::find_if(
            layers.begin() + i + 1, layers.end(),
            [](const LayerDescription& later) { return later.kind != LayerKind::max_pool2d; });
        const bool tanh = next != layers.end() && next->kind == LayerKind::tanh;
        std::size_t after = i + 1;
        if (after < layers.size() && activation_of(layers[after].kind) != Activation::none) ++after;
        op.pool =
            after < layers.size() && op.out_h > 1 && op.out_w > 1 && pools_tiles(layers[after]);
        choose_tile(op, !last, final && last, tanh, bfloat16, kernels);
        op.pool = op.pool && op.kind == StepKind::winograd;
        if (op.pool) pooled = after;
        break;
      }
      case LayerKind::max_pool2d: {
        const MaxPool2dShape shape = pool_shape(layer, c, h, w);
        if (pooled == i) {
          last->layers.push_back(index);
          last->out_h = h = shape.out_h();
          last->out_w = w = shape.out_w();
          continue;
        }
        op.kind = StepKind::max_pool;
        // A rising activation commutes with the maximum, and has less to do after it.
        if (last && last->kind == StepKind::direct && last->activation != Activation::none) {
          std::swap(op.activation, last->activation);
          op.layers.insert(op.layers.begin(), last->layers.back());
          last->layers.pop_back();
        }
        op.out_h = shape.out_h();
        op.out_w = shape.out_w();
        break;
      }
      case LayerKind::relu:
      case LayerKind::tanh:
        op.activation = activation_of(layer.kind);
        if (last && last->activation == Activation::none && last->kind != StepKind::softmax) {
          last->activation = op.activation;
          last->layers.push_back(index);
          continue;
        }
        break;
      case LayerKind::linear:
        op.kind = StepKind::linear;
        op.out_c = layer.out_channels;
        op.out_h = op.out_w = 1;
        break;
      case LayerKind::softmax:
        if (h * w > 1) {
          Operation flatten{StepKind::flatten, &layer, c, h, w, c * h * w, 1, 1};
          flatten.layers.swap(op.layers);
          operations.push_back(flatten);
          op.c = c * h * w;
          op.h = op.w = 1;
        }
        op.kind = StepKind::softmax;
        op.out_c = op.c;
        op.out_h = op.out_w = 1;
        break;
    }
    operations.push_back(op);
    c = op.out_c, h = op.out_h, w = op.out_w;
  }
  if (h * w > 1 || std::none_of(operations.begin(), operations.end(),
                                [](const Operation& op) { return is_tail(op.kind); })) {
    operations.push_back({StepKind::flatten, nullptr, c, h, w, c * h * w, 1, 1});
  }
  return operations;
}

}  // namespace cnn_engine::cpu::fused
