// How a thread finds its position among strided operands, for programs too that are compiled at
// first use.
#pragma once

#include <cstdint>

namespace cnn_engine::cuda {

constexpr int kWalkDims = 8;

// Division of 31-bit numbers by one that is known before the launch: a multiplication (Granlund and
// Montgomery, Division by invariant integers using multiplication, 1994).
struct Divisor {
  unsigned value, factor, shift;

  Divisor() = default;
  // divisor: from 1 to 2^31 - 1.
  explicit Divisor(std::int64_t divisor) : value(static_cast<unsigned>(divisor)), shift(0) {
    while (shift < 31 && (1u << shift) < value) ++shift;
    const std::uint64_t above = (std::uint64_t{1} << shift) - value;
    factor = static_cast<unsigned>((above << 32) / value + 1);
  }

  __device__ unsigned quotient(unsigned n) const { return (__umulhi(n, factor) + n) >> shift; }
};

// Whether indices below `size` can be divided by Divisor.
inline bool is_narrow(std::int64_t size) { return size <= 0x7fffffff; }

// A walk of strided operands (ops/strided.h) with its divisors. Index is unsigned (sizes below
// 2^31, divided by multiplication) or std::uint64_t (divided by the compiler's subroutine).
template <int operands>
struct Walk {
  int rank;
  std::int64_t size;
  std::int64_t dims[kWalkDims];
  std::int64_t strides[operands][kWalkDims];
  Divisor divisors[kWalkDims];

  template <typename From>
  explicit Walk(const From& from) : rank(from.rank), size(from.size) {
    for (int d = 0; d < kWalkDims; ++d) {
      const std::int64_t dim = d < rank ? from.dims[d] : 1;
      dims[d] = dim;
      divisors[d] = Divisor(is_narrow(dim) ? dim : 1);
      for (int k = 0; k < operands; ++k) strides[k][d] = d < rank ? from.strides[k][d] : 0;
    }
  }

  // The offsets, in elements, of element `index` of the walk.
  template <typename Index>
  __device__ void position(Index index, std::int64_t (&offsets)[operands]) const {
#pragma unroll
    for (int k = 0; k < operands; ++k) offsets[k] = 0;
#pragma unroll
    for (int d = kWalkDims - 1; d >= 0; --d) {
      if (d >= rank) continue;
      Index above;
      if constexpr (sizeof(Index) == 4) {
        above = d == 0 ? 0 : divisors[d].quotient(index);
      } else {
        above = d == 0 ? 0 : index / static_cast<Index>(dims[d]);
      }
      const std::int64_t position = index - above * static_cast<Index>(dims[d]);
      index = above;
#pragma unroll
      for (int k = 0; k < operands; ++k) offsets[k] += position * strides[k][d];
    }
  }
};

}  // namespace cnn_engine::cuda
