// How an image comes into a team's shared memory: the first half of a team.
//
// uint8 pixels are copied ahead of time as they are (cp.async), and converted when the team gets to
// them. float32 pixels are brought to the device's cache ahead of time. They are searched for the
// image's largest value, from which the powers of two of all its layers follow, before they are
// stored: meanwhile registers keep them, or where a thread has too many they are read again. A team
// that loads ahead has both in registers before it gets to them: the first image's while it clears
// its inputs, another's while it computes the last layer of the one before.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/fused/conv.cuh"

namespace cnn_engine::cuda::fused {

// The power of two that brings values up to `largest` to at most 2^15, half of what float16 holds.
__host__ __device__ inline float storing_scale(float largest) {
  if (!(largest > 0.0f) || largest > 3e38f) return 1.0f;
#ifdef __CUDA_ARCH__
  // By the bits of its exponent: one thread does this for layer after layer while others wait.
  const int exponent = 14 + 127 - (__float_as_int(largest) >> 23);
  return __int_as_float((127 + (exponent < -60 ? -60 : exponent > 60 ? 60 : exponent)) << 23);
#else
  const int exponent = 14 - ilogbf(largest);
  return ldexpf(1.0f, exponent < -60 ? -60 : exponent > 60 ? 60 : exponent);
#endif
}

// 1 / scale, of a power of two.
__device__ inline float inverse(float scale) {
  return __int_as_float((254 << 23) - __float_as_int(scale));
}

template <class M, int Parts>
__device__ __forceinline__ void split(float low, float high, std::uint32_t (&parts)[Parts]) {
  parts[0] = M::pack(low, high);
  if constexpr (Parts == 2) {
    const float2 kept = M::unpack(parts[0]);
    parts[1] = M::pack(low - kept.x, high - kept.y);
  }
}

template <class Net, class M, int Parts, int InputParts, class R>
struct TeamInput {
  using S = SharedLayout<Net, Parts, InputParts, R>;
  template <int I>
  using Layer = typename Net::template Layer<I>;

  const Parameters& p;
  unsigned char* shared;         // the block's
  unsigned char* own;            // this team's
  int team, thread, warp, lane;  // in the block
  int rank, worker;              // of this block in its cluster; of this warp in its team

  // Of the team's threads in this block.
  __device__ void block_barrier() const {
    if constexpr (R::kGroups == 1)
      __syncthreads();
    else
      named_barrier<R::kTeamThreads>(team + 1);
  }
  // Of the team.
  __device__ void barrier() const {
    if constexpr (R::kCluster > 1)
      cluster_barrier();
    else
      block_barrier();
  }
  // What the offsets of weights and biases in SharedLayout are from.
  __device__ const unsigned char* weights() const {
    if constexpr (R::kKeptWeights)
      return shared;
    else
      return p.weights;
  }
  __device__ Scale* scales() const { return reinterpret_cast<Scale*>(own + S::kScales); }
  __device__ float* accumulators() const {
    return reinterpret_cast<float*>(own + S::kAccumulators);
  }

  // Runs of pixels; a thread stages and stores its own, so that it need not wait for others.
  static constexpr int kRun = PixelLayout<Layer<0>>::kRun;
  static constexpr int kItems = Net::kPixels / kRun;
  static constexpr int kImage = Net::kChannels * Net::kPixels;

  // Runs of float32 pixels, of which a thread's few are kept in registers.
  static constexpr int kFloatRun = PixelLayout<Layer<0>>::kFloatRun;
  static constexpr int kFloatItems = Net::kPixels / kFloatRun;
  static constexpr int kRuns = S::kRuns;
  static constexpr bool kKeeps = S::kKeeps;
  using Run = float[Net::kChannels][kFloatRun];
  using Kept = Run[kKeeps ? kRuns : 1];
  using Prefetch = Run[S::kPrefetchDepth ? kRuns : 1];

  // One image for each block first, so that a small batch spreads over the multiprocessors.
  __device__ int first_image() const { return (team * gridDim.x + blockIdx.x) / R::kCluster; }

