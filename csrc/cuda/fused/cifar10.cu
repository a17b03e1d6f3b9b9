// The fused kernels of the CIFAR-10 network: three convolutions, one fully connected layer,
// softmax.
#include "cuda/fused/instantiate.cuh"

namespace cnn_engine::cuda::fused {

using Cifar10 =
    Network<3, 32, 32, 10, Conv<16, 5, 2, Activation::relu, true>,
            Conv<20, 5, 2, Activation::relu, true>, Conv<20, 5, 2, Activation::relu, true>>;

const Instantiation kCifar10 = Instantiate<Cifar10, Route<4, 5, 1>, Route<4, 2, 2>, Route<16, 1, 1>,
                                           Route<8, 1, 1, 4>>::instantiation("cifar10");

}  // namespace cnn_engine::cuda::fused
