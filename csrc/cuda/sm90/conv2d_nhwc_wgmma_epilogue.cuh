// How convolutions that wgmma multiplies end: sums to shared memory, functions, pieces of rows.
#pragma once

#include <limits>
#include <stdexcept>

#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/rounded.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda::wgmma {

// What warps hold of eight positions (wgmma.cuh), as [positions][Pitch] with the rows of D side by
// side.
template <int Pitch>
__device__ inline int accumulator_index(unsigned thread) {
  return thread % 4 * 2 * Pitch + thread / 32 * 16 + thread % 32 / 4;
}
template <int Pitch>
__device__ inline void store_accumulators(float* to, const float (&accumulators)[4]) {
  to[0] = accumulators[0];
  to[Pitch] = accumulators[1];
  to[8] = accumulators[2];
  to[Pitch + 8] = accumulators[3];
}

// What the `Split` blocks of a cluster, those from `first` on, hold of a tile is added up. Every
// Split-th eight of the positions is one block's, or `Together` that follow each other: block b
// sends it what its threads hold, [(b ^ owner) - 1][eight][thread][4], and it adds that in this
// order to its own.
template <int Split, int Columns, int Threads, int Together>
struct ClusterAccumulators {
  static constexpr int kEights = Columns / 8, kAtOnce = Split * Together;
  static constexpr int kOwn = (kEights + kAtOnce - 1) / kAtOnce * Together;
  static constexpr int kEightBytes = Threads * 16, kBlockBytes = kOwn * kEightBytes;

  static __device__ constexpr int owner(int eight) { return eight / Together % Split; }
  static __device__ constexpr int own_eight(int eight) {
    return eight / kAtOnce * Together + eight % Together;
  }
  static __device__ bool is_own(int own_eight, int rank) {
    return (own_eight / Together * Split + rank) * Together + own_eight % Together < kEights;
  }

  // `received` is where a thread's numbers come to.
  static __device__ void send(const float (&accumulators)[Columns / 2], int rank,
                              std::uint32_t received, std::uint32_t all_received, int first) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      if (owner(j) == rank) continue;
      const std::uint32_t slot = received + ((rank ^ owner(j)) - 1) * kBlockBytes;
      store_cluster_async(cluster_address(slot + own_eight(j) * kEightBytes, first + owner(j)),
                          cluster_address(all_received, first + owner(j)), accumulators[4 * j],
                          accumulators[4 * j + 1], accumulators[4 * j + 2],
                          accumulators[4 * j + 3]);
    }
  }
};

// Adds up what a cluster's blocks hold and calls keep(eight, sums). A block's own sums lie in `own`
// meanwhile. What else is needed is waited for by ready(), when all is sent.
template <int Split, int Columns, int Threads, typename Ready, typename Keep>
__device__ inline void add_up_in_cluster(float4* own, const float (&accumulators)[Columns / 2],
                                         int rank, std::uint32_t received,
                                         std::uint32_t all_received, unsigned thread,
                                         const Ready& ready, const Keep& keep) {
  using Accumulators = ClusterAccumulators<Split, Columns, Threads, 1>;
  received += thread * 16;
  Accumulators::send(accumulators, rank, received, all_received, 0);
  named_barrier<Threads>(1);  // no one multiplies what lies in the ring
#pragma unroll
  for (int j = 0; j < Accumulators::kEights; ++j) {
    if (Accumulators::owner(j) != rank) continue;
    own[Accumulators::own_eight(j) * Threads + thread] = {
        accumulators[4 * j], accumulators[4 * j + 1], accumulators[4 * j + 2],
        accumulators[4 * j + 3]};
  }
  ready();
  if (rank >= Accumulators::kEights) return;
  wait_mbarrier_cluster(all_received, 0);
#pragma unroll 1
  for (int eight = 0; eight * Split + rank < Accumulators::kEights; ++eight) {
    float4 sum = own[eight * Threads + thread];
#pragma unroll
    for (int block = 0; block < Split - 1; ++block) {
      const float4 more = load_float4(received + block * Accumulators::kBlockBytes +
                                      eight * Accumulators::kEightBytes);
      sum.x += more.x;
      sum.y += more.y;
      sum.z += more.z;
      sum.w += more.w;
    }
    keep(eight, {sum.x, sum.y, sum.z, sum.w});
  }
}

