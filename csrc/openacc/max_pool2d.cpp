// max_pool2d in OpenACC: a lane an output element (contract: ops/max_pool2d.h).
#include "ops/max_pool2d.h"

#include <math.h>

#include "openacc/data.h"
#include "openacc/operators.h"
#include "openacc/site.h"

namespace cnn_engine::openacc {

void max_pool2d(const float* input, float* output, const MaxPool2dShape& p, int device) {
  if (p.n == 0) return;
  select(device);
  const int images = p.n, channels = p.c, out_h = p.out_h(), out_w = p.out_w();
  const int h = p.h, w = p.w, r = p.r, s = p.s;
  const int stride_h = p.stride_h, stride_w = p.stride_w, top = p.pad_top, left = p.pad_left;
  const int dilation_h = p.dilation_h, dilation_w = p.dilation_w;
  const std::int64_t in = p.input_size(), out = p.output_size();

  CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang vector collapse(4) present(input[0 : in], output[0 : out])
  for (int n = 0; n < images; ++n) {
    for (int c = 0; c < channels; ++c) {
      for (int i = 0; i < out_h; ++i) {
        for (int j = 0; j < out_w; ++j) {
          const std::int64_t map = std::int64_t{n} * channels + c;
          float best = -INFINITY;
#pragma acc loop seq
          for (int u = 0; u < r; ++u) {
#pragma acc loop seq
            for (int v = 0; v < s; ++v) {
              const int y = i * stride_h + u * dilation_h - top;
              const int x = j * stride_w + v * dilation_w - left;
              if (y >= 0 && y < h && x >= 0 && x < w) {
                const float value = input[(map * h + y) * w + x];
                if (value > best || value != value) best = value;  // a NaN wins and stays
              }
            }
          }
          output[(map * out_h + i) * out_w + j] = best;
        }
      }
    }
  }
}

}  // namespace cnn_engine::openacc
