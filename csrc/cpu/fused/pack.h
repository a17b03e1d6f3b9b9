// Weights in the order in which the fused kernels read them: for each block of output channels
// (block.h) what is summed over, then the block's channels, zero where there are none.
#pragma once

#include "cpu/fused/plan.h"

namespace cnn_engine::cpu::fused {

// U = G g G^T, in double precision until the end: [block][frequency][c][block channels], or for a
// planar image [vector][c][frequency][lanes]. Of tiles of rows, the frequencies are rows of kernel
// offsets by those of columns.
std::unique_ptr<Buffer> pack_winograd(const ConvStep& step, const float* weight /* [K, C, R, S] */);

// [block][r][s][c][block channels]
std::unique_ptr<Buffer> pack_direct(const ConvStep& step, const float* weight /* [K, C, R, S] */);

// [block][position][block channels]; positions are those of the input's layout.
std::unique_ptr<Buffer> pack_linear(const LinearStep& step, const Layout& in,
                                    const float* weight /* [M, F] */);

// The same two in bfloat16, with pairs of what is summed over side by side:
// [block][r][s][c / 2][block channels][2] and [block][position / 2][block channels][2].
std::unique_ptr<Buffer> pack_direct_bfloat16(const ConvStep& step, const float* weight);
std::unique_ptr<Buffer> pack_linear_bfloat16(const LinearStep& step, const Layout& in,
                                             const float* weight);

std::unique_ptr<Buffer> pack_bias(const float* bias /* [count] or null */, int count, int pitch);

}  // namespace cnn_engine::cpu::fused
