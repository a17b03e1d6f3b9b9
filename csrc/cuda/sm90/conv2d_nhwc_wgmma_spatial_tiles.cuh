// conv2d_nhwc_wgmma of 3x3 windows one position apart, where tiles are patches of the image, eight
// positions of each of many rows: of clamped results that are stored as what is multiplied (Gemm's
// in_rows), or of the greatest of each two rows' two positions.
//
// All nine kernel offsets of 128 bytes of channels read what is copied once, the positions that a
// patch's windows reach, [rows + 2][10]: a kernel offset's matrix has eight positions of each row,
// and the next row's lie ten positions further. Pieces of 16 bytes are swizzled by where they lie
// in shared memory, wherever a matrix begins (wgmma.cuh). So a step copies weights alone. Sums are
// made channels by channels, kernel offset by kernel offset.
//
// A block has 64 filters of one tile after another: copies for the next run ahead while one is
// multiplied and ended, and two blocks of a multiprocessor take turns at its tensor cores. Two
// rows' neighbours are in one thread's hands, which makes them one. Results are made where the last
// of what was multiplied lay. Blocks that go on to another tile have the copy engine take them from
// there; those of one tile store them by their threads, which takes half as long. Blocks of a
// cluster may have parts of the channels, of one tile each.
#pragma once

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/sm80/mma.cuh"
#include "cuda/sm80/storage.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_epilogue.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_persistent.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace cnn_engine::cuda {

namespace wgmma {

constexpr int kPatchWidth = 8, kPatchPitch = kPatchWidth + 2;  // positions; of what a patch reaches

// Where things lie in the shared memory of a block: what patches reach, weights, what others of a
// cluster send, barriers.
template <int Rows, bool Splits>
struct PatchTile {
  static constexpr int kReached = (Rows + 2) * kPatchPitch * kRowBytes;
  static constexpr int kImageBytes = (kReached + 1023) / 1024 * 1024;
  static constexpr int kWeightBytes = kFilters * kRowBytes;
  static constexpr int own_eights(int split) { return (Rows / 2 + split - 1) / split * 2; }
  static constexpr int received_bytes(int split) {
    return (split - 1) * own_eights(split) * 128 * 16;
  }
  static constexpr int kReceived =
      Splits ? std::max({received_bytes(2), received_bytes(4), received_bytes(8)}) : 0;
  static constexpr int kStages =
      std::min(9, (112 * 1024 - 2 * kImageBytes - kReceived) / kWeightBytes);
  static constexpr int kRing = 2 * kImageBytes, kFrom = kRing + kStages * kWeightBytes;
  static constexpr int kBarriers = kFrom + kReceived;
  static constexpr int kBytes = kBarriers + 16 * (kStages + 3);
  static constexpr int kAlone = 116 * 1024;  // with which a multiprocessor has one
  static_assert(2 * (kBytes + 1024) <= 228 * 1024);
};

// Neighbours of 16 bits.
template <typename T>
struct TwoOf;
template <>
struct TwoOf<__half> {
  using Type = __half2;
  static __device__ Type rounded(float a, float b) { return __floats2half2_rn(a, b); }
};
template <>
struct TwoOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ Type rounded(float a, float b) { return __floats2bfloat162_rn(a, b); }
};

