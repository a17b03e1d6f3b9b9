// In the place of csrc/cuda/sm90/wgmma_int8.cuh, whose instructions are named in macros: what PTX's
// "Asynchronous Warpgroup Level Matrix" says of shared memory and of D's fragments.
#pragma once

#include "cuda/sm90/ring.cuh"
#include "cuda/sm90/tma.cuh"

namespace cnn_engine::cuda {

constexpr int kMatrixRows = 64;

template <int RowBytes>
std::uint64_t byte_matrix_descriptor(std::uint32_t address) {
  const std::uint64_t swizzle = RowBytes == 128 ? 1 : 2;
  return swizzle << 62 | std::uint64_t{8 * RowBytes >> 4} << 32 | (address & 0x3ffff) >> 4;
}

inline void wgmma_commit() {}
// Returns once the warpgroup's threads have multiplied.
template <int>
void wgmma_wait() {
  const int group = static_cast<int>(threadIdx.x) / 128;
  emulator::Block::current->barrier(100 + group, 128);
}

// Byte k of row `row` of a matrix that begins at a descriptor's address.
inline std::int8_t byte_of(std::uint64_t descriptor, int row, int k) {
  const auto swizzle = static_cast<int>(descriptor >> 62);
  const auto eight_rows = static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  const std::uint32_t row_bytes = swizzle == 1 ? 128 : 64, at = row;
  const std::uint32_t address = ((descriptor & 0x3fff) << 4) + at / 8 * eight_rows +
                                at % 8 * row_bytes + static_cast<std::uint32_t>(k);
  return *emulator::shared_pointer(emulator::swizzled(address, static_cast<int>(row_bytes)));
}

template <bool Signed, int RowBytes, int N>
void multiply_byte_rows(int (&d)[N / 2], std::uint64_t a, std::uint64_t b) {
  const int thread = static_cast<int>(threadIdx.x), g = thread % 32 / 4, t = thread % 4;
  const int first = thread % 128 / 32 * 16 + g;
  for (int k32 = 0; k32 < RowBytes; k32 += 32) {
    const std::uint64_t more = k32 >> 4;
    for (int k = 0; k < 32; ++k) {
      for (int half = 0; half < 2; ++half) {
        const std::int8_t bits = byte_of(a + more, first + 8 * half, k);
        const int x = Signed ? bits : static_cast<std::uint8_t>(bits);
        if (x == 0) continue;
        for (int n = 0; n < N / 4; ++n) {
          const int column = n / 2 * 8 + 2 * t + n % 2;
          auto& sum = d[n / 2 * 4 + 2 * half + n % 2];
          sum = static_cast<int>(static_cast<unsigned>(sum) +
                                 static_cast<unsigned>(x * byte_of(b + more, column, k)));
        }
      }
    }
  }
}

}  // namespace cnn_engine::cuda