  // Starts to bring an image's bytes to shared memory; always one group of copies, maybe empty.
  __device__ void stage(int image) const {
    if (S::kStages && p.is_uint8 && image < p.count) {
      const unsigned char* from =
          static_cast<const unsigned char*>(p.images) + std::int64_t{image} * kImage;
      unsigned char* to = own + S::kStaged;
      for (int item = thread; item < kItems; item += R::kTeamThreads) {
#pragma unroll
        for (int c = 0; c < Net::kChannels; ++c) {
          const int at = c * Net::kPixels + item * 8;
          if (p.ahead) {
            copy_async<8>(to + at, from + at);
          } else {
            for (int i = 0; i < 8; ++i) to[at + i] = from[at + i];
          }
        }
      }
    }
    if (!p.is_uint8 && image < p.count) {
      constexpr int kLine = 128;
      const char* from =
          static_cast<const char*>(p.images) + std::int64_t{image} * kImage * sizeof(float);
      for (int at = thread * kLine; at < kImage * 4; at += R::kTeamThreads * kLine) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
      }
    }
    commit_copies();
  }

  // Writes a run of pixels of all channels into the first layer's input.
  template <int Run>
  __device__ __forceinline__ void store_pixels(int item,
                                               const float (&value)[Net::kChannels][Run]) const {
    using L = PixelLayout<Layer<0>>;
    constexpr int kPad = Layer<0>::kPad, kWords = Run * L::kChannels / 2;
    const int row = item / (Net::kWidth / Run), column = item % (Net::kWidth / Run) * Run;
    const auto number = [&](int i) {  // of the run: pixel, stored channel
      return i % L::kChannels < Net::kChannels ? value[i % L::kChannels][i / L::kChannels] : 0.0f;
    };
    std::uint32_t words[InputParts][kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      std::uint32_t parts[InputParts];
      split<M, InputParts>(number(2 * w), number(2 * w + 1), parts);
#pragma unroll
      for (int part = 0; part < InputParts; ++part) words[part][w] = parts[part];
    }
#pragma unroll
    for (int part = 0; part < InputParts; ++part) {
      std::uint32_t* to =
          reinterpret_cast<std::uint32_t*>(own + S::template input_at<0>() + part * L::kBytes) +
          (row + kPad) * L::kRowWords + L::kLead + (column + kPad) * L::kChannels / 2;
      if constexpr (kWords % 4 == 0) {
#pragma unroll
        for (int w = 0; w < kWords; w += 4) {
          *reinterpret_cast<uint4*>(to + w) = make_uint4(words[part][w], words[part][w + 1],
                                                         words[part][w + 2], words[part][w + 3]);
        }
      } else {
#pragma unroll
        for (int w = 0; w < kWords; ++w) to[w] = words[part][w];
      }
    }
  }