// Finishes two rows of a tile as warps hold them (wgmma.cuh), which are rounded and then
// clamped: the bounds are rounded, too. They go to shared memory as [2 rows][8 positions][128 bytes
// of filters], or, pooled, as [4 positions][128 bytes], pieces of 16 bytes swizzled.
template <typename T>
class SpatialTileEpilogue {
 public:
  __device__ SpatialTileEpilogue(const Gemm& p, int first_filter, int warp, int lane)
      : p_(p),
        low_(Two::rounded(p.low, p.low)),
        high_(Two::rounded(p.high, p.high)),
        most_(Two::rounded(0.0f, 0.0f)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int filter = first_filter + lane / 4 + 8 * i;
      bias_[i] = p.bias && filter < p.filters ? p.bias[filter] : 0.0f;
    }
    // Lanes give addresses of 16 bytes: of both rows' positions, eight filters and the next eight;
    // of pooled positions, whose filters take turns.
    const int position = p.pools ? lane % 8 / 2 : lane % 8,
              half = p.pools ? lane % 2 : lane / 8 % 2;
    at_ = ((p.pools ? 0 : lane / 16 * kPatchWidth) + position) * kRowBytes +
          swizzled(position, warp * 2 + half) * 16;
  }

  // `to` is where eight positions begin, of which pooled ones are the first four or the `next`.
  __device__ void operator()(std::uint32_t to, const float (&upper)[4], const float (&lower)[4],
                             bool next = false) {
    to += next ? (at_ ^ 64) + 4 * kRowBytes : at_;
    typename Two::Type made[4];  // a row's eight filters, and the next eight; the other row's
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&sum)[4] = i < 2 ? upper : lower;
      const int j = i % 2;
      made[i] = Two::rounded(sum[2 * j] + bias_[j], sum[2 * j + 1] + bias_[j]);
    }
    if (p_.pools) {
      const typename Two::Type of_columns[2] = {__hmax2_nan(made[0], made[2]),
                                                __hmax2_nan(made[1], made[3])};
      const auto* const both = reinterpret_cast<const std::uint32_t*>(of_columns);
      const std::uint32_t halves[2] = {__byte_perm(both[0], both[1], 0x5410),
                                       __byte_perm(both[0], both[1], 0x7632)};
      const auto* const columns = reinterpret_cast<const typename Two::Type*>(halves);
      const std::uint32_t best = clamped(__hmax2_nan(columns[0], columns[1]));
      asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(best)
                   : "memory");
      return;
    }
    std::uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = clamped(made[i]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to),
                 "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3])
                 : "memory");
  }

  // Whether something that was made is an infinity of float16, which may have been finite.
  __device__ bool may_be_past() const {
    if constexpr (std::is_same_v<T, __half>) {
      return __hisinf(__low2half(most_)) || __hisinf(__high2half(most_));
    }
    return false;
  }
  // Whether one of two rows' sums, from a position on, is past the range of T.
  __device__ bool is_past(const float (&upper)[4], const float (&lower)[4], int h, int w) const {
    bool past = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = clamp((i < 4 ? upper : lower)[i % 4] + bias_[i % 4 / 2], p_.low, p_.high);
      const bool inside = w + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2 < p_.out_w;
      past |= inside && h + i / 4 < p_.out_h && is_past_float16(value);
    }
    return past;
  }

 private:
  using Two = TwoOf<T>;

  __device__ std::uint32_t clamped(typename Two::Type made) {
    made = __hmin2_nan(__hmax2_nan(made, low_), high_);
    if constexpr (std::is_same_v<T, __half>) most_ = __hmax2(most_, __habs2(made));
    return *reinterpret_cast<const std::uint32_t*>(&made);
  }

  const Gemm& p_;
  const typename Two::Type low_, high_;
  typename Two::Type most_;
  float bias_[2];
  std::uint32_t at_;
};

// Where a tile is: its first filter and position.
struct TilePosition {
  int filter, image, h, w;
};

// What a thread stores of a tile's results, as SpatialTileEpilogue has left them: pieces of 16
// bytes of one column, of all rows or of those that a block of a cluster has.
template <typename T, int Rows>
class PatchRows {
 public:
  __device__ PatchRows(const Gemm& p, const TilePosition& first, int rank, int thread) {
    constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
    const int position = thread / 8, piece = thread % 8, filter = first.filter + piece * kWidth;
    // At a time threads have 16 positions: two rows, or four of pooled ones.
    const int shift = p.pools ? 1 : 0, width = kPatchWidth >> shift, column = position % width;
    const int two = width * 2 * kRowBytes;  // bytes of two rows' results
    const int row = position / width, rows = p.out_h >> shift, columns = p.out_w >> shift;
    const int h = (first.h >> shift) + (p.pools ? row << p.log_split : row) + (rank << (1 - shift));
    const int w = (first.w >> shift) + column;
    const int further = (p.pools ? 4 : 2) << p.log_split;
    const int left = min(rows, (first.h + Rows) >> shift) - h;
    count_ = w < columns && filter < p.filters && left > 0 ? (left - 1) / further + 1 : 0;
    from_ = (p.pools ? row * two : row * kPatchWidth * kRowBytes) + column * kRowBytes +
            swizzled(column, piece) * 16;
    apart_ = p.pools ? 4 * two : two;
    to_ = static_cast<T*>(p.y) +
          ((std::int64_t{first.image} * rows + h) * columns + w) * p.y_pitch + filter;
    further_ = std::int64_t{further} * columns * p.y_pitch;
  }

  __device__ void store(std::uint32_t made) const {
    T* to = to_;
    std::uint32_t from = made + from_;
#pragma unroll 4
    for (int i = 0; i < count_; ++i, to += further_, from += apart_) {
      *reinterpret_cast<float4*>(to) = load_float4(from);
    }
  }

