// conv2d in OpenACC: which of the four nests runs.
#include <stdexcept>

#include "openacc/data.h"
#include "openacc/operators.h"

namespace cnn_engine::openacc {

void conv2d(const float* input, const float* weight, const float* bias, float* output,
            const Conv2dShape& shape, Conv2dVariant variant, bool reduction, int device) {
  if (variant == Conv2dVariant::tiled) {
    throw std::invalid_argument("variant: expected direct or pad in OpenACC, found tiled");
  }
  if (shape.n == 0) return;
  select(device);
  const bool padded = variant == Conv2dVariant::pad;
  if (reduction) {
    (padded ? conv2d_pad_reduction : conv2d_if_reduction)(input, weight, bias, output, shape);
  } else {
    (padded ? conv2d_pad : conv2d_if)(input, weight, bias, output, shape);
  }
}

}  // namespace cnn_engine::openacc
