// Of CUDA's runtime and language what csrc/cuda uses, for emulated kernels: launches run at once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator.h"
#include "runtime/stream.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__

// ---- vectors ----

#define CNN_ENGINE_VECTORS(type, name)                             \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };         \
  struct alignas(4 * sizeof(type)) name##4 { type x, y, z, w; };   \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CNN_ENGINE_VECTORS(float, float)
CNN_ENGINE_VECTORS(int, int)
CNN_ENGINE_VECTORS(unsigned, uint)
#undef CNN_ENGINE_VECTORS

// ---- functions ----

using std::isinf;
using std::isnan;
using std::max;
using std::min;

template <typename To, typename From>
To of_same_bits(From from) {
  To to;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
inline unsigned __float_as_uint(float x) { return of_same_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return of_same_bits<float>(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(x) * y) >> 32);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t both = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned made = 0;
  for (int i = 0; i < 4; ++i) {
    made |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return made;
}
inline float __saturatef(float x) { return std::fmin(std::fmax(x, 0.0f), 1.0f); }
inline int __ffs(int x) { return __builtin_ffs(x); }

// ---- threads together ----

inline std::size_t __cvta_generic_to_shared(const void* pointer) {
  return emulator::shared_address(pointer);
}
inline void __syncthreads() { emulator::Block::current->barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulator::Block::current->exchange<char>(mask, "__syncwarp", 0, [](auto, auto) {});
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int from) {
  struct In {
    T value;
    int from;
  };
  return emulator::Block::current->exchange<T>(
      mask, "__shfl_sync", In{value, from & 31}, [mask](const In* const* in, T* const* out) {
        for (int lane = 0; lane < emulator::kWarp; ++lane) {
          if (mask >> lane & 1) *out[lane] = in[in[lane]->from]->value;
        }
      });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int other) {
  return __shfl_sync(mask, value, emulator::Block::current->lane() ^ other);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int by) {
  const int from = emulator::Block::current->lane() + by;
  return __shfl_sync(mask, value, from < emulator::kWarp ? from : from - by);
}

// ---- the runtime ----

enum cudaError_t { cudaSuccess, cudaErrorInvalidClusterSize };
using cudaStream_t = cnn_engine::Stream;
enum cudaMemcpyKind { cudaMemcpyHostToDevice };
struct cudaFuncAttributes {
  int ptxVersion;
};
enum {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
  cudaSharedmemCarveoutMaxShared,
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
};
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
    uint3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return ""; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->ptxVersion = __CUDA_ARCH__ / 10;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t*) {
  *clusters = 0;
  return cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  emulator::run({config->gridDim, config->blockDim, config->dynamicSmemBytes}, kernel,
                std::forward<Arguments>(arguments)...);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

#include "ptx.h"
