// What the kernels of conv2d_nhwc_depthwise share: their arguments, and where a thread's outputs
// are.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/channels.cuh"
#include "cuda/sm80/rounded.cuh"
#include "ops/conv2d_nhwc_depthwise.h"

namespace cnn_engine::cuda {

constexpr int kDepthwiseThreads = 64;

template <typename T>
struct Depthwise {
  const T* input;
  const T* packed;
  const float* bias;
  const T* residual;
  T* output;
  Conv2dPitches pitches;
  Overflow overflow;
  Activation activation;
  Divisor by_groups, by_runs, by_rows;  // groups of channels; runs of columns; rows, or strips
  int out_h, out_w;                     // which a GPU would divide for
  int once;                             // 1
  float* means;                         // of boxes: [N, boxes of an image, C] or null
  float scale;                          // 1 / positions
};

// Channels are fastest, then columns, rows and images.
struct DepthwisePosition {
  int group, run, row;
  unsigned image;

  template <typename T>
  __device__ DepthwisePosition(const Depthwise<T>& d, std::int64_t thread) {
    const unsigned index = static_cast<unsigned>(thread);
    const unsigned position = d.by_groups.quotient(index), line = d.by_runs.quotient(position);
    image = d.by_rows.quotient(line);
    group = static_cast<int>(index - position * d.by_groups.value);
    run = static_cast<int>(position - line * d.by_runs.value);
    row = static_cast<int>(line - image * d.by_rows.value);
  }
};

// Whether launch_tiles can make it: 16 bits, runs of eight channels, and nothing added.
template <typename T>
bool takes_tiles(const Depthwise<T>& d, const Conv2dShape& p) {
  return sizeof(T) == 2 && d.residual == nullptr && p.c % 8 == 0 && d.pitches.x % 8 == 0 &&
         d.pitches.y % 8 == 0 && is_aligned(d.input, 16) && is_aligned(d.output, 16);
}

// Square kernels of 5 or 7, undilated, with strides of 1: conv2d_nhwc_depthwise_mma.cu.
template <int Side, typename T>
void launch_tiles(Depthwise<T> d, const Conv2dShape& p, Stream stream);

}  // namespace cnn_engine::cuda
