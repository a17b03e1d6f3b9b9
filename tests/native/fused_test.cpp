// The CPU's fused variant against the layered operators, and its threads against each other,
// without Python: for ThreadSanitizer, and for processors that are only emulated.
// scripts/native_test.sh builds it.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cpu/kernels.h"
#include "ops/fused_cpu.h"

using namespace cnn_engine;
using cnn_engine::cpu::FusedDtype;
using cnn_engine::cpu::FusedNetwork;

namespace {

constexpr int kImages = 7, kClasses = 10;
constexpr float kTolerance = 1e-5f;  // of probabilities, as in tests/helpers/tolerances.py
std::mt19937 generator(7);
std::vector<std::unique_ptr<std::vector<float>>> parameters;

float* random_values(std::int64_t count, float deviation) {
  std::normal_distribution<float> normal(0.0f, deviation);
  parameters.push_back(std::make_unique<std::vector<float>>(count));
  for (float& value : *parameters.back()) value = normal(generator);
  return parameters.back()->data();
}

void add_conv(NetworkDescription& net, int in, int out, int kernel, int stride, int pad) {
  const float deviation = std::sqrt(2.0f / (in * kernel * kernel));
  LayerDescription layer{LayerKind::conv2d, out, kernel, kernel, stride, stride, pad, pad};
  layer.weight = random_values(std::int64_t{out} * in * kernel * kernel, deviation);
  layer.bias = random_values(out, 0.1f);
  net.layers.push_back(layer);
}

void add_end(NetworkDescription& net, int features) {
  LayerDescription layer{LayerKind::linear, kClasses};
  layer.weight = random_values(std::int64_t{kClasses} * features, std::sqrt(1.0f / features));
  layer.bias = random_values(kClasses, 0.1f);
  net.layers.push_back(layer);
  net.layers.push_back({LayerKind::softmax});
}

NetworkDescription cifar10() {
  NetworkDescription net{3, 32, 32, 1 / 255.0f, -0.5f, {}};
  const int channels[] = {3, 16, 20, 20};
  for (int i = 0; i < 3; ++i) {
    add_conv(net, channels[i], channels[i + 1], 5, 1, 2);
    net.layers.push_back({LayerKind::relu});
    net.layers.push_back({LayerKind::max_pool2d, 0, 2, 2, 2, 2});
  }
  add_end(net, 20 * 4 * 4);
  return net;
}

NetworkDescription odd() {  // stride 2, tanh, an odd size, no pool: the direct paths
  NetworkDescription net{3, 17, 13, 1.0f, 0.0f, {}};
  add_conv(net, 3, 5, 3, 2, 1);
  net.layers.push_back({LayerKind::tanh});
  add_conv(net, 5, 7, 4, 1, 0);
  net.layers.push_back({LayerKind::relu});
  add_end(net, 7 * 6 * 4);
  return net;
}

// The layers one by one, through the operators.
std::vector<float> layered(const NetworkDescription& net, const std::vector<float>& images) {
  std::vector<float> x = images;
  int c = net.c, h = net.h, w = net.w;
  for (const LayerDescription& l : net.layers) {
    std::vector<float> y(x.size());
    const ElementwiseShape size{static_cast<std::int64_t>(x.size()), 4};
    switch (l.kind) {
      case LayerKind::conv2d: {
        const Conv2dShape s{kImages,    c,          h,          w,       l.out_channels, l.kernel_h,
                            l.kernel_w, l.stride_h, l.stride_w, l.pad_h, l.pad_w};
        y.resize(s.output_size());
        cpu::selected_kernels().conv2d(x.data(), l.weight, l.bias, y.data(), s,
                                       Conv2dVariant::direct, false, 1);
        c = l.out_channels, h = s.out_h(), w = s.out_w();
        break;
      }
      case LayerKind::max_pool2d: {
        const MaxPool2dShape s{kImages,    c,          h,          w,       l.kernel_h,
                               l.kernel_w, l.stride_h, l.stride_w, l.pad_h, l.pad_w};
        y.resize(s.output_size());
        cpu::selected_kernels().max_pool2d(x.data(), y.data(), s, 1);
        h = s.out_h(), w = s.out_w();
        break;
      }
      case LayerKind::linear:
        y.resize(std::size_t{kImages} * l.out_channels);
        cpu::selected_kernels().linear(x.data(), l.weight, l.bias, y.data(),
                                       {kImages, c * h * w, l.out_channels}, false, 1);
        c = l.out_channels, h = w = 1;
        break;
      case LayerKind::relu:
        cpu::selected_kernels().relu(x.data(), y.data(), size, 1);
        break;
      case LayerKind::tanh:
        cpu::selected_kernels().tanh(x.data(), y.data(), size, 1);
        break;
      case LayerKind::softmax:
        cpu::selected_kernels().softmax(x.data(), y.data(), {kImages, c * h * w}, false, 1);
        break;
    }
    x = y;
  }
  return x;
}

int check(const char* name, const NetworkDescription& net, FusedDtype dtype, bool exact) {
  std::vector<float> images(std::size_t{kImages} * net.c * net.h * net.w);
  std::normal_distribution<float> normal;
  for (float& value : images) value = normal(generator);
  const std::vector<float> wanted = layered(net, images);
  const FusedNetwork fused(net, dtype);
  std::vector<float> one(wanted.size());
  fused.run(images.data(), false, kImages, one.data(), 1);
  float worst = 0.0f;
  for (std::size_t i = 0; i < one.size(); ++i) {
    const float difference = std::fabs(one[i] - wanted[i]);
    if (!(difference <= worst)) worst = difference;  // a NaN stays
  }
  int failures = exact && !(worst <= kTolerance);

  // Any number of threads and images, from several callers at once, gives the same bits.
  const auto call = [&](int seed, int* different) {
    std::vector<float> out(wanted.size());
    for (int i = 0; i < 40; ++i) {
      const int n = 1 + (i * 3 + seed) % kImages;
      fused.run(images.data(), false, n, out.data(), 1 + i % 3);
      *different += std::memcmp(out.data(), one.data(), sizeof(float) * n * kClasses) != 0;
    }
  };
  int different[3] = {};
  std::thread first(call, 1, &different[0]), second(call, 2, &different[1]);
  call(3, &different[2]);
  first.join();
  second.join();
  failures += different[0] + different[1] + different[2];

  const pid_t child = fork();  // threads do not come along; the pool must start anew
  if (child == 0) {
    std::vector<float> out(wanted.size());
    fused.run(images.data(), false, kImages, out.data(), 2);
    _exit(std::memcmp(out.data(), one.data(), sizeof(float) * out.size()) != 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  failures += status != 0;
  std::printf("%-8s %-10s %s: largest difference %.2g, %s\n", name,
              dtype == FusedDtype::float32 ? "float32" : "bfloat16",
              cpu::selected_instruction_set(), worst, failures ? "FAILED" : "ok");
  return failures;
}

}  // namespace

int main() {
  int failures = 0;
  const cpu::InstructionSet* sets = nullptr;
  const int count = cpu::instruction_sets(&sets);
  for (int i = 0; i < count; ++i) {
    cpu::select_instruction_set(sets[i].name);
    for (const auto& [name, net] : {std::pair{"cifar10", cifar10()}, std::pair{"odd", odd()}}) {
      failures += check(name, net, FusedDtype::float32, true);
      if (FusedNetwork::why_not(net, FusedDtype::bfloat16).empty()) {
        failures += check(name, net, FusedDtype::bfloat16, false);
      }
    }
  }
  std::printf("%d failed\n", failures);
  return failures != 0;
}
