// The CPU's kernels over images whose channels lie side by side against plain loops in double, and
// their threads against each other, without Python: for ThreadSanitizer, and for processors that
// are only emulated. scripts/native_test.sh builds it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/kernels.h"

using namespace cnn_engine;

namespace {

// Of sums, as in tests/helpers/tolerances.py: times sqrt(terms), of the sum of the products' sizes.
constexpr double kSlack = 8 * 1.1920929e-7;
// What Winograd's transforms of tiles of 2x2 and 4x4 may multiply a sum's error by.
constexpr double kTiles2 = 4, kTiles4 = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
std::mt19937 generator(7);

std::vector<float> random_values(std::int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

struct Sums {
  std::vector<double> value, magnitude;
};

// relu(conv2d(x) + bias) of x [N,H,W,C] or, planar, [N,C,H,W]; y [N,OH,OW,K].
Sums reference(const std::vector<float>& x, const std::vector<float>& weight,
               const std::vector<float>& bias, const Conv2dShape& p, bool planar) {
  Sums sums;
  const int channels = p.group_channels();
  for (int n = 0; n < p.n; ++n) {
    for (int i = 0; i < p.out_h(); ++i) {
      for (int j = 0; j < p.out_w(); ++j) {
        for (int k = 0; k < p.k; ++k) {
          double sum = bias[k], size = std::fabs(bias[k]);
          for (int t = 0; t < p.filter_size(); ++t) {
            const int c = k / p.group_filters() * channels + t / (p.r * p.s);
            const int row = i * p.stride_h + t / p.s % p.r * p.dilation_h - p.pad_top;
            const int column = j * p.stride_w + t % p.s * p.dilation_w - p.pad_left;
            if (row < 0 || row >= p.h || column < 0 || column >= p.w) continue;
            const std::int64_t at = planar
                                        ? ((std::int64_t{n} * p.c + c) * p.h + row) * p.w + column
                                        : ((std::int64_t{n} * p.h + row) * p.w + column) * p.c + c;
            const double product = double{x[at]} * weight[std::int64_t{k} * p.filter_size() + t];
            sum += product;
            size += std::fabs(product);
          }
          sums.value.push_back(sum < 0 ? 0 : sum);
          sums.magnitude.push_back(size);
        }
      }
    }
  }
  return sums;
}

int check(Conv2dMethod method, const Conv2dShape& p) {
  const cpu::Kernels& kernels = cpu::selected_kernels();
  const bool planar = method == Conv2dMethod::planar;
  const std::vector<float> x = random_values(p.input_size()), bias = random_values(p.k);
  const std::vector<float> weight = random_values(p.weight_size());
  std::vector<float> packed(kernels.conv2d_nhwc_packed(p, method));
  kernels.conv2d_nhwc_pack(weight.data(), packed.data(), p, method, 2);
  const auto run = [&](int threads, int images) {
    Conv2dShape some = p;
    some.n = images;
    std::vector<float> y(some.output_size());
    std::vector<char> workspace(kernels.conv2d_nhwc_workspace(some, method, threads));
    kernels.conv2d_nhwc(x.data(), packed.data(), bias.data(), nullptr, nullptr, nullptr, y.data(),
                        workspace.data(), some, Conv2dPitches{p.c, p.k}, method, false, -kInfinity,
                        UnaryFunction::relu, 0.0f, 0.0f, threads);
    return y;
  };
  const std::vector<float> one = run(1, p.n);
  const Sums wanted = reference(x, weight, bias, p, planar);
  double slack = kSlack * std::sqrt(p.filter_size() + 1.0);
  const bool has_phases = planar && p.stride_h == 2;  // in tiles, too
  slack *= method == Conv2dMethod::winograd4 || has_phases ? kTiles4
           : method == Conv2dMethod::winograd2             ? kTiles2
                                                           : 1;
  bool right = one.size() == wanted.value.size();
  for (std::size_t i = 0; right && i < one.size(); ++i) {
    right = std::fabs(one[i] - wanted.value[i]) <= slack * wanted.magnitude[i];
  }
  const auto same = [&](const std::vector<float>& y) {
    return std::memcmp(y.data(), one.data(), sizeof(float) * y.size()) == 0;
  };
  for (const int threads : {2, 8}) right = right && same(run(threads, p.n));
  right = right && same(run(1, 1));
  std::printf("%-10s %dx%dx%dx%d, %d filters of %dx%d, stride %d, %s: %s\n", name_of(method), p.n,
              p.c, p.h, p.w, p.k, p.r, p.s, p.stride_h, cpu::selected_instruction_set(),
              right ? "ok" : "FAILED");
  return !right;
}

// expand_depthwise, to the bits of its two convolutions, and its means.
int check_expansion(const Conv2dShape& p, int channels) {
  const cpu::Kernels& kernels = cpu::selected_kernels();
  const Conv2dShape expand{p.n, channels, p.h, p.w, p.k, 1, 1, 1, 1, 0, 0};
  const std::vector<float> x = random_values(expand.input_size()), bias = random_values(p.k);
  const auto run = [&](const std::vector<float>& input, const std::vector<float>& packed,
                       const Conv2dShape& shape, Conv2dMethod method) {
    std::vector<float> y(shape.output_size());
    std::vector<char> workspace(kernels.conv2d_nhwc_workspace(shape, method, 1));
    kernels.conv2d_nhwc(input.data(), packed.data(), bias.data(), nullptr, nullptr, nullptr,
                        y.data(), workspace.data(), shape, Conv2dPitches{shape.c, shape.k}, method,
                        false, -kInfinity, UnaryFunction::swish, 1.0f, 0.0f, 1);
    return y;
  };
  const auto pack = [&](const Conv2dShape& shape, Conv2dMethod method) {
    std::vector<float> packed(kernels.conv2d_nhwc_packed(shape, method));
    kernels.conv2d_nhwc_pack(random_values(shape.weight_size()).data(), packed.data(), shape,
                             method, 1);
    return packed;
  };
  const std::vector<float> first = pack(expand, Conv2dMethod::direct);
  const std::vector<float> second = pack(p, Conv2dMethod::depthwise);
  const std::vector<float> wanted =
      run(run(x, first, expand, Conv2dMethod::direct), second, p, Conv2dMethod::depthwise);
  const std::size_t positions = std::size_t(p.out_h()) * p.out_w();
  bool right = true;
  for (const int threads : {1, 2, 8}) {
    std::vector<float> y(wanted.size()), mean(std::size_t(p.n) * p.k);
    std::vector<char> workspace(kernels.expand_depthwise_workspace(p, threads));
    kernels.expand_depthwise(x.data(), first.data(), second.data(), bias.data(), bias.data(),
                             y.data(), mean.data(), workspace.data(), p, channels,
                             Conv2dPitches{channels, p.k}, p.k, UnaryFunction::swish, 1.0f, 0.0f,
                             UnaryFunction::swish, 1.0f, 0.0f, threads);
    right = right && std::memcmp(y.data(), wanted.data(), sizeof(float) * y.size()) == 0;
    for (std::size_t i = 0; i < mean.size(); ++i) {
      double sum = 0, size = 0;
      for (std::size_t position = 0; position < positions; ++position) {
        const double value = wanted[(i / p.k * positions + position) * p.k + i % p.k];
        sum += value;
        size += std::fabs(value);
      }
      right = right && std::fabs(mean[i] - sum / positions) <= kSlack * size / positions;
    }
  }
  std::printf("expand_depthwise %dx%dx%dx%d, %d channels of %dx%d, stride %d, %s: %s\n", p.n,
              channels, p.h, p.w, p.k, p.r, p.s, p.stride_h, cpu::selected_instruction_set(),
              right ? "ok" : "FAILED");
  return !right;
}

// Both pools, to the bits of those over [N,C,H,W].
int check_pools(int channels) {
  const cpu::Kernels& kernels = cpu::selected_kernels();
  const int h = 61, w = 42;  // enough for several threads
  const MaxPool2dShape most{2, channels, h, w, 3, 3, 2, 2, 1, 1};
  const AveragePool2dShape mean{2, channels, h, w, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1, 0, 1};
  const std::vector<float> x = random_values(most.input_size());
  std::vector<float> planes(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t c = i % channels, position = i / channels % (h * w),
                      n = i / channels / (h * w);
    planes[(n * channels + c) * h * w + position] = x[i];
  }
  int failures = 0;
  const auto compare = [&](const char* name, const auto& shape, const auto& plain,
                           const auto& run) {
    std::vector<float> wanted(shape.output_size()), found(wanted.size());
    plain(wanted.data());
    bool right = true;
    for (const int threads : {1, 8}) {
      run(found.data(), threads);
      const std::size_t area = std::size_t(shape.out_h()) * shape.out_w();
      for (std::size_t i = 0; i < found.size(); ++i) {
        const std::size_t c = i % channels, position = i / channels % area, n = i / channels / area;
        right = right && found[i] == wanted[(n * channels + c) * area + position];
      }
    }
    std::printf("%s, %d channels, %s: %s\n", name, channels, cpu::selected_instruction_set(),
                right ? "ok" : "FAILED");
    failures += !right;
  };
  compare(
      "max_pool2d_nhwc", most, [&](float* y) { kernels.max_pool2d(planes.data(), y, most, 1); },
      [&](float* y, int threads) {
        kernels.max_pool2d_nhwc(x.data(), y, most, channels, channels, threads);
      });
  compare(
      "average_pool2d_nhwc", mean,
      [&](float* y) { kernels.average_pool2d(planes.data(), y, mean, false, 1); },
      [&](float* y, int threads) {
        kernels.average_pool2d_nhwc(x.data(), y, mean, channels, channels, false, threads);
      });
  return failures;
}

}  // namespace

int main() {
  int failures = 0;
  const cpu::InstructionSet* sets = nullptr;
  const int count = cpu::instruction_sets(&sets);
  for (int i = 0; i < count; ++i) {
    cpu::select_instruction_set(sets[i].name);
    for (const int channels : {24, 70}) failures += check_pools(channels);
    using Method = Conv2dMethod;
    const Conv2dShape pointwise{1, 70, 13, 12, 40, 1, 1, 1, 1, 0, 0};
    const Conv2dShape square{2, 20, 16, 15, 24, 3, 3, 1, 1, 1, 1};
    const Conv2dShape first{1, 3, 33, 30, 20, 7, 7, 2, 2, 3, 3};
    for (const Conv2dShape& shape : {pointwise, square, first}) {
      failures += check(Method::direct, shape);
    }
    failures += check(Method::planar, first);
    failures += check(Method::winograd2, square);
    failures += check(Method::winograd4, square);
    failures += check(Method::winograd4, {3, 70, 7, 6, 90, 3, 3, 1, 1, 1, 1});  // of few tiles
    for (const int stride : {1, 2}) {
      for (const int kernel : {3, 5, 7}) {
        const int pad = kernel / 2;
        failures += check(Method::depthwise, {2, 44, 30, 23, 44, kernel, kernel, stride, stride,
                                              pad, pad, pad, pad, 1, 1, 44});
        failures += check_expansion(
            {2, 200, 30, 23, 200, kernel, kernel, stride, stride, pad, pad, pad, pad, 1, 1, 200},
            24);
      }
    }
  }
  std::printf("%d failed\n", failures);
  return failures != 0;
}
