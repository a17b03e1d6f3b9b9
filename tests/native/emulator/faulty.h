// A product of 16 x 32 and 32 x 8 bytes by two warps, with a fault that the emulator must find.
#pragma once

#include <cstdint>

#include "cuda_runtime.h"

namespace cnn_engine {

enum class Fault {
  none,
  no_barrier,  // x is read before all of it is there
  no_wait,     // or while it is copied
  divergent_barrier,
  divergent_product,  // one lane takes no part in it
  swapped_fragment,   // the rows and the columns of a fragment of x are taken for each other
  misaligned_copy,
};

inline void product_kernel(const std::int8_t* x,  // [16, 32]
                           const std::int8_t* w,  // [8, 32]
                           int* y,                // [2, 16, 8]: each warp makes all
                           Fault fault) {
  constexpr int kBytes = 16 * 32;
  char* const memory = emulator::shared_memory;
  const int thread = threadIdx.x, lane = thread % 32;
  const int at = thread * 8;  // that it copies
  const int shifted = fault == Fault::misaligned_copy ? 4 : 0;
  if (at < kBytes) {
    emulator::ptx::cp_async_ca_shared_global(emulator::shared_address(memory + at + shifted),
                                             x + at, 8);
  }
  emulator::ptx::cp_async_commit_group();
  if (fault != Fault::no_wait) emulator::ptx::cp_async_wait_group(0);
  if (fault != Fault::no_barrier && !(fault == Fault::divergent_barrier && thread == 5)) {
    __syncthreads();
  }
  const int group = lane / 4, t = lane % 4;
  const auto word = [](const void* from) {
    std::uint32_t found;
    std::memcpy(&found, from, 4);
    return found;
  };
  std::uint32_t a[4], b[2];
  for (int r = 0; r < 4; ++r) {
    const int low = fault == Fault::swapped_fragment ? r / 2 : r % 2, high = r / 2 + r % 2 - low;
    a[r] = word(memory + (group + 8 * low) * 32 + 4 * t + 16 * high);
  }
  for (int r = 0; r < 2; ++r) b[r] = word(w + group * 32 + 4 * t + 16 * r);
  int d[4] = {};
  if (!(fault == Fault::divergent_product && lane == 7)) {
    emulator::ptx::mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(d[0], d[1], d[2], d[3], a[0],
                                                                   a[1], a[2], a[3], b[0], b[1]);
  }
  for (int i = 0; i < 4; ++i) {
    y[(thread / 32 * 16 + group + 8 * (i / 2)) * 8 + 2 * t + i % 2] = d[i];
  }
}

inline void faulty_product(std::uintptr_t x, std::uintptr_t w, std::uintptr_t y, int fault) {
  emulator::run({dim3(1), dim3(64), 16 * 32}, product_kernel,
                reinterpret_cast<const std::int8_t*>(x), reinterpret_cast<const std::int8_t*>(w),
                reinterpret_cast<int*>(y), static_cast<Fault>(fault));
}

}  // namespace cnn_engine
