// Which positions a convolution that wgmma multiplies asks the copy engine for, step after step.
#pragma once

#include <type_traits>

#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda::wgmma {

// Of a tile from a position on: the kernel offsets of the first source, 128 bytes of channels at a
// time, then, of Both, those of the second. It begins with a source's first.
template <typename T, bool Both>
class KernelOffsets {
 public:
  __device__ KernelOffsets(const Gemm& p, const CUtensorMap& first, const CUtensorMap& second,
                           int first_row, bool in_second = false)
      : p_(p), map_(&first), second_map_(&second), first_row_(first_row), from_(p) {
    const int line = first_row / p.out_w;
    image_ = line / p.out_h;
    line_ = line - image_ * p.out_h;
    column_ = first_row - line * p.out_w;
    if (in_second) use_second();
    look();
  }

  // Goes to a step of all.
  __device__ void seek(int step) {
    if (Both && step >= p_.own_steps()) {
      step -= p_.own_steps();
      use_second();
      look();
    }
    const int kernel_offset = step / from_.chunks;
    chunk_ = step - kernel_offset * from_.chunks;
    r_ = kernel_offset / from_.offsets_per_row;
    s_ = kernel_offset - r_ * from_.offsets_per_row;
  }

  // Never: but who asks that before a wait has all of it divided there, where the compiler would
  // not.
  __device__ bool is_nowhere() const { return (image_ | chunk_ | r_ | s_) < 0; }

  __device__ void copy(std::uint32_t to, std::uint32_t barrier) const {
    constexpr int kChannels = kRowBytes / static_cast<int>(sizeof(T));
    if (from_.tiled) {
      tma_load_tile(to, map_, chunk_ * kChannels, first_row_, barrier);
    } else {
      tma_load_im2col(to, map_, chunk_ * kChannels, w_, h_, image_, s_ * from_.dilation_w,
                      r_ * from_.dilation_h, barrier);
    }
  }

  __device__ void next() {
    if (++chunk_ < from_.chunks) return;
    chunk_ = 0;
    if (++s_ < from_.offsets_per_row) return;
    s_ = 0;
    ++r_;
    if (Both && r_ == from_.offsets_per_column) {
      r_ = 0;
      use_second();
      look();
    }
  }

 private:
  __device__ void use_second() {
    if constexpr (Both) {
      from_ = p_.second;
      map_ = second_map_;
    }
  }
  __device__ void look() {
    h_ = line_ * from_.stride_h - from_.pad_top;
    w_ = column_ * from_.stride_w - from_.pad_left;
  }

  const Gemm& p_;
  const CUtensorMap *map_, *second_map_;
  const int first_row_;
  std::conditional_t<Both, Source, const Source&> from_;
  int image_, line_, column_;  // of the tile's first place
  int h_, w_;                  // of its window
  int chunk_ = 0, r_ = 0, s_ = 0;
};

}  // namespace cnn_engine::cuda::wgmma