 private:
  int count_, apart_;
  std::uint32_t from_;
  T* to_;
  std::int64_t further_;
};

// With `Persistent` blocks take one tile after another.
template <typename T, int Rows, bool Splits, bool Persistent>
__global__ void __launch_bounds__(128 + 64, 2)
    conv2d_nhwc_wgmma_patches_kernel(const __grid_constant__ CUtensorMap images,
                                     const __grid_constant__ CUtensorMap results,
                                     const __grid_constant__ Gemm p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static_assert(!(Splits && Persistent));
  using At = PatchTile<Rows, Splits>;
  constexpr int kThreads = 128, kWarps = 4;  // that multiply
  extern __shared__ __align__(1024) char memory[];
  const std::uint32_t patches = shared_address(memory), ring = patches + At::kRing;
  const std::uint32_t full = patches + At::kBarriers, empty = full + 8 * At::kStages;
  const std::uint32_t there = empty + 8 * At::kStages, read = there + 16;  // of patches
  const std::uint32_t received = patches + At::kFrom, all_received = read + 16;

  if (!p.holds) let_successors_start();
  const int thread = threadIdx.x, warp = same_in_warp(thread / 32);
  const int rank = Splits ? static_cast<int>(cluster_rank()) : 0;
  const int first_chunk = Splits ? rank * p.steps_a_block : 0;
  const int end_chunk = Splits ? min(first_chunk + p.steps_a_block, p.chunks) : p.chunks;
  if (thread == kThreads) {
    prefetch_tensor_map(&images);
    if (Persistent) prefetch_tensor_map(&results);
    for (int stage = 0; stage < At::kStages; ++stage) {
      init_mbarrier(full + 8 * stage, 1);
      init_mbarrier(empty + 8 * stage, 1);
    }
    for (int i = 0; i < 2; ++i) {
      init_mbarrier(there + 8 * i, 1);
      init_mbarrier(read + 8 * i, 1);
    }
    if (Splits) {
      const int own = ((Rows / 2 - rank + p.split - 1) >> p.log_split) * 2;
      init_mbarrier(all_received, 1);
      expect_tx(all_received, (p.split - 1) * own * kThreads * 16);
    }
    fence_mbarrier_init();
  }
  __syncwarp();
  if (Splits) arrive_at_cluster_barrier_relaxed();
  __syncthreads();
  if (kForRacecheck && Splits) wait_at_cluster_barrier();  // else it does not end

  // Of persistent blocks, neighbours, of one multiprocessor, do not both have the first tiles.
  const int apart = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int first_tile = Persistent ? block / 2 + block % 2 * (apart / 2) : block;
  // Of two rows' results.
  const int made_bytes = (p.pools ? kPatchWidth : 2 * kPatchWidth) * kRowBytes;
  const auto where = [&](int tile) {
    const int patch = tile / p.filter_tiles, line = patch / p.patches_a_row;
    const int image = line / p.patches_a_column;
    return TilePosition{(tile - patch * p.filter_tiles) * kFilters, image,
                        (line - image * p.patches_a_column) * Rows,
                        (patch - line * p.patches_a_row) * kPatchWidth};
  };
  if (warp == kWarps) {  // asks for weights
    const bool leads = leads_warp();
    RingStage stage = {0, 1};
#pragma unroll 1
    for (int tile = first_tile; tile < p.tiles; tile += apart) {
      const char* const weights =
          p.packed + std::int64_t{tile % p.filter_tiles} * p.steps * At::kWeightBytes;
#pragma unroll 1
      for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
#pragma unroll 1
        for (int step = chunk; step < p.steps; step += p.chunks) {  // a kernel offset's
          const std::uint32_t barrier = full + 8 * stage.at;
          wait_mbarrier(empty + 8 * stage.at, stage.parity);
          if (leads) {
            expect_tx(barrier, At::kWeightBytes);
            copy_bulk(ring + stage.at * At::kWeightBytes,
                      weights + std::int64_t{step} * At::kWeightBytes, At::kWeightBytes, barrier);
          }
          stage.next(At::kStages);
        }
      }
    }
    return;
  }
  if (warp == kWarps + 1) {  // asks for what patches reach; where blocks persist, stores
    const bool leads = leads_warp();
    constexpr int kChannels = kRowBytes / static_cast<int>(sizeof(T));
    const int shift = p.pools ? 1 : 0;
    const auto store = [&](const TilePosition& at, std::uint32_t from) {
      if (!leads || at.w >> shift >= p.out_w >> shift) return;
      for (int two = 0; two < Rows / 2; ++two) {
        const int h = (at.h + 2 * two) >> shift;
        if (h >= p.out_h >> shift) break;
        tma_store_box(&results, from + two * made_bytes, at.filter, at.w >> shift, h, at.image);
      }
      tma_store_commit();
      tma_store_wait_read();
    };
    RingStage half = {0, 1};
    constexpr TilePosition kNothing = {-1, 0, 0, 0};
    // Results that are where patches come to.
    TilePosition made_first = kNothing, made_next = kNothing;
    const auto keep = [&](const TilePosition& at) {
      if (half.at == 0) {
        made_first = at;
      } else {
        made_next = at;
      }
    };
    const auto wait_for_half = [&] {
      wait_mbarrier(read + 8 * half.at, half.parity);
      if constexpr (Persistent) {
        const TilePosition made = half.at == 0 ? made_first : made_next;
        if (made.filter >= 0) store(made, patches + half.at * At::kImageBytes);
        __syncwarp();
        keep(kNothing);
      }
    };
    bool waited = false;
#pragma unroll 1
    for (int tile = first_tile; tile < p.tiles; tile += apart) {
      const TilePosition at = where(tile);
      if ((at.image | at.h | at.w) < 0) return;  // never: but so it is divided before the wait
      if (!waited) {
        wait_for_inputs();
        if (p.holds) let_successors_start();
      }
      waited = true;
#pragma unroll 1
      for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
        const std::uint32_t barrier = there + 8 * half.at;
        wait_for_half();
        if (leads) {
          expect_tx(barrier, At::kReached);
          tma_load_box(patches + half.at * At::kImageBytes, &images, chunk * kChannels,
                       at.w - p.pad_left, at.h - p.pad_top, at.image, barrier);
        }
        if (Persistent && chunk + 1 == end_chunk) keep(at);
        half.next(2);
      }
    }
    if constexpr (Persistent) {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        wait_for_half();
        half.next(2);
      }
      if (leads) tma_store_wait();
    }
    return;
  }

  // Known before the wait, as to divide takes long.
  const TilePosition first = where(first_tile);
  const PatchRows<T, Rows> own(p, first, rank, thread);
  // Others have made their barriers.
  if (!kForRacecheck && Splits) wait_at_cluster_barrier();
  wait_for_inputs();  // of what this kernel overwrites, others may read
  const std::uint64_t weights = matrix_descriptor(ring);
  const std::uint64_t positions = matrix_descriptor<kPatchPitch * kRowBytes>(patches);
  RingStage stage = {0, 0}, half = {0, 0};
