#include "cuda/fused/network_shape.h"

#include <algorithm>

namespace cnn_engine::cuda::fused {
namespace {

// Of what a kernel of the first layer, and one of the fully connected layer, have in registers.
constexpr int kMostChannels = 4, kMostClasses = 16, kMostKernel = 7;

// What no multiprocessor has of shared memory.
constexpr std::int64_t kTooMuchShared = 256 * 1024;

std::string pair(int a, int b) { return std::to_string(a) + "x" + std::to_string(b); }

class Reader {
 public:
  Reader(const NetworkDescription& from, NetworkShape& to, std::vector<int>& parts)
      : from_(from), to_(to), parts_(parts) {}

  std::string read() {
    to_ = {from_.c, from_.h, from_.w, 0, 0, {}};
    if (from_.c > kMostChannels) {
      return "input: expected at most " + std::to_string(kMostChannels) + " channels, found " +
             std::to_string(from_.c);
    }
    int c = from_.c, h = from_.h, w = from_.w;
    std::int64_t numbers = std::int64_t{c} * h * w;
    while (at_ < from_.layers.size() && layer().kind == LayerKind::conv2d) {
      if (to_.layers.size() == kMostLayers) {
        return here() + "expected at most " + std::to_string(kMostLayers) +
               " convolutions, found more";
      }
      if (!to_.layers.empty()) numbers += std::int64_t{c} * h * w;
      const std::string why = convolution(c, h, w);
      if (!why.empty()) return why;
    }
    if (to_.layers.size() < 2) {
      return (at_ < from_.layers.size() ? here() : std::string("the network's end: ")) +
             "expected two convolutions at least, found " + std::to_string(to_.layers.size());
    }
    if (2 * numbers > kTooMuchShared) {
      return "activations: expected what fits into the shared memory of a block, found " +
             std::to_string(2 * numbers) + " bytes and more";
    }
    to_.features = c * h * w;
    return head();
  }

 private:
  const LayerDescription& layer() const { return from_.layers[at_]; }
  std::string here() const {
    return "layer " + std::to_string(at_ + 1) + " (" + name_of(layer().kind) + "): ";
  }
  bool is(LayerKind kind) const { return at_ < from_.layers.size() && layer().kind == kind; }

  std::string convolution(int& c, int& h, int& w) {
    const LayerDescription& l = layer();
    if (l.kernel_h != l.kernel_w || l.kernel_h > kMostKernel || l.kernel_h < 1) {
      return here() + "expected a square kernel of at most " + pair(kMostKernel, kMostKernel) +
             ", found " + pair(l.kernel_h, l.kernel_w);
    }
    if (l.stride_h != l.stride_w || l.stride_h < 1 || l.stride_h > 2) {
      return here() + "expected a stride of 1 or 2, found " + pair(l.stride_h, l.stride_w);
    }
    if (l.pad_h != l.pad_w || l.pad_h >= l.kernel_h || l.pad_h < 0) {
      return here() + "expected the same padding on all sides, less than the kernel, found " +
             pair(l.pad_h, l.pad_w);
    }
    if (l.out_channels < 1) {
      return here() + "expected a filter at least, found " + std::to_string(l.out_channels);
    }
    if (h + 2 * l.pad_h < l.kernel_h || w + 2 * l.pad_w < l.kernel_w) {
      return here() + "expected a kernel no larger than its input, found " +
             pair(l.kernel_h, l.kernel_w) + " on " + pair(h, w);
    }
    LayerShape to{c, l.out_channels, l.kernel_h, l.pad_h, l.stride_h, LayerKind::conv2d, false};
    c = l.out_channels;
    h = (h + 2 * l.pad_h - l.kernel_h) / l.stride_h + 1;
    w = (w + 2 * l.pad_w - l.kernel_w) / l.stride_w + 1;
    const std::size_t first = at_++;
    // Activation and pooling may come in either order: the activations rise.
    for (int i = 0; i < 2; ++i) {
      if (to.activation == LayerKind::conv2d && (is(LayerKind::relu) || is(LayerKind::tanh))) {
        to.activation = layer().kind;
        ++at_;
      } else if (!to.pool && is(LayerKind::max_pool2d)) {
        const LayerDescription& p = layer();
        if (p.kernel_h != 2 || p.kernel_w != 2 || p.stride_h != 2 || p.stride_w != 2 ||
            p.pad_h != 0 || p.pad_w != 0) {
          return here() + "expected 2x2, a stride of 2 and no padding, found " +
                 pair(p.kernel_h, p.kernel_w) + ", " + pair(p.stride_h, p.stride_w) + " and " +
                 pair(p.pad_h, p.pad_w);
        }
        if (to.stride != 1) return here() + "expected it behind a stride of 1, found 2";
        to.pool = true;
        h /= 2;
        w /= 2;
        ++at_;
      }
    }
    if (h < 1 || w < 1) {
      at_ = first;
      return here() + "expected something left by its pooling, found " + pair(h, w);
    }
    to_.layers.push_back(to);
    parts_.push_back(static_cast<int>(at_ - first));
    return "";
  }

