// Launches a product by wgmma in the form that was chosen for it: blocks of one tile, or
// persistent, or whose tiles are rows or patches of images.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/sm90/conv2d_nhwc_wgmma.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_pack.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_persistent.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_rows.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_spatial_tiles.cuh"

namespace cnn_engine::cuda::wgmma {

template <typename T, bool Prologue, bool Both, int Tile = 0>
void launch_tiles(const Sources& from, const Gemm& p, const Choice& choice, Stream stream) {
  if constexpr (Tile < kShapesOf<T>.count) {
    constexpr TileShape kShape = kShapesOf<T>.at[Tile];
    if constexpr (kShape.is_compiled(Prologue, Both)) {
      if (choice.tile == Tile) {
        return launch_tile<T, kShape.groups, kShape.columns, Prologue, Both>(from, p, choice,
                                                                             stream);
      }
    }
    launch_tiles<T, Prologue, Both, Tile + 1>(from, p, choice, stream);
  } else {
    throw std::logic_error("conv2d_nhwc_wgmma: expected a tile that is compiled, found " +
                           std::to_string(choice.tile));
  }
}

template <typename T>
void launch_gemm(const Sources& from, const Gemm& p, const Choice& choice, Stream stream) {
  if constexpr (!std::is_same_v<T, float>) {
    if (choice.form == Form::persistent) return launch_persistent<T>(from, p, choice, stream);
  }
  if constexpr (sizeof(T) == 2) {
    if (choice.form == Form::rows) return launch_rows<T>(from.first, p, choice, stream);
    if (choice.form == Form::patches) return launch_patches<T>(from.first, p, choice, stream);
  }
  if (p.has_prologue()) return launch_tiles<T, true, false>(from, p, choice, stream);
  if (p.both) return launch_tiles<T, false, true>(from, p, choice, stream);
  launch_tiles<T, false, false>(from, p, choice, stream);
}

// Each is compiled in a file of its own.
#define CNN_ENGINE_MULTIPLIED(T)                                                                \
  template void launch_gemm<T>(const Sources&, const Gemm&, const Choice&, Stream);             \
  template void launch_scales<T>(const float*, float*, const Conv2dShape&, bool, Stream);       \
  template void launch_pack<T>(const float*, void*, const float*, const Conv2dShape&, int, int, \
                               int, Stream);

}  // namespace cnn_engine::cuda::wgmma
