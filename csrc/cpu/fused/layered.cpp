#include "cpu/fused/layered.h"

#include <algorithm>

#include "cpu/kernels.h"

namespace cnn_engine::cpu::fused {

LayeredNetwork::LayeredNetwork(const NetworkDescription& description) : description_(description) {
  int c = description.c, h = description.h, w = description.w;
  const auto copy = [&](const float*& values, std::size_t count) {
    if (!values) return;
    weights_.emplace_back(values, values + count);
    values = weights_.back().data();
  };
  for (LayerDescription& layer : description_.layers) {
    const Conv2dShape shape{1,
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
    if (layer.kind == LayerKind::conv2d) {
      copy(layer.weight, shape.weight_size());
      copy(layer.bias, layer.out_channels);
      c = shape.k, h = shape.out_h(), w = shape.out_w();
    } else if (layer.kind == LayerKind::max_pool2d) {
      const int rows = shape.out_h(), columns = shape.out_w();
      h = rows, w = columns;
    } else if (layer.kind == LayerKind::linear) {
      copy(layer.weight, std::size_t(layer.out_channels) * c * h * w);
      copy(layer.bias, layer.out_channels);
      c = layer.out_channels, h = w = 1;
    }
  }
}

void LayeredNetwork::run(const float* image, float* output,
                         const std::function<void(int)>& done) const {
  constexpr bool reduction = true;
  constexpr int threads = 1;
  const Kernels& kernels = selected_kernels();
  int c = description_.c, h = description_.h, w = description_.w;
  std::vector<float> in(image, image + std::size_t(c) * h * w), out;
  int index = 0;
  for (const LayerDescription& layer : description_.layers) {
    const std::size_t size = std::size_t(c) * h * w;
    switch (layer.kind) {
      case LayerKind::conv2d: {
        const Conv2dShape shape{1,
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
        out.resize(shape.output_size());
        kernels.conv2d(in.data(), layer.weight, layer.bias, out.data(), shape,
                       Conv2dVariant::direct, reduction, threads);
        c = shape.k, h = shape.out_h(), w = shape.out_w();
        break;
      }
      case LayerKind::max_pool2d: {
        const MaxPool2dShape shape{1,
                                   c,
                                   h,
                                   w,
                                   layer.kernel_h,
                                   layer.kernel_w,
                                   layer.stride_h,
                                   layer.stride_w,
                                   layer.pad_h,
                                   layer.pad_w};
        out.resize(shape.output_size());
        kernels.max_pool2d(in.data(), out.data(), shape, threads);
        h = shape.out_h(), w = shape.out_w();
        break;
      }
      case LayerKind::linear: {
        const LinearShape shape{1, static_cast<int>(size), layer.out_channels};
        out.resize(shape.out_features);
        kernels.linear(in.data(), layer.weight, layer.bias, out.data(), shape, reduction, threads);
        c = layer.out_channels, h = w = 1;
        break;
      }
      case LayerKind::relu:
      case LayerKind::tanh: {
        const ElementwiseShape shape{static_cast<std::int64_t>(size), 4};
        out.resize(size);
        (layer.kind == LayerKind::relu ? kernels.relu : kernels.tanh)(in.data(), out.data(), shape,
                                                                      threads);
        break;
      }
      case LayerKind::softmax: {
        const SoftmaxShape shape{1, static_cast<int>(size)};
        out.resize(size);
        kernels.softmax(in.data(), out.data(), shape, reduction, threads);
        c = static_cast<int>(size), h = w = 1;
        break;
      }
    }
    in.swap(out);
    done(index++);
  }
  std::copy(in.begin(), in.end(), output);
}

}  // namespace cnn_engine::cpu::fused
