// Whether a description, known at run time, is a network that was compiled in.
#pragma once

#include <string>
#include <vector>

#include "cuda/fused/geometry.cuh"
#include "ops/network.h"

namespace cnn_engine::cuda::fused {

inline std::string text_of(const LayerDescription& layer) {
  const auto pair = [](int a, int b) {
    return std::to_string(a) + "x" + std::to_string(b);
  };
  std::string text = name_of(layer.kind);
  if (layer.kind == LayerKind::conv2d || layer.kind == LayerKind::linear) {
    text += " to " + std::to_string(layer.out_channels);
  }
  if (layer.kind == LayerKind::conv2d || layer.kind == LayerKind::max_pool2d) {
    text += " kernel " + pair(layer.kernel_h, layer.kernel_w) + " stride " +
            pair(layer.stride_h, layer.stride_w) + " padding " + pair(layer.pad_h, layer.pad_w);
  }
  return text;
}

// Reads a description from its start, remembering the first difference.
class Matcher {
 public:
  explicit Matcher(const NetworkDescription& description) : description_(description) {}

  void input(int c, int h, int w) {
    const auto text = [](int a, int b, int d) {
      return std::to_string(a) + "x" + std::to_string(b) + "x" + std::to_string(d);
    };
    if (description_.c != c || description_.h != h || description_.w != w) {
      difference_ = "input: expected " + text(c, h, w) + ", found " +
                    text(description_.c, description_.h, description_.w);
    }
  }

  template <class Layer>
  void conv() {
    LayerDescription expected;
    expected.kind = LayerKind::conv2d;
    expected.out_channels = Layer::kFilters;
    expected.kernel_h = expected.kernel_w = Layer::kKernel;
    expected.pad_h = expected.pad_w = Layer::kPad;
    next(expected);
    // The activation and the pooling may come in either order: the activations rise.
    LayerDescription activation, pool;
    activation.kind = Layer::kActivation == Activation::tanh ? LayerKind::tanh : LayerKind::relu;
    pool.kind = LayerKind::max_pool2d;
    pool.kernel_h = pool.kernel_w = pool.stride_h = pool.stride_w = 2;
    const bool pool_first = Layer::kPool && at(LayerKind::max_pool2d);
    if (pool_first) next(pool);
    if (Layer::kActivation != Activation::none) next(activation);
    if (Layer::kPool && !pool_first) next(pool);
  }

  void head(int classes) {
    LayerDescription linear, softmax;
    linear.kind = LayerKind::linear;
    linear.out_channels = classes;
    softmax.kind = LayerKind::softmax;
    next(linear);
    next(softmax);
  }

  void end() {
    if (difference_.empty() && used_ < description_.layers.size()) {
      difference_ = "layer " + std::to_string(used_ + 1) + ": expected no more layers, found " +
                    text_of(description_.layers[used_]);
    }
  }

  const std::string& difference() const { return difference_; }

 private:
  bool at(LayerKind kind) const {
    return used_ < description_.layers.size() && description_.layers[used_].kind == kind;
  }

  void next(const LayerDescription& expected) {
    if (!difference_.empty()) return;
    const std::string name =
        "layer " + std::to_string(used_ + 1) + ": expected " + text_of(expected);
    if (used_ == description_.layers.size()) {
      difference_ = name + ", found the network's end";
    } else if (text_of(description_.layers[used_]) != text_of(expected)) {
      difference_ = name + ", found " + text_of(description_.layers[used_]);
    } else {
      ++used_;
    }
  }

  const NetworkDescription& description_;
  std::string difference_;
  std::size_t used_ = 0;
};

template <class Net, int I = 0>
void match_convolutions(Matcher& matcher) {
  matcher.conv<typename Net::template Layer<I>>();
  if constexpr (I + 1 < Net::kLayers) match_convolutions<Net, I + 1>(matcher);
}

// How many of the description's layers each part of the kernel covers (ticks.cuh).
template <class Net, int I = 0>
std::vector<int> parts() {
  if constexpr (I == Net::kLayers) {
    return Net::kClasses > 0 ? std::vector<int>{1, 1} : std::vector<int>{};
  } else {
    using Layer = typename Net::template Layer<I>;
    std::vector<int> all = parts<Net, I + 1>();
    all.insert(all.begin(), 1 + (Layer::kActivation != Activation::none) + Layer::kPool);
    return all;
  }
}

template <class Net>
std::string difference(const NetworkDescription& description) {
  Matcher matcher(description);
  matcher.input(Net::kChannels, Net::kHeight, Net::kWidth);
  match_convolutions<Net>(matcher);
  if constexpr (Net::kClasses > 0) matcher.head(Net::kClasses);
  matcher.end();
  return matcher.difference();
}

}  // namespace cnn_engine::cuda::fused
