// call: my_@OP@(@INPUTS@, y, shape, threads);
#include <cmath>

#include "cnn_engine/kernel.h"

// NaN stays NaN.
extern "C" void my_@OP@(@PARAMETERS@, float* y, Elements shape, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int i = 0; i < shape.count; ++i) {
@LOADS@
    y[i] = @FORMULA@;
  }
}