// The same of kernels that have registers for it: one eight after another would wait for its loads
// each time, and here all are on their way at once.
template <int Split, int Columns, int Threads, int Together = 1, typename Ready, typename Keep>
__device__ inline void add_up_at_once(const float (&accumulators)[Columns / 2], int rank,
                                      std::uint32_t received, std::uint32_t all_received,
                                      unsigned thread, const Ready& ready, const Keep& keep,
                                      int first = 0) {
  using Accumulators = ClusterAccumulators<Split, Columns, Threads, Together>;
  received += thread * 16;
  Accumulators::send(accumulators, rank, received, all_received, first);
  float own[Accumulators::kOwn][4] = {};
#pragma unroll
  for (int j = 0; j < Accumulators::kEights; ++j) {
    float (&of)[4] = own[Accumulators::own_eight(j)];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      of[i] = Accumulators::owner(j) == rank ? accumulators[4 * j + i] : of[i];
  }
  named_barrier<Threads>(1);  // no one multiplies what lies in the ring
  ready();
  if (rank * Together >= Accumulators::kEights) return;
  wait_mbarrier_cluster(all_received, 0);
#pragma unroll
  for (int block = 0; block < Split - 1; ++block) {
#pragma unroll
    for (int eight = 0; eight < Accumulators::kOwn; ++eight) {
      if (!Accumulators::is_own(eight, rank)) continue;
      const float4 more = load_float4(received + block * Accumulators::kBlockBytes +
                                      eight * Accumulators::kEightBytes);
      own[eight][0] += more.x;
      own[eight][1] += more.y;
      own[eight][2] += more.z;
      own[eight][3] += more.w;
    }
  }
#pragma unroll
  for (int eight = 0; eight < Accumulators::kOwn; ++eight) {
    if (Accumulators::is_own(eight, rank)) keep(eight, own[eight]);
  }
}

// Where a lane's row of a pair of 8x8 tiles begins for load_two_tiles and store_two_tiles: eight
// positions of 16 filters.
__device__ inline int row_of_tiles(int lane) { return lane % 8; }
__device__ inline int piece_of_tiles(int lane) { return lane / 8 % 2; }

__device__ inline void load_two_tiles(std::uint32_t (&a)[2], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(a[0]), "=r"(a[1])
               : "r"(address)
               : "memory");
}

__device__ inline void store_two_tiles(std::uint32_t address, std::uint32_t a, std::uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address),
               "r"(a), "r"(b)
               : "memory");
}

// Four 8x8 tiles, as load_tiles has them: of rows 0 to 7 and 8 to 15 of eight columns, then of the
// next eight.
__device__ inline void store_four_tiles(std::uint32_t address, const std::uint32_t (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
               : "memory");
}

// Functions of what warps hold.
struct Clamp {
  float low, high;
  __device__ void operator()(float (&value)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = clamp(value[i], low, high);
  }
};
// What a function is that limits values alone; else throws what was expected.
inline Clamp clamp_of(const Activation& activation, const char* expected) {
  if (activation.function == UnaryFunction::relu) {
    return {0.0f, std::numeric_limits<float>::infinity()};
  }
  if (activation.function == UnaryFunction::clip) return {activation.alpha, activation.beta};
  throw std::invalid_argument(expected);
}
template <UnaryFunction kFunction>
struct Rounded {
  float alpha;
  __device__ void operator()(float (&value)[4]) const {
    apply<__half>(Activation{kFunction, alpha, 0.0f}, value);
  }
};

