// conv2d, variant `pad`: the input has been padded (pad2d.cpp), so that no bounds are tested
// (contract: ops/conv2d.h). Apart from that the nests are those of conv2d_if.cpp, written out
// again: nests side by side, each with what its compiler says, are what they are here for.
#include "openacc/operators.h"
#include "openacc/shape_clauses.h"
#include "openacc/site.h"

namespace cnn_engine::openacc {

// Gangs take images and filters, workers rows, vector lanes columns: a lane makes one output and
// sums its C * R * S products in order.
void conv2d_pad(const float* input, const float* weight, const float* bias, float* output,
                const Conv2dShape& p) {
  const int images = p.n, filters = p.k, out_h = p.out_h(), out_w = p.out_w();
  const int channels = p.group_channels(), group_filters = p.group_filters();
  const int h = p.h, w = p.w, r = p.r, s = p.s, all_channels = p.c;
  const int stride_h = p.stride_h, stride_w = p.stride_w;
  const int dilation_h = p.dilation_h, dilation_w = p.dilation_w;
  const std::int64_t in = p.input_size(), taps = p.weight_size(), out = p.output_size();
  const bool biased = bias != nullptr;
  const float* add = biased ? bias : weight;  // something that is present
  const int adds = biased ? filters : 1;

  CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang collapse(2) CNN_ENGINE_ACC_SHAPE present( \
    input[0 : in], weight[0 : taps], add[0 : adds], output[0 : out])
  for (int n = 0; n < images; ++n) {
    for (int k = 0; k < filters; ++k) {
      const float* image =
          input + (std::int64_t{n} * all_channels + k / group_filters * channels) * h * w;
      const float* filter = weight + std::int64_t{k} * channels * r * s;
      float* map = output + (std::int64_t{n} * filters + k) * out_h * out_w;
#pragma acc loop worker
      for (int i = 0; i < out_h; ++i) {
#pragma acc loop vector
        for (int j = 0; j < out_w; ++j) {
          float sum = 0.0f;
#pragma acc loop seq
          for (int c = 0; c < channels; ++c) {
#pragma acc loop seq
            for (int u = 0; u < r; ++u) {
#pragma acc loop seq
              for (int v = 0; v < s; ++v) {
                const int y = i * stride_h + u * dilation_h;
                const int x = j * stride_w + v * dilation_w;
                sum += image[(c * h + y) * w + x] * filter[(c * r + u) * s + v];
              }
            }
          }
          map[i * out_w + j] = biased ? sum + add[k] : sum;
        }
      }
    }
  }
}

// Gangs take images and filters, workers outputs, and the vector lanes of a worker share one
// output's sum: the reduction clause adds their parts.
void conv2d_pad_reduction(const float* input, const float* weight, const float* bias, float* output,
                          const Conv2dShape& p) {
  const int images = p.n, filters = p.k, out_h = p.out_h(), out_w = p.out_w();
  const int channels = p.group_channels(), group_filters = p.group_filters();
  const int h = p.h, w = p.w, r = p.r, s = p.s, all_channels = p.c;
  const int stride_h = p.stride_h, stride_w = p.stride_w;
  const int dilation_h = p.dilation_h, dilation_w = p.dilation_w;
  const std::int64_t in = p.input_size(), taps = p.weight_size(), out = p.output_size();
  const bool biased = bias != nullptr;
  const float* add = biased ? bias : weight;  // something that is present
  const int adds = biased ? filters : 1;

  CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang collapse(2) CNN_ENGINE_ACC_SHAPE present( \
    input[0 : in], weight[0 : taps], add[0 : adds], output[0 : out])
  for (int n = 0; n < images; ++n) {
    for (int k = 0; k < filters; ++k) {
      const float* image =
          input + (std::int64_t{n} * all_channels + k / group_filters * channels) * h * w;
      const float* filter = weight + std::int64_t{k} * channels * r * s;
      float* map = output + (std::int64_t{n} * filters + k) * out_h * out_w;
#pragma acc loop worker collapse(2)
      for (int i = 0; i < out_h; ++i) {
        for (int j = 0; j < out_w; ++j) {
          float sum = 0.0f;
#pragma acc loop vector collapse(3) reduction(+ : sum)
          for (int c = 0; c < channels; ++c) {
            for (int u = 0; u < r; ++u) {
              for (int v = 0; v < s; ++v) {
                const int y = i * stride_h + u * dilation_h;
                const int x = j * stride_w + v * dilation_w;
                sum += image[(c * h + y) * w + x] * filter[(c * r + u) * s + v];
              }
            }
          }
          map[i * out_w + j] = biased ? sum + add[k] : sum;
        }
      }
    }
  }
}

}  // namespace cnn_engine::openacc
