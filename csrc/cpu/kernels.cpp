// Compiled once for each instruction set: the table of this build's kernels.
#include "cpu/kernels.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

// Declared here by name only: their types come from the contracts, and a mismatch does not link.
#define CNN_ENGINE_DECLARE(name) extern decltype(cpu::name) name
CNN_ENGINE_DECLARE(conv2d);
CNN_ENGINE_DECLARE(pad2d);
CNN_ENGINE_DECLARE(relu);
CNN_ENGINE_DECLARE(tanh);
CNN_ENGINE_DECLARE(normalize);
CNN_ENGINE_DECLARE(max_pool2d);
CNN_ENGINE_DECLARE(linear);
CNN_ENGINE_DECLARE(softmax);
#undef CNN_ENGINE_DECLARE

extern const Kernels kernels = {conv2d, pad2d, relu, tanh, normalize, max_pool2d, linear, softmax};

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