// Finishes eight positions of 16 filters, as a warp holds them (wgmma.cuh), and stores them
// rounded: a lane gives the address of a row of the result. Returns whether one of the first `left`
// positions is past the range of T.
template <typename T, typename Function>
__device__ inline bool epilogue_in_fragments(const Function& function,
                                             const float (&accumulators)[4], const float (&bias)[2],
                                             const std::uint32_t (&residual)[2], int left,
                                             std::uint32_t to) {
  float value[4];
  load_neighbours(reinterpret_cast<const T*>(residual), value);
#pragma unroll
  for (int i = 0; i < 4; ++i) value[i] = accumulators[i] + (bias[i / 2] + value[i]);
  function(value);
  alignas(8) T made[4];
  bool past = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    made[i] = narrowed<T>(value[i]);
    if constexpr (std::is_same_v<T, __half>) {
      past |= static_cast<int>(threadIdx.x % 4 * 2 + i % 2) < left && is_past_float16(value[i]);
    }
  }
  store_two_tiles(to, reinterpret_cast<const std::uint32_t*>(made)[0],
                  reinterpret_cast<const std::uint32_t*>(made)[1]);
  return past;
}

// Two values, rounded, as they lie beside each other.
template <typename T>
__device__ inline std::uint32_t rounded_pair(float a, float b) {
  std::uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(a, b);
    memcpy(&bits, &pair, sizeof(bits));
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    memcpy(&bits, &pair, sizeof(bits));
  }
  return bits;
}

// Looks for infinities among pairs of float16: results past its range, or what was none before.
class Infinities {
 public:
  __device__ void look(std::uint32_t bits) {
    __half2 pair;
    memcpy(&pair, &bits, sizeof(pair));
    most_ = __hmax2(most_, __habs2(pair));
  }
  __device__ bool found() const { return __hisinf(__hmax(__low2half(most_), __high2half(most_))); }

 private:
  __half2 most_ = __float2half2_rn(0.0f);
};

// Likewise n times eight positions, which have a residual where they are stored, or none. `left`
// are those from the first on.
template <typename T, bool Residual, int n, typename Function>
__device__ inline bool epilogue_eights(const Function& function, const float* accumulators,
                                       const float (&bias)[2], int left, std::uint32_t at) {
  constexpr int kEightBytes = 8 * kRowBytes;
  constexpr bool kLooks = std::is_same_v<T, __half>;
  float value[n][4];
  if constexpr (Residual) {
    std::uint32_t residual[n][2];
#pragma unroll
    for (int j = 0; j < n; ++j) load_two_tiles(residual[j], at + j * kEightBytes);
#pragma unroll
    for (int j = 0; j < n; ++j) load_neighbours(reinterpret_cast<const T*>(residual[j]), value[j]);
  }
  Infinities infinities;
#pragma unroll
  for (int j = 0; j < n; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float more = Residual ? bias[i / 2] + value[j][i] : bias[i / 2];
      value[j][i] = accumulators[4 * j + i] + more;
    }
    function(value[j]);
    std::uint32_t made[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      made[i] = rounded_pair<T>(value[j][2 * i], value[j][2 * i + 1]);
      if (kLooks) infinities.look(made[i]);
    }
    store_two_tiles(at + j * kEightBytes, made[0], made[1]);
  }
  bool past = false;
  if (kLooks && infinities.found()) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        past |= static_cast<int>(threadIdx.x % 4 * 2 + i % 2) < left - 8 * j &&
                is_past_float16(value[j][i]);
      }
    }
  }
  return past;
}

// Where what is multiplied is rounded, errors of what is kept as float32 are likewise.
template <typename T = __half, typename P, int n>
__device__ inline void activate(const P& p, float (&value)[n]) {
  apply<std::conditional_t<std::is_same_v<T, float>, float, __half>>(
      Activation{p.activation, p.alpha, p.beta}, value);
}

// The first `left` of neighbours; all of them at once where they are `whole`.
template <typename From, int n>
__device__ inline void load_piece(const From* from, float (&to)[n], bool whole, int left) {
  if (whole) return load_neighbours<n>(from, to);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (i < left) to[i] = widened(from[i]);
  }
}

template <typename To, int n>
__device__ inline void store_piece(To* to, const float (&from)[n], bool whole, int left,
                                   const Overflow& overflow) {
  if (whole) return store_neighbours<n>(to, from, overflow);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float one[1] = {from[i]};
    if (i < left) store_neighbours<1>(to + i, one, overflow);
  }
}

