// What conv2d_nhwc_wgmma does to positions in shared memory before their products.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/extremes.cuh"
#include "cuda/sm80/epilogue.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_split.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda::wgmma {

// The image of a tile's first place, whose factors are not those of other images; or 0.
__device__ inline int first_image(const Gemm& p, int first_row) {
  return p.scale_per_image ? first_row / (p.out_h * p.out_w) : 0;
}

__device__ inline void load_four(const float* from, float* to) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
}

// z = max(x scale + shift, floor) of a thread's channels, from `first` on, of which there are all
// or none of each `Together`. What that needs is loaded before a step is there, from the
// first-level cache: the second takes longer than a step.
template <int Channels, int Together>
class Affine {
 public:
  __device__ void load(const Gemm& p, int image, int first) {
    first_ = first;
    next_image_ = p.scale_per_image ? (image + 1) * p.out_h * p.out_w : p.rows;
    fill(p, p.scale, image, 1.0f, factor_);
    fill(p, p.shift, 0, 0.0f, added_);
  }

  __device__ void apply(const Gemm& p, int position, float (&z)[Channels]) {
    if (position >= next_image_ && position < p.rows) {
      const int image = position / (p.out_h * p.out_w);
      next_image_ = (image + 1) * p.out_h * p.out_w;
      fill(p, p.scale, image, 1.0f, factor_);
    }
#pragma unroll
    for (int i = 0; i < Channels; ++i) {
      z[i] = max_nan(fmaf(z[i], factor_[i], added_[i]), p.floor);
    }
  }

 private:
  // A branch for all of `Together`, not for each load: the step's loop is a tenth shorter so.
  __device__ void fill(const Gemm& p, const float* from, int image, float other,
                       float (&to)[Channels]) const {
#pragma unroll
    for (int i = 0; i < Channels; ++i) to[i] = other;
    if (!from) return;
    from += static_cast<std::int64_t>(image) * p.channels + first_;
#pragma unroll
    for (int i = 0; i < Channels; i += Together) {
      if (first_ + i >= p.channels) break;
#pragma unroll
      for (int j = i; j < i + Together; j += 4) load_four(from + j, to + j);
    }
  }

  int first_, next_image_;  // the latter: the first place of the image after `factor_`'s
  float factor_[Channels], added_[Channels];
};

// Asks for what the affine functions of `steps` steps need to be in the first-level cache.
template <int StepChannels, int Threads, int Columns>
__device__ inline void ask_for_affine(const Gemm& p, int first_step, int steps, int first_row,
                                      int thread) {
  constexpr int kSector = 32 / sizeof(float);
  const int positions = p.out_h * p.out_w, first = first_step * StepChannels,
            end = min(p.channels, first + steps * StepChannels);
  const int last = p.scale_per_image ? min(first_row + Columns, p.rows) - 1 : 0;
  for (int c = first + thread * kSector; c < end; c += Threads * kSector) {
    if (p.shift) touch(p.shift + c);
    if (!p.scale) continue;
    for (int image = first_image(p, first_row); image * positions <= last; ++image) {
      touch(p.scale + static_cast<std::int64_t>(image) * p.channels + c);
    }
  }
}

// What is done to a step's positions: of 16 bits and of tf32 an affine function or nothing. A
// thread has a piece of every kRowsAtOnce-th row.
template <typename T, int Threads, int Columns, bool Prologue>
class Preparation {
 public:
  static constexpr int kStepChannels = kRowBytes / sizeof(T);

  __device__ Preparation(const Gemm& p, int first_row, int thread)
      : p_(p),
        first_row_(first_row),
        thread_(thread),
        image_(Prologue ? first_image(p, first_row) : 0) {}

  __device__ void load(int step) {
    if constexpr (Prologue) {
      const int piece = swizzled(thread_ / 8, thread_ % 8);
      affine_.load(p_, image_, step * kStepChannels + piece * kWidth);
    }
  }

  __device__ void apply(char* positions_of_step) {
#pragma unroll
    for (int row = thread_ / 8; row < Columns; row += kRowsAtOnce) {
      T* const at = reinterpret_cast<T*>(positions_of_step + row * kRowBytes + thread_ % 8 * 16);
      const uint4 read = *reinterpret_cast<const uint4*>(at);
      float z[kWidth];
      load_neighbours(at, z);
      affine_.apply(p_, first_row_ + row, z);
      if constexpr (sizeof(T) == 2) {
        using Format = std::conditional_t<std::is_same_v<T, __half>, Half, Bfloat16>;
        const uint4 made = make_uint4(Format::pack(z[0], z[1]), Format::pack(z[2], z[3]),
                                      Format::pack(z[4], z[5]), Format::pack(z[6], z[7]));
        *reinterpret_cast<uint4*>(at) = made;
        const bool counts = first_row_ + row < p_.rows;
        past_.look(read.x, made.x, counts);
        past_.look(read.y, made.y, counts);
        past_.look(read.z, made.z, counts);
        past_.look(read.w, made.w, counts);
      } else {
        store_neighbours(at, z, Overflow{});
      }
    }
    fence_async_proxy();
    named_barrier<Threads>(1);
  }

