// PTX instructions that csrc/cuda has in line, each a function of its operands, named after it. The
// layouts are those of the PTX ISA, "Warp-level Matrix Instructions": "Matrix Fragments for
// mma.m16n8k16 with floating point type", "... for mma.m16n8k8", "... for mma.m8n8k16", "... for
// mma.m16n8k32", and "ldmatrix".
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cmath>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emulator.h"

namespace emulator::ptx {

constexpr unsigned kAll = 0xffffffffu;

// ---- matrix products ----

// How many numbers a register has, and number i.
struct F16 {
  static constexpr int kCount = 2;
  static double of(std::uint32_t word, int i) {
    __half value;
    value.bits = static_cast<std::uint16_t>(word >> 16 * i);
    return __half2float(value);
  }
};
struct Bf16 {
  static constexpr int kCount = 2;
  static double of(std::uint32_t word, int i) {
    return __uint_as_float(i ? word & 0xffff0000u : word << 16);
  }
};
struct Tf32 {
  static constexpr int kCount = 1;
  static double of(std::uint32_t word, int) { return __uint_as_float(word & 0xffffe000u); }
};
template <typename T>
struct Byte {
  static constexpr int kCount = 4;
  static std::int64_t of(std::uint32_t word, int i) { return static_cast<T>(word >> 8 * i); }
};

// With g = lane / 4 and t = lane % 4, and n numbers in a register:
//   A  register r, number i: row g + 8 (r % 2), column n t + i + 4 n (r / 2); of 8 rows, r % 2 is 0
//   B  register r, number i: row n t + i + 4 n r, column g
//   D  number i: row g + 8 (i / 2), column 2 t + i % 2
template <typename AFormat, typename BFormat, typename Sum, int kA, int kB, int kD>
struct Product {
  struct In {
    std::uint32_t a[kA], b[kB];
    Sum d[kD];
  };
  struct Out {
    Sum d[kD];
  };

  static void make(const In* const* in, Out* const* out) {
    constexpr int n = AFormat::kCount, kRows = 4 * kD, kColumns = 8, kDepth = 4 * n * kB;
    static_assert(kA == kB * kRows / 8);
    using Number = decltype(AFormat::of(0, 0));
    Number a[kRows][kDepth], b[kDepth][kColumns];
    for (int lane = 0; lane < kWarp; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int r = 0; r < kA; ++r) {
        const int half = kRows == 16 ? r % 2 : 0, part = kRows == 16 ? r / 2 : r;
        for (int i = 0; i < n; ++i) {
          a[g + 8 * half][n * t + i + 4 * n * part] = AFormat::of(in[lane]->a[r], i);
        }
      }
      for (int r = 0; r < kB; ++r) {
        for (int i = 0; i < n; ++i) b[n * t + i + 4 * n * r][g] = BFormat::of(in[lane]->b[r], i);
      }
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < kD; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
        Number sum = in[lane]->d[i];
        for (int k = 0; k < kDepth; ++k) sum += a[row][k] * b[k][column];
        out[lane]->d[i] = static_cast<Sum>(sum);  // of integers modulo 2^32
      }
    }
  }

  static Out of(const char* what, const In& in) {
    return Block::current->exchange<Out>(kAll, what, in, make);
  }
};

