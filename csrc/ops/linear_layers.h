// linear_layers on CUDA: two to four linear layers (linear.h) of a few rows, one after another,
// each with a function at its end, and after the last maybe softmax (softmax.h); or one and
// softmax:
//
//   x[i+1][n,m] = activation[i](b[i][m] + sum over f of x[i][n,f] * w[i][m,f]), from x[0] = x
//
// Layouts: x [N,F], w[i] [M,F], b[i] [M] or null, y [N,M] of the last layer; float32, C-contiguous.
// Nothing is rounded in between. Sums are float32, of each row in an order that depends on the
// layers alone. The activations are functions of unary.h with their alphas and betas. Compute
// capability 9.0 on, few weights: linear_layers_takes says so.
#pragma once

#include "ops/linear.h"
#include "ops/unary.h"
#include "runtime/target.h"

namespace cnn_engine {

struct RowLayer {
  int in_features;   // F
  int out_features;  // M
  UnaryFunction activation;
  float alpha, beta;

  void validate() const { LinearShape{0, in_features, out_features}.validate(); }
};

struct RowLayers {
  static constexpr int kOptionalMembers = 3;
  static constexpr int kMost = 4;

  int n;  // rows
  bool softmax;
  RowLayer first, second = {}, third = {}, fourth = {};  // without outputs: there is none

  CNN_ENGINE_INLINE int count() const {
    int found = 1;
    while (found < kMost && layer(found).out_features > 0) ++found;
    return found;
  }
  CNN_ENGINE_INLINE const RowLayer& layer(int i) const {
    return i == 0 ? first : i == 1 ? second : i == 2 ? third : fourth;
  }

  void validate() const {
    require_at_least("batch", n, 0);
    for (int i = 0; i < count(); ++i) {
      layer(i).validate();
      if (i > 0 && layer(i).in_features != layer(i - 1).out_features) {
        throw std::invalid_argument("layer " + std::to_string(i + 1) + ": expected " +
                                    std::to_string(layer(i - 1).out_features) +
                                    " features, found " + std::to_string(layer(i).in_features));
      }
    }
  }
};

namespace cuda {

// 1 where a GPU has the kernel and it is worth it: few rows, few weights.
std::int64_t linear_layers_takes(const RowLayers& layers, const Target& target);
std::int64_t linear_layers_packed(const RowLayers& layers, int);  // bytes
// Packs the weights of one layer, by its number.
void linear_layers_pack(const float* weight,  // [M, F]
                        const float* bias,    // [M] or null
                        void* packed,         // [linear_layers_packed]
                        const RowLayers& layers, int layer, Stream stream);
void linear_layers(const float* input,  // [N, F]
                   const void* packed,  // [linear_layers_packed], 16-byte aligned
                   float* output,       // [N, M]
                   const RowLayers& layers, Stream stream);

}  // namespace cuda
}  // namespace cnn_engine
