// Blocked products on CUDA: y[m, q] = sum over t of a[t, m] * b[t, q], a tile of y a block.
//
// A block of (M / RowsEach) x (N / ColumnsEach) threads sums a tile of M x N. Parts of kBlockDepth
// products come to shared memory by asynchronous copies (16 bytes where the loader can), several
// parts ahead of the one that is multiplied: a[kBlockDepth][M + 8], b[kBlockDepth][N]. (The 8
// spread the rows of a packed panel over the banks.) A thread reads 4 neighbouring rows or columns
// as one vector. Where tiles are too few for a GPU, the depth is split among blocks, by the shape
// alone, and a second kernel adds the parts in order. Sums are long: see kPartOfSum. Loaders and
// writers say what a, b and y are:
//
//   a.load(to, first, end), b.load(to, first, end)  copy products [first, end) of the tile, zero
//   past
//                                                   end; parts come one after another
//   out.write(m, q, values)                         takes 4 sums of row m, columns q to q + 3
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "ops/panels.h"
#include "runtime/check.h"
#include "runtime/stream.h"

namespace cnn_engine::cuda {

constexpr int kBlockDepth = 8;
constexpr int kBlockStages = 4;

template <int M_, int N_, int RowsEach, int ColumnsEach>
struct BlockTile {
  static constexpr int M = M_, N = N_, rows = RowsEach, columns = ColumnsEach;
  static constexpr int across = N / columns;  // threads
  static constexpr int threads = M / rows * across;
  static constexpr int a_pitch = M + 8;
  static constexpr int stage = kBlockDepth * (a_pitch + N);  // floats
  static constexpr int shared_bytes = 4 * kBlockStages * stage;
  static_assert(rows % 4 == 0 && columns % 4 == 0 && threads % 32 == 0);
  static_assert(shared_bytes <= 48 * 1024);
};

// Copies 4 or 16 bytes to shared memory, or zeros; before compute capability 8.0 at once.
template <int Bytes>
__device__ inline void copy_async(float* to, const float* from, bool valid) {
#if __CUDA_ARCH__ < 800
  using Piece = std::conditional_t<Bytes == 16, float4, float>;
  *reinterpret_cast<Piece*>(to) = valid ? *reinterpret_cast<const Piece*>(from) : Piece{};
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int size = valid ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(size));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from),
                 "r"(size));
  }
#endif
}
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
template <int Pending>
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending));
#endif
}