  // Eight bytes, of which a run's are there.
  __device__ __forceinline__ uint2 load8(const unsigned char* from) const {
    if constexpr (kRun == 8) {
      if (S::kStages || p.ahead) return *reinterpret_cast<const uint2*>(from);
    }
    if constexpr (kRun == 4) {
      if (p.ahead) return make_uint2(__ldg(reinterpret_cast<const unsigned*>(from)), 0);
    }
    uint2 bytes = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < (kRun < 4 ? kRun : 4); ++i) {
      bytes.x |= static_cast<std::uint32_t>(from[i]) << (8 * i);
      if constexpr (kRun == 8) bytes.y |= static_cast<std::uint32_t>(from[4 + i]) << (8 * i);
    }
    return bytes;
  }

  // 2^23 + pixel, by placing the byte into that number's mantissa, is cheaper than a conversion.
  __device__ __forceinline__ void store_bytes(int item,
                                              const uint2 (&bytes)[Net::kChannels]) const {
    float value[Net::kChannels][kRun];
#pragma unroll
    for (int c = 0; c < Net::kChannels; ++c) {
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const std::uint32_t bits =
            __byte_perm(i < 4 ? bytes[c].x : bytes[c].y, 0x4b000000u, 0x7440 + i % 4);
        value[c][i] = fmaf(__uint_as_float(bits) - 8388608.0f, p.multiply, p.add);
      }
    }
    store_pixels(item, value);
  }

  static constexpr int kByteRuns = (kItems + R::kTeamThreads - 1) / R::kTeamThreads;
  static_assert(!S::kPrefetchDepth || kByteRuns * (kRun == 8 ? 2 : 1) <= kRuns * kFloatRun);
  template <class Registers>
  __device__ __forceinline__ static auto& prefetched_word(Registers& ahead, int run, int channel,
                                                          int word) {
    constexpr int kWords = kRun == 8 ? 2 : 1;
    return (&ahead[0][0][0])[(run * Net::kChannels + channel) * kWords + word];
  }

  __device__ __forceinline__ void store_uint8(int image, const Prefetch& ahead) const {
    if constexpr (S::kPrefetchDepth) {
#pragma unroll
      for (int i = 0; i < kByteRuns; ++i) {
        uint2 bytes[Net::kChannels];
#pragma unroll
        for (int c = 0; c < Net::kChannels; ++c) {
          bytes[c].x = __float_as_uint(prefetched_word(ahead, i, c, 0));
          bytes[c].y = kRun == 8 ? __float_as_uint(prefetched_word(ahead, i, c, 1)) : 0;
        }
        const int item = thread + i * R::kTeamThreads;
        if (is_there<kItems>(item)) store_bytes(item, bytes);
      }
    } else {
      const unsigned char* from =
          S::kStages ? own + S::kStaged
                     : static_cast<const unsigned char*>(p.images) + std::int64_t{image} * kImage;
      for (int item = thread; item < kItems; item += R::kTeamThreads) {
        uint2 bytes[Net::kChannels];
#pragma unroll
        for (int c = 0; c < Net::kChannels; ++c) {
          bytes[c] = load8(from + c * Net::kPixels + item * kRun);
        }
        store_bytes(item, bytes);
      }
    }
  }

  // Those that are read once leave the first-level cache to what is not.
  template <int Count>
  __device__ __forceinline__ void load_floats(float* value, const float* from) const {
    if (Count == 1 || !p.ahead) {
#pragma unroll
      for (int i = 0; i < Count; ++i) value[i] = __ldg(from + i);
    } else if constexpr (!kKeeps && Count == 4) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(from));
      value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
    } else if constexpr (!kKeeps && Count == 2) {
      const float2 v = __ldg(reinterpret_cast<const float2*>(from));
      value[0] = v.x, value[1] = v.y;
    } else if constexpr (Count == 4) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                   : "l"(from));
    } else if constexpr (Count == 2) {
      asm volatile("ld.global.nc.L1::no_allocate.v2.f32 {%0,%1}, [%2];"
                   : "=f"(value[0]), "=f"(value[1])
                   : "l"(from));
    }
  }
  __device__ __forceinline__ void load_run(Run& value, const float* from, int item) const {
#pragma unroll
    for (int c = 0; c < Net::kChannels; ++c) {
      constexpr int kAtOnce = kFloatRun < 4 ? kFloatRun : 4;
#pragma unroll
      for (int i = 0; i < kFloatRun; i += kAtOnce) {
        load_floats<kAtOnce>(&value[c][i], from + c * Net::kPixels + item * kFloatRun + i);
      }
    }
  }
  __device__ __forceinline__ void store_run(int item, Run& value, float scale) const {
#pragma unroll
    for (int i = 0; i < Net::kChannels * kFloatRun; ++i) (&value[0][0])[i] *= scale;
    store_pixels(item, value);
  }

  template <int Items>
  __device__ __forceinline__ static bool is_there(int item) {
    return Items % R::kTeamThreads == 0 || item < Items;
  }
  __device__ __forceinline__ void load_kept(Kept& kept, int image) const {
    const float* from = static_cast<const float*>(p.images) + std::int64_t{image} * kImage;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int item = thread + i * R::kTeamThreads;
      if (is_there<kFloatItems>(item)) {
        load_run(kept[i], from, item);
      } else {
#pragma unroll
        for (int j = 0; j < Net::kChannels * kFloatRun; ++j) (&kept[i][0][0])[j] = 0.0f;
      }
    }
  }

  // Each warp's largest, to shared memory.
  __device__ __forceinline__ void put_largest(float largest) const {
    largest = warp_max(largest);
    if (lane == 0) reinterpret_cast<float*>(own + S::kLargest)[warp] = largest;
  }
  __device__ __forceinline__ void put_largest_of(const Kept& kept) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kRuns * Net::kChannels * kFloatRun; ++i) {
      largest = fmaxf(largest, fabsf((&kept[0][0][0])[i]));
    }
    put_largest(largest);
  }
  // Behind a barrier: sets the scales of all layers; returns what pixels are stored times.
  __device__ __forceinline__ float scale_by_largest() const {
    const float* all = reinterpret_cast<const float*>(own + S::kLargest);
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < R::kWarps; ++w) largest = fmaxf(largest, all[w]);
    const float first = storing_scale(largest);
    if (thread == 0) set_scales<0>(largest, first);
    return first;
  }
  __device__ __forceinline__ void store_kept(Kept& kept) const {
    const float scale = scale_by_largest();
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int item = thread + i * R::kTeamThreads;
      if (is_there<kFloatItems>(item)) store_run(item, kept[i], scale);
    }
  }

  // A team that loads ahead has an image's pixels in registers before it gets to them; of uint8
  // ones the bytes, four a register.
  __device__ __forceinline__ void prefetch_input(Prefetch& ahead, int image) const {
    if constexpr (S::kPrefetchDepth) {
      if (image >= p.count) return;
      if (!p.is_uint8) {
        load_kept(ahead, image);
        return;
      }
      const unsigned char* from =
          static_cast<const unsigned char*>(p.images) + std::int64_t{image} * kImage;
#pragma unroll
      for (int i = 0; i < kByteRuns; ++i) {
        const int item = thread + i * R::kTeamThreads;
#pragma unroll
        for (int c = 0; c < Net::kChannels; ++c) {
          uint2 bytes = make_uint2(0, 0);
          if (is_there<kItems>(item)) bytes = load8(from + c * Net::kPixels + item * kRun);
          prefetched_word(ahead, i, c, 0) = __uint_as_float(bytes.x);
          if constexpr (kRun == 8) prefetched_word(ahead, i, c, 1) = __uint_as_float(bytes.y);
        }
      }
    }
  }
  // And, of float32 ones, looked for their largest before the last barrier that comes before that.
  __device__ __forceinline__ void put_largest_ahead(const Prefetch& ahead, int image) const {
    if constexpr (S::kPrefetchDepth) {
      if (!p.is_uint8 && image < p.count) put_largest_of(ahead);
    }
  }

  __device__ __forceinline__ void store_float(int image, Prefetch& ahead) const {
    if constexpr (S::kPrefetchDepth) {
      store_kept(ahead);
    } else if constexpr (kKeeps) {
      Kept kept;
      load_kept(kept, image);
      put_largest_of(kept);
      block_barrier();
      store_kept(kept);
    } else {
      const float* from = static_cast<const float*>(p.images) + std::int64_t{image} * kImage;
      float largest = 0.0f;
      for (int i = 4 * thread; i < kImage / 4 * 4; i += 4 * R::kTeamThreads) {
        float v[4];
        load_floats<4>(v, from + i);
        largest =
            fmaxf(largest, fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
      }
      if (kImage % 4 > thread) largest = fmaxf(largest, fabsf(from[kImage / 4 * 4 + thread]));
      put_largest(largest);
      block_barrier();
      const float scale = scale_by_largest();
      for (int item = thread; item < kFloatItems; item += R::kTeamThreads) {
        Run value;
        load_run(value, from, item);
        store_run(item, value, scale);
      }
    }
  }

  template <int I>
  __device__ void set_scales(float largest, float storage) const {
    largest =
        Layer<I>::kActivation == Activation::tanh ? 1.0f : fmaf(largest, p.gain[I], p.bias[I]);
    const float next = storing_scale(largest);
    scales()[I] = Scale{p.unscale[I] * inverse(storage), next};
    if constexpr (I + 1 < Net::kLayers) set_scales<I + 1>(largest, next);
  }
};

}  // namespace cnn_engine::cuda::fused
