// The functions of unary.h and binary.h over a block of numbers that lie side by side in memory:
// what kernels of one function and kernels of several are made of.
#pragma once

#include "ops/binary.h"
#include "ops/unary.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

// y[i] = function(x[i]) for i < count; y may be x.
struct UnaryBlock {
  void (*run)(const float* x, float* y, std::int64_t count, float alpha, float beta);
  std::int64_t cost;  // of a number, in additions
};

// out[i] = function(x[i * x_step], y[i * y_step]) for i < count; out may be x or y of step 1.
struct BinaryBlock {
  void (*run)(const float* x, std::int64_t x_step, const float* y, std::int64_t y_step, float* out,
              std::int64_t count);
  std::int64_t cost;
};

UnaryBlock unary_block(UnaryFunction function);
BinaryBlock binary_block(BinaryFunction function);

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
