#include "cpu/fused/operations.h"

#include <algorithm>
#include <cmath>

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

double winograd_cost(const Operation& op, int tile_h, int tile_w, bool planar,
                     const FusedKernels& kernels) {
  const auto& layer = *op.layer;
  const double k = round_up(layer.out_channels, pick_lanes(layer.out_channels, kernels));
  const double frequencies = double(tile_h + layer.kernel_h - 1) * (tile_w + layer.kernel_w - 1);
  const double tiles =
      std::ceil(double(op.conv_h) / tile_h) * std::ceil(double(op.conv_w) / tile_w);
  const double c = planar ? op.c : round_up(op.c, kernels.channel_lanes);
  return tiles * frequencies * (op.c * k + 2 * c + 2 * k);
}

// Larger tiles need fewer multiplications and round more, so 5x5 kernels, whose tiles of 4x4
// outputs lose most, have them only where the image itself is read; the last convolution, whose
// errors nothing after it averages out, has 2x2 (docs/performance.md has the errors of each
// choice). So has one before a tanh: what tanh passes on is the small sums of large products, and a
// tile's error is that of its largest sum.
bool accurate(const Operation& op, int tile_h, int tile_w, bool first, bool last, bool tanh,
              bool bfloat16) {
  if (bfloat16) return true;  // its tolerance is a thousand times theirs
  if (tanh) return tile_h == 2 && tile_w == 2;
  if (op.layer->kernel_h == 3) return true;
  return first || (last ? tile_h == 2 : tile_w == 2);
}

void choose_tile(Operation& op, bool first, bool last, bool tanh, bool bfloat16,
                 const FusedKernels& kernels) {
  const auto& layer = *op.layer;
  op.kind = StepKind::direct;
  const bool square =
      layer.kernel_h == layer.kernel_w && layer.stride_h == 1 && layer.stride_w == 1;
  if (!square || (layer.kernel_h != 5 && layer.kernel_h != 3)) return;
  double best = direct_cost(op, bfloat16, kernels);
  const int sizes[][2] = {{4, 4}, {4, 2}, {2, 2}};
  for (const auto& size : sizes) {
    if (layer.kernel_h == 3 && size[0] != size[1]) continue;  // 3x3 kernels have square ones alone
    if (!accurate(op, size[0], size[1], first, last, tanh, bfloat16)) continue;
    const bool planar = first && op.c < kernels.channel_lanes && size[1] == 4;
    const double cost = winograd_cost(op, size[0], size[1], planar, kernels);
    if (cost < best) {
      best = cost;
      op.kind = StepKind::winograd;
      op.tile_h = size[0];
      op.tile_w = size[1];
    }
  }
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
        choose_tile(op, !last, final && last, tanh, bfloat16, kernels);
        break;
      }
      case LayerKind::max_pool2d: {
        const MaxPool2dShape shape = pool_shape(layer, c, h, w);
        if (last && last->kind == StepKind::winograd && !last->pool && shape.r == 2 &&
            shape.s == 2 && shape.stride_h == 2 && shape.stride_w == 2 && shape.pad_top == 0 &&
            shape.pad_left == 0) {
          last->pool = true;
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