#define CNN_ENGINE_MMA_16(name, AFormat, BFormat, Sum)                                       \
  inline void name(Sum& d0, Sum& d1, Sum& d2, Sum& d3, std::uint32_t a0, std::uint32_t a1,   \
                   std::uint32_t a2, std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) { \
    const auto [d] = Product<AFormat, BFormat, Sum, 4, 2, 4>::of(                            \
        #name, {{a0, a1, a2, a3}, {b0, b1}, {d0, d1, d2, d3}});                              \
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                              \
  }
CNN_ENGINE_MMA_16(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, F16, F16, float)
CNN_ENGINE_MMA_16(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, Bf16, Bf16, float)
CNN_ENGINE_MMA_16(mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32, Tf32, Tf32, float)
CNN_ENGINE_MMA_16(mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32, Byte<std::int8_t>,
                  Byte<std::int8_t>, int)
CNN_ENGINE_MMA_16(mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32, Byte<std::uint8_t>,
                  Byte<std::int8_t>, int)
#undef CNN_ENGINE_MMA_16

#define CNN_ENGINE_MMA_8(name, Format)                                                             \
  inline void name(float& d0, float& d1, float& d2, float& d3, std::uint32_t a0, std::uint32_t a1, \
                   std::uint32_t b0) {                                                             \
    const auto [d] =                                                                               \
        Product<Format, Format, float, 2, 1, 4>::of(#name, {{a0, a1}, {b0}, {d0, d1, d2, d3}});    \
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                                    \
  }
CNN_ENGINE_MMA_8(mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32, F16)
CNN_ENGINE_MMA_8(mma_sync_aligned_m16n8k8_row_col_f32_bf16_bf16_f32, Bf16)
#undef CNN_ENGINE_MMA_8

#define CNN_ENGINE_MMA_BYTES(name, T)                                                       \
  inline void name(int& d0, int& d1, std::uint32_t a, std::uint32_t b) {                    \
    const auto [d] =                                                                        \
        Product<Byte<T>, Byte<std::int8_t>, int, 1, 1, 2>::of(#name, {{a}, {b}, {d0, d1}}); \
    d0 = d[0], d1 = d[1];                                                                   \
  }
CNN_ENGINE_MMA_BYTES(mma_sync_aligned_m8n8k16_row_col_s32_s8_s8_s32, std::int8_t)
CNN_ENGINE_MMA_BYTES(mma_sync_aligned_m8n8k16_row_col_s32_u8_s8_s32, std::uint8_t)
#undef CNN_ENGINE_MMA_BYTES

// ---- shared memory ----

// Lane l has the address of row l % 8 of tile l / 8, and gets of row g of each tile the pair t.
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(std::uint32_t& a0, std::uint32_t& a1,
                                                     std::uint32_t& a2, std::uint32_t& a3,
                                                     std::uint32_t address) {
  struct Out {
    std::uint32_t tile[4];
  };
  if (address % 16 != 0) Block::current->fail("ldmatrix: expected an address of 16 bytes");
  const auto [tile] = Block::current->exchange<Out>(
      kAll, "ldmatrix", address, [](const std::uint32_t* const* in, Out* const* out) {
        for (int lane = 0; lane < kWarp; ++lane) {
          for (int i = 0; i < 4; ++i) {
            std::memcpy(&out[lane]->tile[i], shared_pointer(*in[8 * i + lane / 4]) + lane % 4 * 4,
                        4);
          }
        }
      });
  a0 = tile[0], a1 = tile[1], a2 = tile[2], a3 = tile[3];
}

inline void st_shared_u16(std::uint32_t address, unsigned short value) {
  std::memcpy(shared_pointer(address), &value, 2);
}
inline void cp_async_ca_shared_global(std::uint32_t to, const void* from, int bytes) {
  copy_async(to, from, bytes, bytes);
}
inline void cp_async_ca_shared_global(std::uint32_t to, const void* from, int bytes, int read) {
  copy_async(to, from, bytes, read);
}
inline void cp_async_cg_shared_global(std::uint32_t to, const void* from, int read = 16) {
  copy_async(to, from, 16, read);
}
inline void cp_async_commit_group() { commit_copies(); }
inline void cp_async_wait_group(int pending) { wait_for_copies(pending); }
inline void bar_sync(int id, int threads) { Block::current->barrier(id, threads); }

// ---- barriers in shared memory, and the copies that they wait for ----

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() {}
inline void prefetch_tensormap(const CUtensorMap*) {}
inline void elect_sync(std::uint32_t& leads) { leads = Block::current->lane() == 0; }

inline void mbarrier_init_shared_cta_b64(std::uint32_t barrier, int arrivals = 1) {
  Block::current->init_memory_barrier(barrier, arrivals);
}
inline void mbarrier_arrive_shared_cta_b64(std::uint32_t barrier) {
  Block::current->memory_barrier(barrier).arrive();
}
inline void mbarrier_arrive_expect_tx_shared_cta_b64(std::uint32_t barrier, std::uint32_t bytes) {
  MemoryBarrier& at = Block::current->memory_barrier(barrier);
  at.expect(bytes);
  at.arrive();
}
inline void mbarrier_try_wait_parity_shared_cta_b64(std::uint32_t barrier, int parity = 0) {
  MemoryBarrier& at = Block::current->memory_barrier(barrier);
  Block::current->until("mbarrier " + std::to_string(barrier), [&at, parity] {
    at.copy();
    return at.phase % 2 != parity;
  });
}

inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(std::uint32_t to,
                                                                           const void* from,
                                                                           std::uint32_t bytes,
                                                                           std::uint32_t barrier) {
  if (to % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) {
    Block::current->fail("cp.async.bulk: expected multiples of 16");
  }
  copy_for_barrier(to, static_cast<const char*>(from), static_cast<int>(bytes), barrier, 0);
}

// A row of a box, of which bytes past the last column are zeros, or all of it.
inline void copy_row(std::uint32_t to, const CUtensorMap& map, const char* row, int column,
                     std::uint32_t barrier) {
  if (to % 16 != 0) Block::current->fail("cp.async.bulk.tensor: expected a multiple of 16");
  const auto left = std::max<std::int64_t>(0, row ? map.dims[0] - column : 0);
  const int some = static_cast<int>(std::min<std::int64_t>(left, map.columns));
  if (some > 0) copy_for_barrier(to, row + column, some, barrier, map.swizzle);
  if (some < map.columns) {
    copy_for_barrier(to + some, nullptr, map.columns - some, barrier, map.swizzle);
  }
}

inline void cp_async_bulk_tensor_2d_shared_cluster_global_tile_mbarrier_complete_tx_bytes(
    std::uint32_t to, const CUtensorMap* map, int column, int row, std::uint32_t barrier) {
  for (int i = 0; i < map->rows; ++i, to += map->columns) {
    const bool inside = row + i < map->dims[1];
    copy_row(to, *map, inside ? map->data + (row + i) * map->strides[0] : nullptr, column, barrier);
  }
}

// Pixels one after another within the box of base pixels, that the corners bound, each moved by
// the offsets.
inline void cp_async_bulk_tensor_4d_shared_cluster_global_im2col_mbarrier_complete_tx_bytes(
    std::uint32_t to, const CUtensorMap* map, int c, int w, int h, int n, std::uint32_t barrier,
    unsigned short right, unsigned short down) {
  for (int i = 0; i < map->rows; ++i, to += map->columns) {
    const std::int64_t column = w + right, row = h + down;
    const bool inside =
        column >= 0 && column < map->dims[1] && row >= 0 && row < map->dims[2] && n < map->dims[3];
    copy_row(
        to, *map,
        inside ? map->data + column * map->strides[0] + row * map->strides[1] + n * map->strides[2]
               : nullptr,
        c, barrier);
    w += static_cast<int>(map->steps[1]);
    if (w < map->dims[1] + map->upper[0]) continue;
    w = map->lower[0];
    h += static_cast<int>(map->steps[2]);
    if (h < map->dims[2] + map->upper[1]) continue;
    h = map->lower[1];
    ++n;
  }
}

// ---- numbers ----

inline void ld_global_f32(float& to, const float* from) { to = *from; }
inline void cvt_rna_tf32_f32(std::uint32_t& to, float x) {  // half away from zero
  const std::uint32_t bits = __float_as_uint(x);
  to = std::isfinite(x) ? (bits + 0x1000u) & 0xffffe000u : bits;
}
inline void ex2_approx_ftz_f32(float& to, float x) { to = std::exp2(x); }
inline void rcp_approx_ftz_f32(float& to, float x) { to = 1.0f / x; }
inline void max_NaN_f32(float& to, float x, float y) {
  to = std::isnan(x) || std::isnan(y) ? NAN : std::fmax(x, y);
}
inline void min_NaN_f32(float& to, float x, float y) {
  to = std::isnan(x) || std::isnan(y) ? NAN : std::fmin(x, y);
}

}  // namespace emulator::ptx
