// How an image comes into a team's shared memory: the first half of a team.
//
// uint8 pixels are copied ahead of time as they are (cp.async), and converted when the team gets to
// them. float32 pixels are brought to the device's cache ahead of time. They are searched for the
// image's largest value, from which the powers of two of all its layers follow, before they are
// stored: meanwhile registers keep them, or where a thread has too many they are read again.
#pragma once

#include "cuda/fused/conv.cuh"
#include "cuda/reduce.cuh"

namespace cnn_engine::cuda::fused {

// The power of two that brings values up to `largest` to at most 2^15, half of what float16 holds.
__host__ __device__ inline float storing_scale(float largest) {
  if (!(largest > 0.0f) || largest > 3e38f) return 1.0f;
  const int exponent = 14 - ilogbf(largest);
  return ldexpf(1.0f, exponent < -60 ? -60 : exponent > 60 ? 60 : exponent);
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
  __device__ float* sums() const { return reinterpret_cast<float*>(own + S::kSums); }

  // Runs of pixels; a thread stages and stores its own, so that it need not wait for others.
  static constexpr int kRun = PixelLayout<Layer<0>>::kRun;
  static constexpr int kItems = Net::kPixels / kRun;
  static constexpr int kImage = Net::kChannels * Net::kPixels;

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

  __device__ void store_uint8(int image) const {
    const unsigned char* from =
        S::kStages ? own + S::kStaged
                   : static_cast<const unsigned char*>(p.images) + std::int64_t{image} * kImage;
    for (int item = thread; item < kItems; item += R::kTeamThreads) {
      float value[Net::kChannels][kRun];
#pragma unroll
      for (int c = 0; c < Net::kChannels; ++c) {
        const uint2 bytes = load8(from + c * Net::kPixels + item * kRun);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          // 2^23 + pixel, by placing the byte into that number's mantissa; cheaper than a
          // conversion.
          const std::uint32_t bits =
              __byte_perm(i < 4 ? bytes.x : bytes.y, 0x4b000000u, 0x7440 + i % 4);
          value[c][i] = fmaf(__uint_as_float(bits) - 8388608.0f, p.multiply, p.add);
        }
      }
      store_pixels(item, value);
    }
  }

  // Runs of float32 pixels: as many as fill what is stored at once, so that neighbouring threads'
  // lie side by side. A thread's few are kept in registers.
  static constexpr int kStoredBytes = 2 * PixelLayout<Layer<0>>::kChannels;
  static constexpr int kFloatRun =
      16 % kStoredBytes == 0 && 16 / kStoredBytes < kRun ? 16 / kStoredBytes : kRun;
  static constexpr int kFloatItems = Net::kPixels / kFloatRun;
  static constexpr int kRuns = (kFloatItems + R::kTeamThreads - 1) / R::kTeamThreads;
  static constexpr bool kKeeps = kRuns * Net::kChannels * kFloatRun <= 24;
  using Run = float[Net::kChannels][kFloatRun];

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

  __device__ void store_float(int image) const {
    const float* from = static_cast<const float*>(p.images) + std::int64_t{image} * kImage;
    float largest = 0.0f;
    [[maybe_unused]] Run kept[kKeeps ? kRuns : 1] = {};
    if constexpr (kKeeps) {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        const int item = thread + i * R::kTeamThreads;
        if (item < kFloatItems) load_run(kept[i], from, item);
      }
#pragma unroll
      for (int i = 0; i < kRuns * Net::kChannels * kFloatRun; ++i) {
        largest = fmaxf(largest, fabsf((&kept[0][0][0])[i]));
      }
    } else {
      for (int i = 4 * thread; i < kImage / 4 * 4; i += 4 * R::kTeamThreads) {
        float v[4];
        load_floats<4>(v, from + i);
        largest =
            fmaxf(largest, fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
      }
      if (kImage % 4 > thread) largest = fmaxf(largest, fabsf(from[kImage / 4 * 4 + thread]));
    }
    largest = warp_max(largest);
    float* all = reinterpret_cast<float*>(own + S::kLargest);
    if (lane == 0) all[warp] = largest;
    block_barrier();
    largest = 0.0f;
#pragma unroll
    for (int w = 0; w < R::kWarps; ++w) largest = fmaxf(largest, all[w]);
    const float first = storing_scale(largest);
    if (thread == 0) set_scales<0>(largest, first);
    if constexpr (kKeeps) {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        const int item = thread + i * R::kTeamThreads;
        if (item < kFloatItems) store_run(item, kept[i], first);
      }
    } else {
      for (int item = thread; item < kFloatItems; item += R::kTeamThreads) {
        Run value;
        load_run(value, from, item);
        store_run(item, value, first);
      }
    }
  }

  template <int I>
  __device__ void set_scales(float largest, float stored) const {
    largest =
        Layer<I>::kActivation == Activation::tanh ? 1.0f : fmaf(largest, p.gain[I], p.bias[I]);
    const float next = storing_scale(largest);
    scales()[I] = Scale{p.unscale[I] / stored, next};
    if constexpr (I + 1 < Net::kLayers) set_scales<I + 1>(largest, next);
  }
};

}  // namespace cnn_engine::cuda::fused
