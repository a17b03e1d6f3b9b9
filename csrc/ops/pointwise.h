// pointwise: y = several functions of unary.h and binary.h, one after another, of numbers that
// stand at the same position, in one pass over memory.
//
// Layouts: y C-contiguous, [dims]; inputs through strides of their own (ops/strided.h); float32. y
// may be an input that is C-contiguous in y's shape. Each step's result has the bits that unary and
// binary give.
//
// On the CPU the functions are read as a list. On CUDA they are compiled at first use, by the
// caller; there each tensor may lie in memory in 16 bits, and y may be an input of its type.
#pragma once

#include <memory>
#include <string>

#include "ops/binary.h"
#include "ops/types.h"
#include "ops/unary.h"

namespace cnn_engine {

constexpr int kPointwiseInputs = 4;
constexpr int kPointwiseSteps = 16;

// One function. Its arguments are numbered: 0 to kPointwiseInputs - 1 the inputs, then the results
// of the steps before it.
struct PointwiseStep {
  std::int32_t is_binary;
  std::int32_t function;  // of BinaryFunction or UnaryFunction
  std::int32_t x, y;      // y: of binary functions only
  float alpha, beta;      // of unary functions only
};

struct PointwiseShape {
  std::int64_t dims[kMaxDims];       // of y; 1 in front where there are fewer
  std::int64_t a_strides[kMaxDims];  // elements; of inputs that no step reads: 0
  std::int64_t b_strides[kMaxDims];
  std::int64_t c_strides[kMaxDims];
  std::int64_t d_strides[kMaxDims];
  std::int64_t y_strides[kMaxDims];  // of distinct elements
  std::int64_t steps;                // the last one makes y

  void validate() const {
    require_dims(dims);
    if (steps < 1 || steps > kPointwiseSteps) {
      throw std::invalid_argument("steps: expected 1 to " + std::to_string(kPointwiseSteps) +
                                  ", found " + std::to_string(steps));
    }
  }
};

// How each tensor lies in memory: as the program was compiled for.
struct PointwiseStorage {
  ElementType y, a, b, c, d;

  void validate() const {}
};

namespace cpu {
// Throws std::invalid_argument for a step that reads what is not there; see refuse_index.
[[noreturn]] void refuse_step(int index);

void pointwise(const float* a, const float* b, const float* c, const float* d, float* y,
               const PointwiseShape& shape,
               const PointwiseStep* steps,  // [shape.steps]
               int threads);
}  // namespace cpu
namespace cuda {

// y may lie where a lies, if both have the same shape and type.
struct PointwiseTensors {
  static constexpr bool kPassedByMember = true;

  const void *a, *b, *c, *d;
  void* y;
};

// A program of cuda/common/pointwise.cuh on the current device.
class PointwiseProgram {
 public:
  // Loads machine code or PTX. Throws CudaError if it is none for the device.
  explicit PointwiseProgram(const std::string& code);

  void launch(const PointwiseTensors& tensors, const PointwiseShape& shape,
              const PointwiseStorage& storage, const Overflow& overflow, Stream stream) const;

 private:
  std::shared_ptr<void> library_;
  const void *fours_, *ones_, *many_;  // elements of a thread; many: more than 2^31 elements
  bool waits_;                         // for the kernel before it, by itself
};

void pointwise_compiled(const PointwiseProgram* program, const PointwiseTensors& tensors,
                        const PointwiseShape& shape, const PointwiseStorage& storage,
                        const Overflow& overflow, Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
