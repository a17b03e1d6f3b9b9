// What a kernel does to values before and after its accumulators, as structs that operators share:
//
//   y = activation(accumulator + bias + residual), rounded to y's storage type
//
// where the accumulator sums products of z, the prologue's result (x where there is none):
//
//   z = max(x * scale + shift, floor)
//
// Python passes the members of Prologue and Epilogue one after another, in their order: an address
// stays an argument of its own, which a plan may fill in later (cnn_engine/kernels/arguments.py).
// A kernel that reads only some of the members says so in its contract.
#pragma once

#include "ops/images.h"
#include "ops/types.h"
#include "ops/unary.h"

namespace cnn_engine {

// A function of unary.h with its two numbers. clip between -inf and inf changes nothing.
struct Activation {
  UnaryFunction function;
  float alpha, beta;

  void validate() const {}
};

struct Prologue {
  static constexpr bool kPassedByMember = true;

  const float* scale;    // [C], or [N, C] where scale_per_image; null: 1
  const float* shift;    // [C]; null, as scale: 0
  bool scale_per_image;  // whether each image has scales of its own
  float floor;           // -inf: none
};

struct Epilogue {
  static constexpr bool kPassedByMember = true;

  const float* bias;     // [K]; null: 0
  ConstImages residual;  // [N, OH, OW, pitch], not y; null: 0
  Activation activation;
  Overflow overflow;  // who learns that a finite result became an infinity when it was rounded
};

}  // namespace cnn_engine
