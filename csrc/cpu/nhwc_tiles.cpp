// Compiled once for each instruction set: the tiles that conv2d_nhwc and expand_depthwise share.
#include "cpu/nhwc_tiles.h"
