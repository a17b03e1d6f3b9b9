// A network description turned into the steps that the fused kernels run, with packed weights.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/fused/steps.h"
#include "ops/network.h"

namespace cnn_engine::cpu::fused {

enum class StepKind {
  to_planar,
  to_channels_last,
  winograd,
  direct,
  max_pool,
  activate,
  linear,
  flatten,
  softmax
};

// One step; which members count depends on the kind. Offsets are floats into a workspace. Steps
// before `Plan::tail` work on one image; those after it on a group of images, `Plan::tail_stride`
// apart.
struct Step {
  StepKind kind{};
  ConvStep conv{};
  PoolStep pool{};
  LinearStep linear{};
  Layout layout{};  // to_channels_last: of the output; flatten: of the input
  Activation activation{};
  std::size_t count = 0;  // activate, softmax: values
  std::size_t in = 0, out = 0;
  bool in_tail = false, out_in_tail = false;  // the offset is into an image's part of the tail
  int units = 1;                              // parts that threads may share
  int part = 0;                               // of the network, see Plan::parts
};

// Memory aligned to cache lines, zero at first.
class Buffer {
 public:
  explicit Buffer(std::size_t floats);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* data() const { return data_; }

 private:
  float* data_;
};

struct Plan {
  static constexpr int kGroup =
      8;  // images whose tails run together and share the reading of weights

  std::vector<Step> steps;
  std::vector<std::unique_ptr<Buffer>> weights;
  std::vector<std::vector<int>> parts;           // indices of layers whose steps are timed together
  std::size_t tail = 0;                          // index of the first step that takes a group
  std::size_t tail_offset = 0, tail_stride = 0;  // of the tail's buffers
  std::size_t scratch_offset = 0;
  std::size_t workspace = 0;  // floats
  std::size_t output = 0;     // offset of the result within an image's part of the tail
  std::size_t image_size = 0;
  int outputs = 0;
  double multiply_adds = 0;  // an image, as the description says
};

// Why the description is no network that the fused kernels run, or "".
std::string why_not(const NetworkDescription& description);

// Expects a description for which why_not is "".
std::unique_ptr<Plan> make_plan(const NetworkDescription& description, bool bfloat16,
                                const FusedKernels& kernels);

}  // namespace cnn_engine::cpu::fused
