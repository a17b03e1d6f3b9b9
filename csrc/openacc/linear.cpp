// linear in OpenACC: a lane an output, or a gang whose lanes share its sum (contract:
// ops/linear.h).
#include "ops/linear.h"

#include "openacc/data.h"
#include "openacc/operators.h"
#include "openacc/site.h"

namespace cnn_engine::openacc {

void linear(const float* input, const float* weight, const float* bias, float* output,
            const LinearShape& p, bool reduction, int device) {
  if (p.n == 0) return;
  select(device);
  const int images = p.n, features = p.in_features, outputs = p.out_features;
  const std::int64_t in = p.input_size(), taps = p.weight_size(), out = p.output_size();
  const bool biased = bias != nullptr;
  const float* add = biased ? bias : weight;  // something that is present
  const int adds = biased ? outputs : 1;

  if (reduction) {
    CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang collapse(2) \
    present(input[0 : in], weight[0 : taps], add[0 : adds], output[0 : out])
    for (int n = 0; n < images; ++n) {
      for (int m = 0; m < outputs; ++m) {
        float sum = 0.0f;
#pragma acc loop vector reduction(+ : sum)
        for (int f = 0; f < features; ++f) {
          sum += input[std::int64_t{n} * features + f] * weight[std::int64_t{m} * features + f];
        }
        output[std::int64_t{n} * outputs + m] = biased ? sum + add[m] : sum;
      }
    }
  } else {
    CNN_ENGINE_ACC_SITE;
#pragma acc parallel loop gang vector collapse(2) \
    present(input[0 : in], weight[0 : taps], add[0 : adds], output[0 : out])
    for (int n = 0; n < images; ++n) {
      for (int m = 0; m < outputs; ++m) {
        float sum = 0.0f;
#pragma acc loop seq
        for (int f = 0; f < features; ++f) {
          sum += input[std::int64_t{n} * features + f] * weight[std::int64_t{m} * features + f];
        }
        output[std::int64_t{n} * outputs + m] = biased ? sum + add[m] : sum;
      }
    }
  }
}

}  // namespace cnn_engine::openacc
