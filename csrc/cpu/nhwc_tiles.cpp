// Compiled once for each instruction set: the tiles that conv2d_nhwc and expand_depthwise share.
#include "cpu/nhwc_tiles.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

extern constexpr TilesOf<Float32> nhwc_tiles = make_tiles<Float32>();

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
