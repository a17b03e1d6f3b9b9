// The same network by the layered operators, one image after the other: for images with NaN or
// infinity.
#pragma once

#include <functional>
#include <vector>

#include "ops/network.h"

namespace cnn_engine::cpu::fused {

class LayeredNetwork {
 public:
  explicit LayeredNetwork(const NetworkDescription& description);  // copies the weights
  // Calls done(i) when the layer of index i is done.
  void run(const float* image /* [C, H, W] */, float* output,
           const std::function<void(int)>& done) const;

 private:
  NetworkDescription description_;
  std::vector<std::vector<float>> weights_;
};

}  // namespace cnn_engine::cpu::fused
