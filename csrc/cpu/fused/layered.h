// The same network by the layered operators, one image after the other: for images with NaN or
// infinity.
#pragma once

#include <vector>

#include "ops/network.h"

namespace cnn_engine::cpu::fused {

class LayeredNetwork {
 public:
  explicit LayeredNetwork(const NetworkDescription& description);  // copies the weights
  void run(const float* image /* [C, H, W] */, float* output) const;

 private:
  NetworkDescription description_;
  std::vector<std::vector<float>> weights_;
};

}  // namespace cnn_engine::cpu::fused
