// The sums of one task of a convolution: a tile of 16 squares (64 pixels) times some filters, in
// registers.
//
// Values may be in two parts: v = high + low, each 16 bits, as close to float32 as 22 bits are. A
// product then is high*high + high*low + low*high; the small ones have sums of their own, so that
// tensor cores, which round each addition towards zero, round the large ones as seldom as without
// parts.
#pragma once

#include "cuda/common/extremes.cuh"
#include "cuda/fused/geometry.cuh"

namespace cnn_engine::cuda::fused {

// sum[part][dy][dx][filter tile][element]: part 0 of high*high, part 1 of the rest.
template <int Parts, int FilterTiles>
using Accumulators = float[Parts][2][2][FilterTiles][4];

template <int Parts, int FilterTiles>
__device__ __forceinline__ void clear(Accumulators<Parts, FilterTiles>& accumulators) {
#pragma unroll
  for (int i = 0; i < Parts * 16 * FilterTiles; ++i) (&accumulators[0][0][0][0][0])[i] = 0.0f;
}

// Which parts product `c` multiplies, high*high first.
__device__ constexpr int left_part(int c) { return c == 2; }
__device__ constexpr int right_part(int c) { return c == 1; }
template <int InputParts, int Parts>
__device__ constexpr bool is_gemm(int c) {
  return left_part(c) < InputParts && right_part(c) < Parts;
}

// The square, as (row, column), of position `m` of a tile; positions past the last give the last.
template <class G>
__device__ __forceinline__ int clamped_position(int tile, int m) {
  const int position = tile * 16 + m;
  return G::kPositions % 16 == 0 || position < G::kPositions ? position : G::kPositions - 1;
}

// B's registers of one step and filter tile, both parts: b[part][register].
template <int Parts, int Registers>
__device__ __forceinline__ void load_weights(std::uint32_t (&b)[Parts][Registers],
                                             const unsigned char* at, int lane) {
  constexpr int kWords = Parts * Registers;
  const std::uint32_t* words = reinterpret_cast<const std::uint32_t*>(at) + lane * kWords;
  std::uint32_t all[kWords];
  if constexpr (kWords == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(words);
    all[0] = v.x, all[1] = v.y, all[2] = v.z, all[3] = v.w;
  } else if constexpr (kWords == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(words);
    all[0] = v.x, all[1] = v.y;
  } else {
    all[0] = *words;
  }
#pragma unroll
  for (int part = 0; part < Parts; ++part) {
#pragma unroll
    for (int i = 0; i < Registers; ++i) b[part][i] = all[part * Registers + i];
  }
}

// ---- first layer: `Tiles` tiles at once, so that a B once loaded is used for all of them ----
// Weights of the first layer that fit a thread's registers are read once for all of its tiles.
template <class G, int Parts>
constexpr bool kHeldPixelWeights = PixelLayout<G>::kSlabs * PixelLayout<G>::kSlabTiles * Parts <= 8;
template <class G, int Parts>
using HeldPixelWeights =
    std::uint32_t[kHeldPixelWeights<G, Parts> ? PixelLayout<G>::kSlabs : 1]
                 [kHeldPixelWeights<G, Parts> ? PixelLayout<G>::kSlabTiles : 1][Parts][2];

template <class G, class M, int InputParts, int Parts, int Tiles, int FilterTiles, bool Held>
__device__ __forceinline__ void sum_pixels(
    Accumulators<Parts, FilterTiles> (&accumulators)[Tiles], const HeldPixelWeights<G, Parts>& held,
    const std::uint32_t* input,    // [parts][PixelLayout]
    const unsigned char* weights,  // [slab][dx, filter tile][lane][part][2]
    int first_filter_tile, const int (&tile)[Tiles], int lane) {
  using L = PixelLayout<G>;
  constexpr int kTiles = L::kSides * FilterTiles;  // of a slab, that are read
  const int g = lane / 4, t = lane % 4;
  const std::uint32_t* corner[Tiles][2];  // of the windows of positions g and g+8
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = clamped_position<G>(tile[i], g + 8 * h);
      const int row = position / G::kSquaresW, column = position % G::kSquaresW;
      corner[i][h] = input + 2 * row * L::kRowWords + L::kLead + column * L::kChannels;
    }
  }
  using A = std::uint32_t[Tiles][InputParts][4];
  using B = std::uint32_t[kTiles][Parts][2];
  const auto load_a = [&](A& a, int low, int high) {  // words of slots t and t+4
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
#pragma unroll
      for (int part = 0; part < InputParts; ++part) {
        constexpr int kPart = L::kBytes / 4;
        a[i][part][0] = corner[i][0][part * kPart + low];
        a[i][part][1] = corner[i][1][part * kPart + low];
        a[i][part][2] = corner[i][0][part * kPart + high];
        a[i][part][3] = corner[i][1][part * kPart + high];
      }
    }
  };
  const auto load_pairs = [&](A& a, int at) {  // words at + 2t and the next
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
#pragma unroll
      for (int part = 0; part < InputParts; ++part) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint2 v =
              *reinterpret_cast<const uint2*>(corner[i][h] + part * (L::kBytes / 4) + at + 2 * t);
          a[i][part][h] = v.x;
          a[i][part][2 + h] = v.y;
        }
      }
    }
  };
  const auto load_b = [&](B& b, int slab) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if constexpr (Held) {
#pragma unroll
        for (int i = 0; i < 2 * Parts; ++i) b[j][i / 2][i % 2] = held[slab][j][i / 2][i % 2];
        continue;
      }
      const int at = j / FilterTiles * G::kFilterTiles + first_filter_tile + j % FilterTiles;
      load_weights<Parts, 2>(b[j], weights + (slab * L::kSlabTiles + at) * 256 * Parts, lane);
    }
  };
  const auto multiply = [&](const A& a, const B& b, int dy) {
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      if (!is_gemm<InputParts, Parts>(c)) continue;
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          M::mma16(accumulators[i][c > 0][dy][j / FilterTiles][j % FilterTiles], a[i][left_part(c)],
                   b[j][right_part(c)]);
        }
      }
    }
  };