// Products [first, end).
template <typename Tile, typename A, typename B, typename Out>
__device__ __forceinline__ void blocked_gemm(float* shared, A& a, B& b, int first, int end,
                                             const Out& out) {
  constexpr int kRowVectors = Tile::rows / 4, kColumnVectors = Tile::columns / 4;
  const int row = threadIdx.x / Tile::across * 4, column = threadIdx.x % Tile::across * 4;
  float sum[Tile::rows][Tile::columns] = {};
  // What the sums were before this part: volatile, so in local memory; registers are all taken.
  volatile float before[Tile::rows][Tile::columns];
  const int parts = (end - first + kBlockDepth - 1) / kBlockDepth;

  const auto load = [&](int part) {
    if (part < parts) {
      float* to = shared + part % kBlockStages * Tile::stage;
      const int from = first + part * kBlockDepth;
      a.load(to, from, end);
      b.load(to + kBlockDepth * Tile::a_pitch, from, end);
    }
    commit_copies();
  };
#pragma unroll
  for (int part = 0; part < kBlockStages - 1; ++part) load(part);
  for (int begin = 0, until; begin < parts; begin = until) {
    until = min(begin + kPartOfSum / kBlockDepth, parts);
    for (int part = begin; part < until; ++part) {
      wait_for_copies<kBlockStages - 2>();
      __syncthreads();  // this part is there, and the one before it has been read
      load(part + kBlockStages - 1);
      const float* x = shared + part % kBlockStages * Tile::stage;
      const float* y = x + kBlockDepth * Tile::a_pitch;
#pragma unroll
      for (int t = 0; t < kBlockDepth; ++t) {
        float4 rows[kRowVectors], columns[kColumnVectors];
#pragma unroll
        for (int v = 0; v < kRowVectors; ++v) {
          rows[v] = *reinterpret_cast<const float4*>(x + t * Tile::a_pitch +
                                                     v * (Tile::M / kRowVectors) + row);
        }
#pragma unroll
        for (int v = 0; v < kColumnVectors; ++v) {
          columns[v] = *reinterpret_cast<const float4*>(y + t * Tile::N +
                                                        v * (Tile::N / kColumnVectors) + column);
        }
#pragma unroll
        for (int m = 0; m < Tile::rows; ++m) {
          const float4& four = rows[m / 4];
          const float value = m % 4 == 0   ? four.x
                              : m % 4 == 1 ? four.y
                              : m % 4 == 2 ? four.z
                                           : four.w;
#pragma unroll
          for (int v = 0; v < kColumnVectors; ++v) {
            sum[m][4 * v] = fmaf(value, columns[v].x, sum[m][4 * v]);
            sum[m][4 * v + 1] = fmaf(value, columns[v].y, sum[m][4 * v + 1]);
            sum[m][4 * v + 2] = fmaf(value, columns[v].z, sum[m][4 * v + 2]);
            sum[m][4 * v + 3] = fmaf(value, columns[v].w, sum[m][4 * v + 3]);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < Tile::rows; ++m) {
#pragma unroll
      for (int q = 0; q < Tile::columns; ++q) {
        if (begin > 0) sum[m][q] += before[m][q];
        if (until < parts) before[m][q] = sum[m][q], sum[m][q] = 0.0f;
      }
    }
  }
  wait_for_copies<0>();
#pragma unroll
  for (int m = 0; m < Tile::rows; ++m) {
    const int at_row = m / 4 * (Tile::M / kRowVectors) + row + m % 4;
#pragma unroll
    for (int v = 0; v < kColumnVectors; ++v) {
      out.write(
          at_row, v * (Tile::N / kColumnVectors) + column,
          make_float4(sum[m][4 * v], sum[m][4 * v + 1], sum[m][4 * v + 2], sum[m][4 * v + 3]));
    }
  }
}

// What is added to a sum and what bounds it.
struct Epilogue {
  const float* bias;      // or null
  const float* residual;  // as y, or null
  float lowest, highest;

  // Of the sum for y[at], in row (or column) k of the bias.
  __device__ float operator()(float value, int k, std::int64_t at) const {
    if (bias) value += bias[k];
    if (residual) value += residual[at];
    value = value < lowest ? lowest : value;  // a NaN stays
    return value > highest ? highest : value;
  }
};

// A tile of packed rows (ops/panels.h): each thread copies 4 rows of a product, in some panels.
template <typename Tile>
class PackedRows {
 public:
  static constexpr int kRows = Tile::M < 8 ? 4 : 8;  // of a panel

  // `packed` begins with the tile's first panel; `panels` are there from that one on.
  __device__ PackedRows(const float* packed, int panels, int depth)
      : t_(threadIdx.x % kPanel / kVectors), panels_(panels - threadIdx.x / kPanel) {
    const int panel = threadIdx.x / kPanel, row = threadIdx.x % kVectors * 4;
    from_ = packed + (static_cast<std::int64_t>(panel) * depth + t_) * kRows + row;
    step_ = static_cast<std::int64_t>(Tile::threads / kPanel) * depth * kRows;
    to_ = t_ * Tile::a_pitch + panel * kRows + row;
    packed_ = packed;
  }

  __device__ void load(float* to, int first, int end) const {
    if (kCopies == 1 && Tile::threads > kAll && threadIdx.x >= kAll) return;
    const float* from = from_ + static_cast<std::int64_t>(first) * kRows;
    const bool there = first + t_ < end;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool valid = there && i * (Tile::threads / kPanel) < panels_;
      copy_async<16>(to + to_ + i * (Tile::threads / kPanel) * kRows,
                     valid ? from + i * step_ : packed_, valid);
    }
  }

 private:
  static constexpr int kVectors = kRows / 4, kPanel = kVectors * kBlockDepth;
  static constexpr int kAll = Tile::M * kBlockDepth / 4;  // vectors of a part
  static constexpr int kCopies = kAll > Tile::threads ? kAll / Tile::threads : 1;
  static_assert(Tile::threads % kPanel == 0 && (kAll % Tile::threads == 0 || kCopies == 1));
  const float* packed_;
  const float* from_;
  std::int64_t step_;
  int t_, panels_, to_;
};

// Adds the splits' sums in order; one thread makes one output.
static __global__ void blocked_sum_kernel(const float* __restrict__ parts,  // [splits, size]
                                          float* __restrict__ output,  // [size] = [., biases, area]
                                          const Epilogue epilogue, int splits, std::int64_t size,
                                          unsigned area, unsigned biases) {
  const std::int64_t at = grid_thread();
  if (at >= size) return;
  float sum = parts[at];
  for (int split = 1; split < splits; ++split) sum += parts[split * size + at];
  const int k = static_cast<unsigned>(at) / area % biases;
  output[at] = epilogue(sum, k, at);
}

inline void launch_blocked_sum(const float* parts, float* output, const Epilogue& epilogue,
                               int splits, std::int64_t size, unsigned area, unsigned biases,
                               Stream stream) {
  blocked_sum_kernel<<<blocks_for(size), kBlockThreads, 0, stream>>>(parts, output, epilogue,
                                                                     splits, size, area, biases);
  CUDA_CHECK_LAUNCH("blocked_sum_kernel");
}

inline bool at_16_bytes(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
}

// Into how many parts a depth is split so that each multiprocessor has two blocks, none of them
// short.
inline int depth_splits(std::int64_t tiles, int depth, const Target& target) {
  constexpr int kShortest = 16 * kBlockDepth, kMost = 32;
  std::int64_t splits = 2 * std::int64_t{target.multiprocessors} / (tiles > 0 ? tiles : 1);
  if (splits > depth / kShortest) splits = depth / kShortest;
  if (splits > kMost) splits = kMost;
  return splits < 1 ? 1 : static_cast<int>(splits);
}

// The first product of a split: whole parts of kBlockDepth.
__host__ __device__ inline int split_begin(int depth, int splits, int split) {
  const int parts = (depth + kBlockDepth - 1) / kBlockDepth;
  const int begin =
      static_cast<int>(static_cast<std::int64_t>(parts) * split / splits) * kBlockDepth;
  return begin < depth ? begin : depth;
}

}  // namespace cnn_engine::cuda