#pragma unroll 1
  for (int tile = first_tile; tile < p.tiles; tile += apart) {
    const TilePosition at = Persistent ? where(tile) : first;
    SpatialTileEpilogue<T> end(p, at.filter + warp * 16, warp, thread % 32);
    float accumulators[Rows * 4] = {};
    int before = 0;
#pragma unroll 1
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
      const std::uint64_t of_chunk = positions + half.at * (At::kImageBytes >> 4);
      wait_mbarrier(there + 8 * half.at, half.parity);
#pragma unroll 1
      for (int r = 0; r < 3; ++r) {
#pragma unroll
        for (int s = 0; s < 3; ++s) {
          wait_mbarrier(full + 8 * stage.at, stage.parity);
          multiply_rows<T, Rows * 8>(accumulators, weights + stage.at * (At::kWeightBytes >> 4),
                                     of_chunk + (r * kPatchPitch + s) * (kRowBytes >> 4));
          wgmma_commit();
          wgmma_wait<1>();  // those of the step before
          if (thread == 0 && chunk - first_chunk + r + s > 0) {
            arrive(empty + 8 * before);
            if (r + s == 0) arrive(read + 8 * (half.at ^ 1));
          }
          before = stage.at;
          stage.next(At::kStages);
        }
      }
      half.next(2);
    }
    wgmma_wait<0>();
    if (thread == 0) arrive(empty + 8 * before);
    const int last = half.at ^ 1;
    const auto two_rows = [&](int row, float (&upper)[4], float (&lower)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        upper[i] = accumulators[4 * row + i];
        lower[i] = accumulators[4 * row + 4 + i];
      }
    };
    bool past = false;
    const std::uint32_t made = Splits ? ring : patches + last * At::kImageBytes;
    if constexpr (Splits) {
      float upper[4];
      const auto add_up = [&](auto of_cluster) {
        constexpr int kSplit = decltype(of_cluster)::value;
        add_up_at_once<kSplit, Rows * 8, kThreads, 2>(
            accumulators, rank, received, all_received, thread, [] {},
            [&](int eight, const float (&sum)[4]) {
              if (eight % 2 == 0) {
#pragma unroll
                for (int i = 0; i < 4; ++i) upper[i] = sum[i];
                return;
              }
              end(made + eight / 2 * made_bytes, upper, sum);
              if (end.may_be_past()) {
                past |= end.is_past(upper, sum, at.h + (eight / 2 * kSplit + rank) * 2, at.w);
              }
            });
      };
      if (p.split == 2) {
        add_up(std::integral_constant<int, 2>());
      } else if (p.split == 4) {
        add_up(std::integral_constant<int, 4>());
      } else {
        add_up(std::integral_constant<int, 8>());
      }
    } else {
      named_barrier<kThreads>(1);  // no one multiplies what lies there
      float upper[4], lower[4];
#pragma unroll
      for (int row = 0; row < Rows; row += 2) {
        two_rows(row, upper, lower);
        end(made + row / 2 * made_bytes, upper, lower);
      }
      if (end.may_be_past()) {
#pragma unroll
        for (int row = 0; row < Rows; row += 2) {
          two_rows(row, upper, lower);
          past |= end.is_past(upper, lower, at.h + row, at.w);
        }
      }
    }
    if (past) tell(p.overflow);
    if (Persistent) {
      fence_async_proxy();
      named_barrier<kThreads>(1);
      if (thread == 0) arrive(read + 8 * last);
    } else {
      named_barrier<kThreads>(1);
      own.store(made);
    }
  }