#pragma unroll
  for (int step = 0; step < L::kFullSteps; ++step) {
    B b[2];
#pragma unroll
    for (int y = 0; y < G::kWindow; ++y) {
      A a;
      if constexpr (L::kRowSteps) {
        load_pairs(a, y * L::kRowWords);
      } else {
        load_a(a, y * L::kRowWords + step * 8 + t, y * L::kRowWords + step * 8 + t + 4);
      }
      if (y < G::kKernel) {
        load_b(b[y % 2], L::slab_full(y, step));
        multiply(a, b[y % 2], 0);
      }
      if (L::kSides == 2 && y > 0) multiply(a, b[(y - 1) % 2], 1);
    }
  }
#pragma unroll
  for (int step = 0; step < L::kLeftSteps; ++step) {
    const int low = step * 8 + t, high = low + 4;
    A a;
    load_a(a, L::left_row(low) * L::kRowWords + L::left_word(low),
           L::left_row(high) * L::kRowWords + L::left_word(high));
#pragma unroll
    for (int dy = 0; dy < L::kSides; ++dy) {
      B b;
      load_b(b, L::slab_left(dy, step));
      multiply(a, b, dy);
    }
  }
}

// B's registers of a step of 16 channels and a filter tile of a later layer.
template <class G, int Parts>
__device__ __forceinline__ void load_step(std::uint32_t (&b)[Parts][2], const unsigned char* at,
                                          int lane) {
  if constexpr (Parts == 1 && PlaneLayout<G>::kForWarpgroups) {
    const std::uint32_t* words = reinterpret_cast<const std::uint32_t*>(at) + lane;
    b[0][0] = words[0], b[0][1] = words[32];
  } else {
    load_weights<Parts, 2>(b, at, lane);
  }
}

