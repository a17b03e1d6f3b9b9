// What the fused kernels refuse, and how they say it.
#include <cmath>
#include <limits>
#include <stdexcept>

#include "cpu/fused/operations.h"
#include "ops/linear.h"

namespace cnn_engine::cpu::fused {
namespace {

void require_finite(const char* name, const float* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) {
      throw std::invalid_argument(std::string(name) + ": expected finite numbers, found " +
                                  std::to_string(values[i]) + " at " + std::to_string(i));
    }
  }
}

void require_weights(const LayerDescription& layer, std::int64_t count) {
  if (!layer.weight) throw std::invalid_argument("weight: expected its address, found null");
  require_finite("weight", layer.weight, count);
  if (layer.bias) require_finite("bias", layer.bias, layer.out_channels);
}

}  // namespace

std::string why_not(const NetworkDescription& description) {
  int c = description.c, h = description.h, w = description.w;
  bool flat = false;
  if (description.layers.empty()) return "layers: expected at least one, found none";
  for (std::size_t i = 0; i < description.layers.size(); ++i) {
    const LayerDescription& layer = description.layers[i];
    try {
      require_at_least("channels", c, 1);
      require_at_least("height", h, 1);
      require_at_least("width", w, 1);
      require_indexable("input", c, h, w);
      if (flat && (layer.kind == LayerKind::conv2d || layer.kind == LayerKind::max_pool2d)) {
        throw std::invalid_argument("expected an input of channels, rows and columns, found " +
                                    std::to_string(c) + " features");
      }
      if (layer.kind == LayerKind::conv2d) {
        const Conv2dShape shape = conv_shape(layer, c, h, w);
        shape.validate();
        require_weights(layer, shape.weight_size());
        c = shape.k, h = shape.out_h(), w = shape.out_w();
      } else if (layer.kind == LayerKind::max_pool2d) {
        const MaxPool2dShape shape = pool_shape(layer, c, h, w);
        shape.validate();
        h = shape.out_h(), w = shape.out_w();
      } else if (layer.kind == LayerKind::linear) {
        const LinearShape shape{1, c * h * w, layer.out_channels};
        shape.validate();
        // Channels are padded to whole vectors, of up to 16, and counted in an int.
        constexpr int kMostFeatures = std::numeric_limits<int>::max() / 16;
        if (shape.in_features > kMostFeatures) {
          throw std::invalid_argument("in_features: expected at most " +
                                      std::to_string(kMostFeatures) + ", found " +
                                      std::to_string(shape.in_features));
        }
        require_weights(layer, std::int64_t{shape.in_features} * shape.out_features);
        c = layer.out_channels, h = w = 1;
        flat = true;
      } else if (layer.kind == LayerKind::softmax) {
        c = c * h * w, h = w = 1;
        flat = true;
      }
    } catch (const std::invalid_argument& error) {
      return "layer " + std::to_string(i + 1) + " (" + name_of(layer.kind) + "): " + error.what();
    }
  }
  return "";
}

}  // namespace cnn_engine::cpu::fused
