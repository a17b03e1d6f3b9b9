// The fused kernels of the course network's convolutions; its fully connected layers follow as a
// second step.
#include "cuda/fused/instantiate.cuh"

namespace cnn_engine::cuda::fused {

using Ece408 = Network<1, 48, 48, 0, Conv<6, 5, 0, Activation::tanh, true>,
                       Conv<16, 5, 0, Activation::none, false>>;

const Instantiation kEce408 = Instantiate<Ece408, Route<4, 4, 2>, Route<4, 2, 2>, Route<16, 1, 1>,
                                          Route<8, 1, 1, 4>>::instantiation("ece408");

}  // namespace cnn_engine::cuda::fused