#endif
}

template <typename T, int Rows, bool Splits>
void launch_patch(const SourceImages& images, Gemm p, const Choice& choice, Stream stream) {
  using At = PatchTile<Rows, Splits>;
  p.split = choice.split;
  p.log_split = log2_of(choice.split);
  p.steps_a_block = (p.chunks + p.split - 1) / p.split;
  p.patches_a_row = (p.out_w + kPatchWidth - 1) / kPatchWidth;
  p.patches_a_column = (p.out_h + Rows - 1) / Rows;
  p.filter_tiles = (p.filters + kFilters - 1) / kFilters;
  p.tiles = images.shape.n * p.patches_a_column * p.patches_a_row * p.filter_tiles;
  Conv2dShape made = images.shape;
  made.c = p.filters;
  made.h = p.pools ? p.out_h / 2 : p.out_h;
  made.w = p.pools ? p.out_w / 2 : p.out_w;
  if (made.h * made.w == 0) return;
  // A tile each, of blocks that do not share a multiprocessor with each other.
  const bool alone = p.tiles * p.split <= choice.multiprocessors;
  const int bytes = alone ? std::max(At::kBytes, At::kAlone) : At::kBytes;
  const int blocks = Splits ? p.tiles : std::min(2 * choice.multiprocessors, p.tiles);
  const bool is_persistent = blocks < p.tiles;
  const auto kernel = is_persistent ? conv2d_nhwc_wgmma_patches_kernel<T, Rows, Splits, !Splits>
                                    : conv2d_nhwc_wgmma_patches_kernel<T, Rows, Splits, false>;
  CUtensorMap results = {};  // which threads store where blocks do not persist
  if (is_persistent) {
    results =
        map_of_boxes<T>(p.y, made, p.y_pitch, p.pools ? 1 : 2, kPatchWidth >> (p.pools ? 1 : 0));
  }
  make_ready(kernel, bytes);
  launch("conv2d_nhwc_wgmma_patches_kernel", kernel, dim3(blocks, 1, p.split), dim3(128 + 64),
         bytes, stream, p.split,
         map_of_boxes<T>(images.x, images.shape, images.pitch, Rows + 2, kPatchPitch), results, p);
}

template <typename T>
void launch_patches(const SourceImages& images, const Gemm& p, const Choice& choice,
                    Stream stream) {
  if (choice.tile == 0) return launch_patch<T, kPatchRows[0], false>(images, p, choice, stream);
  if (choice.split > 1) return launch_patch<T, kPatchRows[1], true>(images, p, choice, stream);
  launch_patch<T, kPatchRows[1], false>(images, p, choice, stream);
}

}  // namespace wgmma
}  // namespace cnn_engine::cuda