// The end in rows, of a tile's filters, `Groups` times 64, and up to `Columns` positions: a thread
// has neighbouring filters of every kApart-th position.
template <typename T, int Threads, int Groups, int Columns>
class RowsEpilogue {
 public:
  __device__ RowsEpilogue(const Gemm& p, int first_filter, int thread)
      : thread_(thread),
        filter_(first_filter + thread % kPieces * kWidth),
        left_(p.filters - filter_),
        whole_(p.in_pieces && left_ >= kWidth) {
    const bool adds = p.bias && !(kRounds && p.in_fragments);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) bias_[i] = adds && i < left_ ? p.bias[filter_ + i] : 0.0f;
  }

  // Rounded results, which lie in rows of `pitch` bytes from `made` on.
  template <typename PositionOf>
  __device__ void copy(const Gemm& p, std::uint32_t made, int pitch, int rows,
                       const PositionOf& position_of) const {
    if (left_ <= 0) return;
#pragma unroll 2
    for (int row = thread_ / kPieces; row < rows; row += kApart) {
      const std::int64_t position = position_of(row);
      if (position >= p.rows) break;
      *reinterpret_cast<float4*>(static_cast<T*>(p.y) + position * p.y_pitch + filter_) =
          load_float4(made + row * pitch + thread_ % kPieces * 16);
    }
  }

  // What sums become, which lie in the shared memory of the block, [rows][Pitch].
  template <int Pitch, typename PositionOf>
  __device__ void write(const Gemm& p, const char* memory, int rows,
                        const PositionOf& position_of) const {
    if (left_ <= 0) return;
    // Of float32, which is not copied to shared memory before, several rows' residuals at once.
    constexpr int kAll = (Columns + kApart - 1) / kApart;
    constexpr int kAtOnce = kRounds ? 1 : kAll < 4 ? kAll : 4;
#pragma unroll 1
    for (int first = thread_ / kPieces; first < rows; first += kAtOnce * kApart) {
      float added[kAtOnce][kWidth] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * kApart;
        const std::int64_t position = position_of(row);
        if (row >= rows || position >= p.rows) break;
        if (kRounds && p.residual_rows > 0) {
          const char* const from =
              memory + p.at.residual + (thread_ % kPieces / 8 * p.residual_rows + row) * kRowBytes;
          load_neighbours(reinterpret_cast<const T*>(from + swizzled(row, thread_ % 8) * 16),
                          added[i]);
        } else if (p.residual) {
          const std::int64_t from = position * p.residual_pitch + filter_;
          if (kRounds && p.residual_is_rounded) {
            load_piece(static_cast<const T*>(p.residual) + from, added[i], whole_, left_);
          } else {
            load_piece(static_cast<const float*>(p.residual) + from, added[i], whole_, left_);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * kApart;
        const std::int64_t position = position_of(row);
        if (row >= rows || position >= p.rows) return;
        float value[kWidth];
        load_neighbours(reinterpret_cast<const float*>(memory + p.at.made) + row * Pitch +
                            thread_ % kPieces * kWidth,
                        value);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) value[j] += bias_[j] + added[i][j];
        activate<T>(p, value);
        const std::int64_t to = position * p.y_pitch + filter_;
        if (kRounds && p.y_is_rounded) {
          store_piece(static_cast<T*>(p.y) + to, value, whole_, left_, p.overflow);
        } else {
          store_piece(static_cast<float*>(p.y) + to, value, whole_, left_, p.overflow);
        }
      }
    }
  }

 private:
  static constexpr bool kRounds = sizeof(T) == 2;  // results that are stored as what is multiplied
  static constexpr int kWidth = 16 / sizeof(T), kPieces = Groups * kFilters / kWidth,
                       kApart = Threads / kPieces;

  const int thread_, filter_, left_;  // filters from the thread's first one on
  const bool whole_;
  float bias_[kWidth];
};

}  // namespace cnn_engine::cuda::wgmma
