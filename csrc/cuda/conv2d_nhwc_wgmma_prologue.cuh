// What conv2d_nhwc_wgmma does to places in shared memory before their products.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/conv2d_nhwc_wgmma_product.h"
#include "cuda/conv2d_nhwc_wgmma_split.cuh"
#include "cuda/mma.cuh"
#include "cuda/stored.cuh"
#include "cuda/wgmma.cuh"

namespace cnn_engine::cuda::wgmma {

// What is done to a step's places in shared memory before they are multiplied: z = max(x scale +
// shift, floor), and behind them, of float32, what tensor cores do not read of it. A thread has a
// piece of every kRowsAtOnce-th row; what it needs for a step is loaded before the step is there,
// from the first-level cache: the second takes longer than a step.
template <typename T, int Threads, int Columns, bool Prologue>
class Preparation {
 public:
  __device__ Preparation(const Product& p, int first_row, int thread)
      : p_(p), first_row_(first_row), thread_(thread), first_image_(0) {
    if (Prologue && p.scale_per_image) first_image_ = first_row / places();
  }

  // Asks for what `steps` steps need to be in the first-level cache.
  __device__ void ask(int first_step, int steps) const {
    constexpr int kSector = 32 / sizeof(float), kChannels = 8 * kWidth;
    const int first = first_step * kChannels, end = min(p_.channels, first + steps * kChannels);
    const int last = p_.scale_per_image ? min(first_row_ + Columns, p_.rows) - 1 : 0;
    for (int c = first + thread_ * kSector; c < end; c += Threads * kSector) {
      if (p_.shift) touch(p_.shift + c);
      if (!p_.scale) continue;
      for (int image = first_image_; image * places() <= last; ++image) {
        touch(p_.scale + static_cast<std::int64_t>(image) * p_.channels + c);
      }
    }
  }

  __device__ void load(int step) {
    if constexpr (Prologue) {
      c_ = (step * 8 + exchanged(thread_ / 8, thread_ % 8)) * kWidth;
      next_image_ = p_.scale_per_image ? (first_image_ + 1) * places() : p_.rows;
      fill(p_.scale, first_image_, 1.0f, factor_);
      fill(p_.shift, 0, 0.0f, added_);
    }
  }

  __device__ void apply(char* places_of_step) {
#pragma unroll
    for (int row = thread_ / 8; row < Columns; row += kRowsAtOnce) {
      T* const at = reinterpret_cast<T*>(places_of_step + row * kRowBytes + thread_ % 8 * 16);
      float z[kWidth];
      load_neighbours(at, z);
      if constexpr (Prologue) {
        const int place = first_row_ + row;
        if (place >= next_image_ && place < p_.rows) {
          const int image = place / places();
          next_image_ = (image + 1) * places();
          fill(p_.scale, image, 1.0f, factor_);
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          z[i] = fmaf(z[i], factor_[i], added_[i]);
          z[i] = z[i] < p_.floor ? p_.floor : z[i];  // false for NaN, which stays
        }
        store_neighbours(at, z, Overflow{});
      }
      if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) z[i] = beyond_tf32(z[i]);
        store_neighbours(at + Columns * kRowBytes / sizeof(T), z, Overflow{});
      }
    }
    publish_to_engines();
    named_barrier<Threads>(1);
  }

 private:
  static constexpr int kWidth = 16 / sizeof(T), kRowsAtOnce = Threads / 8;
  static_assert(kRowsAtOnce % 8 == 0);

  static __device__ void touch(const float* at) {
    float unused;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(unused) : "l"(at));
  }
  __device__ int places() const { return p_.out_h * p_.out_w; }  // of an image
  __device__ void fill(const float* from, int image, float other, float (&to)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = other;
    if (from && c_ < p_.channels) {
      load_neighbours(from + static_cast<std::int64_t>(image) * p_.channels + c_, to);
    }
  }

  const Product& p_;
  const int first_row_, thread_;
  int first_image_, next_image_, c_;  // next_image_: the first place of the image after `factor_`'s
  float factor_[kWidth], added_[kWidth];
};

}  // namespace cnn_engine::cuda::wgmma
