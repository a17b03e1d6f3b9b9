// relu, tanh and normalize in OpenACC: a lane an element (contracts: ops/elementwise.h).
#include "ops/elementwise.h"

#include <math.h>

#include "openacc/data.h"
#include "openacc/operators.h"
#include "openacc/site.h"

namespace cnn_engine::openacc {

void relu(const float* input, float* output, const ElementwiseShape& shape, int device) {
  const std::int64_t size = shape.size;
  if (size == 0) return;
  select(device);

  CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang vector present(input[0 : size], output[0 : size])
  for (std::int64_t i = 0; i < size; ++i) {
    output[i] = input[i] < 0.0f ? 0.0f : input[i];  // so that a NaN passes through
  }
}

void tanh(const float* input, float* output, const ElementwiseShape& shape, int device) {
  const std::int64_t size = shape.size;
  if (size == 0) return;
  select(device);

  CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang vector present(input[0 : size], output[0 : size])
  for (std::int64_t i = 0; i < size; ++i) output[i] = tanhf(input[i]);
}

void normalize(const std::uint8_t* input, float* output, const ElementwiseShape& shape, float scale,
               float offset, int device) {
  const std::int64_t size = shape.size;
  if (size == 0) return;
  select(device);

  CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang vector present(input[0 : size], output[0 : size])
  for (std::int64_t i = 0; i < size; ++i) output[i] = input[i] * scale + offset;
}

}  // namespace cnn_engine::openacc
