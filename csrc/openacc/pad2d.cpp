// pad2d in OpenACC: a lane an output element, copied or zero (contract: ops/pad2d.h).
#include "ops/pad2d.h"

#include "openacc/data.h"
#include "openacc/operators.h"
#include "openacc/site.h"

namespace cnn_engine::openacc {

void pad2d(const float* input, float* output, const Pad2dShape& p, int device) {
  if (p.n == 0) return;
  select(device);
  const int maps = p.n * p.c, out_h = p.out_h(), out_w = p.out_w();
  const int h = p.h, w = p.w, top = p.pad_top, left = p.pad_left;
  const std::int64_t in = p.input_size(), out = p.output_size();

  CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang vector collapse(3) present(input[0 : in], output[0 : out])
  for (int map = 0; map < maps; ++map) {
    for (int i = 0; i < out_h; ++i) {
      for (int j = 0; j < out_w; ++j) {
        const int y = i - top, x = j - left;
        const bool inside = y >= 0 && y < h && x >= 0 && x < w;
        const std::int64_t from = (std::int64_t{map} * h + y) * w + x;
        output[(std::int64_t{map} * out_h + i) * out_w + j] = inside ? input[from] : 0.0f;
      }
    }
  }
}

}  // namespace cnn_engine::openacc
