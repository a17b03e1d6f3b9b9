// softmax in OpenACC: a lane a row, or a gang whose lanes share a row (contract: ops/softmax.h).
#include "ops/softmax.h"

#include <math.h>

#include "openacc/data.h"
#include "openacc/operators.h"
#include "openacc/site.h"

namespace cnn_engine::openacc {

void softmax(const float* input, float* output, const SoftmaxShape& p, bool reduction, int device) {
  if (p.n == 0) return;
  select(device);
  const int rows = p.n, classes = p.classes;
  const std::int64_t size = p.size();

  // A NaN is never larger, so it does not become the maximum; expf then carries it into the sum.
  if (reduction) {
    CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang present(input[0 : size], output[0 : size])
    for (int n = 0; n < rows; ++n) {
      const std::int64_t first = std::int64_t{n} * classes;
      float largest = -INFINITY;
#pragma acc loop vector reduction(max : largest)
      for (int m = 0; m < classes; ++m) {
        largest = input[first + m] > largest ? input[first + m] : largest;
      }
      float sum = 0.0f;
#pragma acc loop vector reduction(+ : sum)
      for (int m = 0; m < classes; ++m) {
        const float value = expf(input[first + m] - largest);
        output[first + m] = value;
        sum += value;
      }
#pragma acc loop vector
      for (int m = 0; m < classes; ++m) output[first + m] /= sum;
    }
  } else {
    CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang vector present(input[0 : size], output[0 : size])
    for (int n = 0; n < rows; ++n) {
      const std::int64_t first = std::int64_t{n} * classes;
      float largest = -INFINITY;
#pragma acc loop seq
      for (int m = 0; m < classes; ++m) {
        largest = input[first + m] > largest ? input[first + m] : largest;
      }
      float sum = 0.0f;
#pragma acc loop seq
      for (int m = 0; m < classes; ++m) {
        output[first + m] = expf(input[first + m] - largest);
        sum += output[first + m];
      }
#pragma acc loop seq
      for (int m = 0; m < classes; ++m) output[first + m] /= sum;
    }
  }
}

}  // namespace cnn_engine::openacc
