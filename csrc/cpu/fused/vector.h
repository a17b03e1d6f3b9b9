// SIMD through the compiler's vector extensions: one source for AVX-512, AVX2, SSE2 and NEON.
// Included only by files that are compiled once for each instruction set.
#pragma once

#include "cpu/fused/steps.h"

#if defined(__AVX512F__)
#define CNN_ENGINE_VECTOR_REGISTERS 32
#define CNN_ENGINE_WIDE 16
#define CNN_ENGINE_NARROW 8
#elif defined(__AVX2__)
#define CNN_ENGINE_VECTOR_REGISTERS 16
#define CNN_ENGINE_WIDE 8
#define CNN_ENGINE_NARROW 8
#else
#if defined(__aarch64__)
#define CNN_ENGINE_VECTOR_REGISTERS 32
#else
#define CNN_ENGINE_VECTOR_REGISTERS 16
#endif
#define CNN_ENGINE_WIDE 4
#define CNN_ENGINE_NARROW 4
#endif

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
using namespace fused;
namespace {

constexpr int kRegisters = CNN_ENGINE_VECTOR_REGISTERS;
constexpr int kWide = CNN_ENGINE_WIDE;
constexpr int kNarrow = CNN_ENGINE_NARROW;

// The rounding error of a sum of products, as a multiple of that of fused multiply-adds: without
// them each product is rounded too. Measured on photographs: up to 1.64.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr double kProductRounding = 1.0;
#else
constexpr double kProductRounding = 2.0;
#endif

template <int W>
struct VectorOf {
  typedef float Float __attribute__((vector_size(W * 4)));
  typedef std::int32_t Int __attribute__((vector_size(W * 4)));
};
template <int W>
using Vec = typename VectorOf<W>::Float;
template <int W>
using IntVec = typename VectorOf<W>::Int;

template <int W>
CNN_ENGINE_INLINE Vec<W> load(const float* from) {
  Vec<W> value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <int W>
CNN_ENGINE_INLINE void store(float* to, Vec<W> value) {
  __builtin_memcpy(to, &value, sizeof value);
}

template <int W>
CNN_ENGINE_INLINE Vec<W> splat(float value) {
  return value - Vec<W>{};
}

// Keeps a value in its register: the compiler would read it from memory at every use, which counts
// where what a loop reads bounds it.
template <typename V>
CNN_ENGINE_INLINE void keep(V& value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#else
  static_cast<void>(value);
#endif
}

template <typename V>
CNN_ENGINE_INLINE V maximum(V a, V b) {
  return a > b ? a : b;
}

}  // namespace
}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