// ---- later layers: kernel rows first_row to last_row - 1 ----
template <class G, class M, int Parts, int FilterTiles>
__device__ __forceinline__ void sum_planes(
    Accumulators<Parts, FilterTiles>& accumulators, std::uint32_t input,
    const unsigned char* weights,  // [row][column][step][tile][lane]
    int first_filter_tile, int tile, int first_row, int last_row, int lane) {
  using L = PlaneLayout<G>;
  constexpr int kKernel = G::kKernel, kWindow = G::kWindow;
  const int position = clamped_position<G>(tile, lane % 16);
  const std::uint32_t corner =
      input + 2 * (position / G::kSquaresW) * L::kRowBytes + position % G::kSquaresW * 16;
  // ldmatrix takes rows of the second half of K from lanes 16 to 31: the next plane, or, for the
  // steps of half a K, the next column of the last plane.
  std::uint32_t row16 = corner + lane / 16 * L::kPlaneBytes;
  std::uint32_t row8 = corner + (L::kPlanes - 1) * L::kPlaneBytes + lane / 16 * L::kParityBytes;
  weights += first_row * kKernel * L::template offset_bytes<Parts>();
  row16 += first_row * L::kRowBytes;
  row8 += first_row * L::kRowBytes;
  constexpr int kSides = G::kStride == 1 ? 2 : 1;  // dy, and dx, of a square's pixels
  // One step of 16 channels, with weights of a kernel row in registers.
  using B16 = std::uint32_t[kKernel][FilterTiles][Parts][2];
  const auto load_b16 = [&](B16& b, int step) {
#pragma unroll
    for (int s = 0; s < kKernel; ++s) {
#pragma unroll
      for (int f = 0; f < FilterTiles; ++f) {
        const unsigned char* at = weights + s * L::template offset_bytes<Parts>() +
                                  (step * G::kFilterTiles + first_filter_tile + f) * 256 * Parts;
        load_step<G, Parts>(b[s][f], at, lane);
      }
    }
  };
  const auto multiply_b16 = [&](const B16& b, int step, int x) {
    std::uint32_t a[kSides][Parts][4];
#pragma unroll
    for (int dy = 0; dy < kSides; ++dy) {
#pragma unroll
      for (int part = 0; part < Parts; ++part) {
        load_tiles(a[dy][part], row16 + part * L::kBytes + step * 2 * L::kPlaneBytes +
                                    dy * L::kRowBytes + L::column_bytes(x));
      }
    }
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      if (!is_gemm<Parts, Parts>(c)) continue;
#pragma unroll
      for (int dy = 0; dy < kSides; ++dy) {
#pragma unroll
        for (int dx = 0; dx < kSides; ++dx) {
          if (x - dx < 0 || x - dx >= kKernel) continue;
#pragma unroll
          for (int f = 0; f < FilterTiles; ++f) {
            M::mma16(accumulators[c > 0][dy][dx][f], a[dy][left_part(c)],
                     b[x - dx][f][right_part(c)]);
          }
        }
      }
    }
  };
#pragma unroll 1
  for (int r = first_row; r < last_row; ++r) {
    // All steps but the last; registers hold one's weights.
#pragma unroll 1
    for (int step = 0; step + 1 < L::kSteps16; ++step) {
      B16 b;
      load_b16(b, step);
#pragma unroll
      for (int x = 0; x < kWindow; ++x) multiply_b16(b, step, x);
    }
    [[maybe_unused]] B16 b16;
    [[maybe_unused]] std::uint32_t b8[kKernel][FilterTiles][Parts][1];
    if constexpr (L::kSteps16 > 0) load_b16(b16, L::kSteps16 - 1);
    if constexpr (L::kSteps8 > 0) {
#pragma unroll
      for (int s = 0; s < kKernel; ++s) {
#pragma unroll
        for (int f = 0; f < FilterTiles; ++f) {
          load_weights<Parts, 1>(
              b8[s][f],
              weights + s * L::template offset_bytes<Parts>() +
                  (L::kSteps16 * G::kFilterTiles * 256 + (first_filter_tile + f) * 128) * Parts,
              lane);
        }
      }
    }
#pragma unroll
    for (int x = 0; x < kWindow; ++x) {
      if constexpr (L::kSteps16 > 0) multiply_b16(b16, L::kSteps16 - 1, x);
      if constexpr (L::kSteps8 > 0) {
        if (x % 2 != 0) continue;  // one load brings columns x and x+1
        std::uint32_t a[kSides][Parts][4];
#pragma unroll
        for (int dy = 0; dy < kSides; ++dy) {
#pragma unroll
          for (int part = 0; part < Parts; ++part) {
            load_tiles(a[dy][part],
                       row8 + part * L::kBytes + dy * L::kRowBytes + L::column_bytes(x));
          }
        }
#pragma unroll
        for (int c = 0; c < 3; ++c) {
          if (!is_gemm<Parts, Parts>(c)) continue;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int dy = 0; dy < kSides; ++dy) {
#pragma unroll
              for (int dx = 0; dx < kSides; ++dx) {
                const int s = x + e - dx;
                if (s < 0 || s >= kKernel) continue;
#pragma unroll
                for (int f = 0; f < FilterTiles; ++f) {
                  M::mma8(accumulators[c > 0][dy][dx][f], a[dy][left_part(c)] + 2 * e,
                          b8[s][f][right_part(c)]);
                }
              }
            }
          }
        }
      }
    }
    weights += kKernel * L::template offset_bytes<Parts>();
    row16 += L::kRowBytes;
    row8 += L::kRowBytes;
  }
}

