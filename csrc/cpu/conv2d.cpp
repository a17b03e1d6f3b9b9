// conv2d on the CPU: the plain loops that define the operator, and the same sums on SIMD lanes.
#include "ops/conv2d.h"

#include <cstddef>
#include <stdexcept>

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// The specification: one output element, summed in the order channel, row, column. Without dilation
// (`dilated` false) its step is a constant, which loops of a few kernel offsets are faster with.
template <Conv2dVariant variant, bool dilated>
inline float sum_in_order(const float* image,   // [C / groups, H, W]
                          const float* filter,  // [C / groups, R, S]
                          const Conv2dShape& p, int channels, int top, int left) {
  const int step_h = dilated ? p.dilation_h : 1, step_w = dilated ? p.dilation_w : 1;
  float sum = 0.0f;
  for (int c = 0; c < channels; ++c) {
    for (int r = 0; r < p.r; ++r) {
      for (int s = 0; s < p.s; ++s) {
        const int y = top + r * step_h;
        const int x = left + s * step_w;
        if (variant == Conv2dVariant::pad || (y >= 0 && y < p.h && x >= 0 && x < p.w)) {
          sum += image[(c * p.h + y) * p.w + x] * filter[(c * p.r + r) * p.s + s];
        }
      }
    }
  }
  return sum;
}

// Where each of a filter's kernel offsets reads, relative to the window's top left corner. With it
// the three loops over the kernel offsets become one, long enough to be worth SIMD lanes. (No
// standard container here: its code would be shared with the builds for other instruction sets.)
struct KernelOffsets {
  int count;  // C / groups * R * S
  int* row;   // [count] each
  int* column;
  int* offset;

  explicit KernelOffsets(const Conv2dShape& p)
      : count(p.filter_size()),
        row(new int[std::size_t{3} * count]),
        column(row + count),
        offset(column + count) {
    int t = 0;
    for (int c = 0; c < p.group_channels(); ++c) {
      for (int r = 0; r < p.r; ++r) {
        for (int s = 0; s < p.s; ++s, ++t) {
          row[t] = r * p.dilation_h;
          column[t] = s * p.dilation_w;
          offset[t] = (c * p.h + row[t]) * p.w + column[t];
        }
      }
    }
  }
  KernelOffsets(const KernelOffsets&) = delete;
  KernelOffsets& operator=(const KernelOffsets&) = delete;
  ~KernelOffsets() { delete[] row; }
};

// One output element as a SIMD reduction: lanes sum every 4th, 8th or 16th kernel offset and are
// added at the end.
template <Conv2dVariant variant>
inline float sum_with_reduction(const float* image,   // [C / groups, H, W]
                                const float* filter,  // [C / groups, R, S]
                                const Conv2dShape& p, const KernelOffsets& kernel_offsets, int top,
                                int left) {
  const int count = kernel_offsets.count;
  const int corner = top * p.w + left;
  const int* offset = kernel_offsets.offset;
  float sum = 0.0f;
  if (variant == Conv2dVariant::pad) {
#pragma omp simd reduction(+ : sum)
    for (int t = 0; t < count; ++t) sum += image[corner + offset[t]] * filter[t];
  } else {
    const int* row = kernel_offsets.row;
    const int* column = kernel_offsets.column;
    const int height = p.h;
    const int width = p.w;
#pragma omp simd reduction(+ : sum)
    for (int t = 0; t < count; ++t) {
      const int y = top + row[t];
      const int x = left + column[t];
      const bool inside = y >= 0 && y < height && x >= 0 && x < width;
      // Outside, a lane reads the image's first pixel and drops it: compilers vectorise a choice of
      // address, not a load that may not happen.
      const float value = image[inside ? corner + offset[t] : 0];
      sum += inside ? value * filter[t] : 0.0f;
    }
  }
  return sum;
}

template <Conv2dVariant variant, typename Sum>
void for_each_output(const float* input, const float* weight, const float* bias, float* output,
                     const Conv2dShape& p, int threads, const Sum& sum) {
  const int out_h = p.out_h();
  const int out_w = p.out_w();
  const std::int64_t group_size = std::int64_t{p.group_channels()} * p.h * p.w;
  const int group_filters = p.group_filters(), kernel_offsets = p.filter_size();
  // One index is one row of one output map: enough of them to share out at any batch size.
  const std::int64_t rows = std::int64_t{p.n} * p.k * out_h;
  parallel_for(rows, std::int64_t{out_w} * kernel_offsets, threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t index = begin; index < end; ++index) {
                   const int i = static_cast<int>(index % out_h);
                   const int k = static_cast<int>(index / out_h % p.k);
                   const std::int64_t group = index / out_h / p.k * p.groups + k / group_filters;
                   const float* image = input + group * group_size;
                   const float* filter = weight + std::int64_t{k} * kernel_offsets;
                   for (int j = 0; j < out_w; ++j) {
                     const float value = sum(image, filter, i * p.stride_h - p.pad_top,
                                             j * p.stride_w - p.pad_left);
                     output[index * out_w + j] = bias ? value + bias[k] : value;
                   }
                 }
               });
}

template <Conv2dVariant variant>
void run(const float* input, const float* weight, const float* bias, float* output,
         const Conv2dShape& p, bool reduction, int threads) {
  if (reduction) {
    const KernelOffsets kernel_offsets(p);
    for_each_output<variant>(input, weight, bias, output, p, threads,
                             [&](const float* image, const float* filter, int top, int left) {
                               return sum_with_reduction<variant>(image, filter, p, kernel_offsets,
                                                                  top, left);
                             });
  } else if (p.dilation_h == 1 && p.dilation_w == 1) {
    const int channels = p.group_channels();
    for_each_output<variant>(input, weight, bias, output, p, threads,
                             [&](const float* image, const float* filter, int top, int left) {
                               return sum_in_order<variant, false>(image, filter, p, channels, top,
                                                                   left);
                             });
  } else {
    const int channels = p.group_channels();
    for_each_output<variant>(input, weight, bias, output, p, threads,
                             [&](const float* image, const float* filter, int top, int left) {
                               return sum_in_order<variant, true>(image, filter, p, channels, top,
                                                                  left);
                             });
  }
}

}  // namespace

void conv2d(const float* input, const float* weight, const float* bias, float* output,
            const Conv2dShape& shape, Conv2dVariant variant, bool reduction, int threads) {
  switch (variant) {
    case Conv2dVariant::direct:
      return run<Conv2dVariant::direct>(input, weight, bias, output, shape, reduction, threads);
    case Conv2dVariant::pad:
      return run<Conv2dVariant::pad>(input, weight, bias, output, shape, reduction, threads);
    case Conv2dVariant::tiled:
      throw std::invalid_argument("variant: expected direct or pad on the CPU, found tiled");
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
