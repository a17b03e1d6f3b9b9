// conv_transpose2d on the CPU: a map of outputs at a time; every kernel offset adds a scaled row of
// the input to a row of the output, so that a sum's order is channel, row, column.
#include "ops/conv_transpose2d.h"

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Input positions [begin, end) whose output position `at * stride + offset` lies in [0, size).
struct Range {
  int begin, end;

  CNN_ENGINE_INLINE Range(int count, int stride, std::int64_t offset, int size) {
    std::int64_t first = offset >= 0 ? 0 : (-offset + stride - 1) / stride;
    std::int64_t last = offset >= size ? 0 : (size - offset + stride - 1) / stride;
    if (last > count) last = count;
    begin = first < last ? static_cast<int>(first) : 0;
    end = first < last ? static_cast<int>(last) : 0;
  }
};

}  // namespace

void conv_transpose2d(const float* input, const float* weight, const float* bias, float* output,
                      const ConvTranspose2dShape& shape, int threads) {
  const ConvTranspose2dShape p = shape;
  const int out_h = p.out_h(), out_w = p.out_w();
  const int channels = p.group_channels(), filters = p.group_filters();
  const std::int64_t cost = std::int64_t{channels} * p.r * p.s * p.h * p.w;
  parallel_for(std::int64_t{p.n} * p.k, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      const int k = static_cast<int>(index % p.k), group = k / filters;
      float* map = output + index * out_h * out_w;
      for (std::int64_t i = 0; i < std::int64_t{out_h} * out_w; ++i) map[i] = 0.0f;
      for (int c = group * channels; c < (group + 1) * channels; ++c) {
        const float* image = input + (index / p.k * p.c + c) * p.h * p.w;
        const float* filter = weight + (std::int64_t{c} * filters + k % filters) * p.r * p.s;
        for (int r = 0; r < p.r; ++r) {
          const std::int64_t row = std::int64_t{r} * p.dilation_h - p.pad_top;
          const Range rows(p.h, p.stride_h, row, out_h);
          for (int s = 0; s < p.s; ++s) {
            const std::int64_t column = std::int64_t{s} * p.dilation_w - p.pad_left;
            const Range columns(p.w, p.stride_w, column, out_w);
            const float value = filter[r * p.s + s];
            for (int i = rows.begin; i < rows.end; ++i) {
              const float* x = image + std::int64_t{i} * p.w;
              float* y = map + (std::int64_t{i} * p.stride_h + row) * out_w + column;
              if (p.stride_w == 1) {
                for (int j = columns.begin; j < columns.end; ++j) y[j] += x[j] * value;
              } else {
                for (int j = columns.begin; j < columns.end; ++j) {
                  y[std::int64_t{j} * p.stride_w] += x[j] * value;
                }
              }
            }
          }
        }
      }
      if (!bias) continue;
      for (std::int64_t i = 0; i < std::int64_t{out_h} * out_w; ++i) map[i] += bias[k];
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