  std::string head() {
    if (at_ == from_.layers.size()) return "";
    const LayerShape& last = to_.layers.back();
    if (!is(LayerKind::linear)) {
      return here() + "expected a convolution, a linear layer or the end";
    }
    if (layer().out_channels > kMostClasses || (!last.pool && last.stride == 1)) {
      return here() + "expected at most " + std::to_string(kMostClasses) +
             " outputs, behind a convolution that is pooled or has a stride of 2, found " +
             std::to_string(layer().out_channels);
    }
    to_.classes = layer().out_channels;
    ++at_;
    if (!is(LayerKind::softmax) || at_ + 1 != from_.layers.size()) {
      const std::string where = at_ < from_.layers.size() ? here() : "the network's end: ";
      return where + "expected softmax, and then the end";
    }
    parts_.push_back(1);
    parts_.push_back(1);
    return "";
  }

  const NetworkDescription& from_;
  NetworkShape& to_;
  std::vector<int>& parts_;
  std::size_t at_ = 0;
};

}  // namespace

std::string read(const NetworkDescription& description, NetworkShape& network_shape,
                 std::vector<int>& parts) {
  parts.clear();
  return Reader(description, network_shape, parts).read();
}

bool same(const NetworkShape& a, const NetworkShape& b) {
  return a.c == b.c && a.h == b.h && a.w == b.w && a.classes == b.classes &&
         std::equal(a.layers.begin(), a.layers.end(), b.layers.begin(), b.layers.end(),
                    [](const LayerShape& x, const LayerShape& y) {
                      return x.filters == y.filters && x.kernel == y.kernel && x.pad == y.pad &&
                             x.stride == y.stride && x.activation == y.activation &&
                             x.pool == y.pool;
                    });
}

std::string source_of(const NetworkShape& network_shape, const char* format, int parts) {
  std::string text =
      "#include \"cuda/fused/program.cuh\"\n\nnamespace cnn_engine::cuda::fused {\n\nusing Net = "
      "Network<";
  for (const int number : {network_shape.c, network_shape.h, network_shape.w})
    text += std::to_string(number) + ", ";
  text += std::to_string(network_shape.classes);
  for (const LayerShape& l : network_shape.layers) {
    const bool none = l.activation == LayerKind::conv2d;
    text += ", Conv<";
    for (const int number : {l.filters, l.kernel, l.pad}) text += std::to_string(number) + ", ";
    text += std::string("Activation::") + (none ? "none" : name_of(l.activation)) + ", " +
            (l.pool ? "true" : "false") + ", " + std::to_string(l.stride) + ">";
  }
  return text + ">;\nCNN_ENGINE_FUSED_PROGRAM(Net, " + format + ", " + std::to_string(parts) +
         ")\n\n}  // namespace cnn_engine::cuda::fused\n";
}

}  // namespace cnn_engine::cuda::fused
