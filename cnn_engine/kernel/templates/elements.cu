// launch: my_@OP@<<<ceil_div(count, 256), 256>>>(@INPUTS@, y, shape);
#include "cnn_engine/kernel.h"

// A thread makes one element. NaN stays NaN.
extern "C" __global__ void my_@OP@(@PARAMETERS@, float* y, Elements shape) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= shape.count) return;
@LOADS@
  y[i] = @FORMULA@;
}