// Half of the products of a task that two warps share: of every second step of 16 channels, counted
// over kernel rows, from step `first` on.
template <class G, class M>
__device__ __forceinline__ void sum_half(Accumulators<1, 2>& accumulators, std::uint32_t input,
                                         const unsigned char* weights, int first_filter_tile,
                                         int tile, int first, int lane) {
  using L = PlaneLayout<G>;
  constexpr int kKernelOffset = L::template offset_bytes<1>(), kTotal = G::kKernel * L::kSteps16;
  const int position = clamped_position<G>(tile, lane % 16);
  const std::uint32_t corner = input + 2 * (position / G::kSquaresW) * L::kRowBytes +
                               position % G::kSquaresW * 16 + lane / 16 * L::kPlaneBytes;
  weights += first_filter_tile * 256;
#pragma unroll 1
  for (int i = first; i < kTotal; i += 2) {
    const int r = i / L::kSteps16, step = i % L::kSteps16;
    const std::uint32_t row = corner + r * L::kRowBytes + step * 2 * L::kPlaneBytes;
    const unsigned char* at =
        weights + r * G::kKernel * kKernelOffset + step * G::kFilterTiles * 256;
#pragma unroll
    for (int s = 0; s < G::kKernel; ++s) {
      std::uint32_t a[4];
      load_tiles(a, row + L::column_bytes(s));
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        std::uint32_t b[1][2];
        load_step<G, 1>(b, at + s * kKernelOffset + f * 256, lane);
        M::mma16(accumulators[0][0][0][f], a, b[0]);
      }
    }
  }
}

template <Activation Act>
__device__ __forceinline__ float activate(float value) {
  if constexpr (Act == Activation::relu)
    return max_nan(value, 0.0f);
  else if constexpr (Act == Activation::tanh)
    return tanhf(value);
  else
    return value;
}

// Calls emit(filter tile, position, dy, dx, value of channel 2t, of channel 2t+1) for what this
// lane holds of a task's result: pooled or one (dy = dx = 0), or each pixel of each square. value =
// act(sum * unscale + bias). The activations rise, so that pooling before them gives the same value
// and fewer of them to compute.
template <class G, int Parts, int FilterTiles, class Emit>
__device__ __forceinline__ void finish(const Accumulators<Parts, FilterTiles>& accumulators,
                                       const float* bias, float unscale, int tile, int lane,
                                       const Emit& emit) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int f = 0; f < FilterTiles; ++f) {
    const float2 b = *reinterpret_cast<const float2*>(bias + 8 * f + 2 * t);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = tile * 16 + g + 8 * h;
      const bool inside = G::kPositions % 16 == 0 || position < G::kPositions;
      float value[2][2][2];
#pragma unroll
      for (int i = 0; i < 2 * G::kPixels; ++i) {
        const int dy = i / 4, dx = i / 2 % 2, e = i % 2;
        float sum = accumulators[0][dy][dx][f][2 * h + e];
        if constexpr (Parts == 2) sum += accumulators[1][dy][dx][f][2 * h + e];
        value[dy][dx][e] = sum;
      }
      if constexpr (G::kPool) {
        float pooled[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float largest = max_nan(max_nan(value[0][0][e], value[0][1][e]),
                                        max_nan(value[1][0][e], value[1][1][e]));
          pooled[e] = activate<G::kActivation>(fmaf(largest, unscale, e ? b.y : b.x));
        }
        if (inside) emit(f, position, 0, 0, pooled[0], pooled[1]);
      } else {
#pragma unroll
        for (int i = 0; i < G::kPixels; ++i) {
          const float low = activate<G::kActivation>(fmaf(value[i / 2][i % 2][0], unscale, b.x));
          const float high = activate<G::kActivation>(fmaf(value[i / 2][i % 2][1], unscale, b.y));
          if (inside) emit(f, position, i / 2, i % 2, low, high);
        }
      }
    }
  }
}

}  // namespace cnn_engine::cuda::fused