  // After the last step.
  __device__ void end() const {
    if (Prologue && past_.found()) tell(p_.overflow);
  }

 private:
  static constexpr int kWidth = 16 / sizeof(T), kRowsAtOnce = Threads / 8;
  static_assert(kRowsAtOnce % 8 == 0);

  const Gemm& p_;
  const int first_row_, thread_, image_;
  Affine<kWidth, kWidth> affine_;  // channels come in pieces of 16 bytes
  PastRange<T> past_;
};

// Of float32: warps of their own make two parts of float16 of positions, where they are, for the
// warps that multiply. kWarps are one team or two, which take turns: a team has a step, a warp
// kRows eights of its positions, four lanes a position, each two of its pieces, which its parts'
// pieces are again. All loads come first, then what takes long for one number and not for many.
template <int Columns, bool Prologue>
class Splitting {
 public:
  static constexpr int kWarps = 4, kTeams = Columns > 64 ? 1 : 2, kTeamWarps = kWarps / kTeams;

  // `warp`: of the kWarps.
  __device__ Splitting(const Gemm& p, int first_row, int warp)
      : p_(p),
        first_row_(first_row),
        team_(warp / kTeamWarps),
        row_(warp % kTeamWarps * (8 * kRows) + threadIdx.x % 32 / kLanes),
        lane_(threadIdx.x % kLanes),
        image_(Prologue ? first_image(p, first_row) : 0) {}

  // The first of the team's steps among those of the block.
  __device__ int team() const { return team_; }

  // Before the step is there.
  __device__ void load(int step) {
    if constexpr (Prologue) affine_.load(p_, image_, step * kStepChannels + lane_ * kWidth);
  }

  // What the step's sums of positions are multiplied by goes to `scales`.
  __device__ void apply(char* positions, float* scales) {
    float z[kRows][kWidth], largest[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_row(positions, row_ + 8 * i, z[i]);
    __syncwarp();  // a position's lanes store where the others of them have loaded
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (Prologue) affine_.apply(p_, first_row_ + row_ + 8 * i, z[i]);
      const auto two = [&](int j) {
        return fmaxf(fabsf(z[i][j]), fabsf(z[i][j + 1]));
      };
      largest[i] = fmaxf(fmaxf(two(0), two(2)), fmaxf(two(4), two(6)));
    }
#pragma unroll
    for (int apart = 1; apart < kLanes; apart *= 2) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffff, largest[i], apart));
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const unsigned exponent = exponent_of(__float_as_uint(largest[i]));
      if (lane_ == 0) scales[row_ + 8 * i] = unscale_of(exponent) * kPositionUnit;
      store_row(positions, row_ + 8 * i, z[i], scale_of(exponent));
    }
  }

 private:
  static constexpr int kLanes = 4, kStepChannels = kRowBytes / sizeof(float),
                       kWidth = kStepChannels / kLanes, kRows = Columns / kTeamWarps / 8;
  static_assert(kWidth == 8 && Columns % (8 * kTeamWarps) == 0);

  __device__ void load_row(const char* positions, int row, float (&z)[kWidth]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* const from = positions + row * kRowBytes + swizzled(row, 2 * lane_ + half) * 16;
      load_four(reinterpret_cast<const float*>(from), z + 4 * half);
    }
  }

  // Lanes of odd rows store the small parts first, so that those of two rows meet in no bank.
  __device__ void store_row(char* positions, int row, const float (&z)[kWidth], float scale) const {
    const bool odd = row % 2 != 0;
    alignas(16) __half2 first[kWidth / 2], second[kWidth / 2];
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const Parts parts(z[2 * i] * scale, z[2 * i + 1] * scale);
      first[i] = odd ? parts.small : parts.large;
      second[i] = odd ? parts.large : parts.small;
    }
    const auto store = [&](int piece, const __half2(&from)[kWidth / 2]) {
      *reinterpret_cast<uint4*>(positions + row * kRowBytes + swizzled(row, piece) * 16) =
          *reinterpret_cast<const uint4*>(from);
    };
    const int large = piece_of_eight(lane_), small = large + 2;
    store(odd ? small : large, first);
    store(odd ? large : small, second);
  }

  const Gemm& p_;
  const int first_row_, team_, row_, lane_, image_;
  Affine<kWidth, 4> affine_;  // channels come in fours
};

}  // namespace cnn_engine::cuda::wgmma
