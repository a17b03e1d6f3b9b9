// The kernel of dense_layer: a convolution of 3x3 and the next layer's of 1x1 over clusters.
//
// A cluster makes a tile of whole rows of an image, up to 32 places. Nearly all that the 1x1
// convolution reads was made layers ago. So each block multiplies its share of those channels
// before it waits for the kernel before, and the blocks send each other their sums: each finishes
// some filters. Behind the wait a block has 16 or 32 of the 3x3 convolution's channels (and of 16
// blocks half of the taps); sums are sent again, each block adds up those of some places, stores
// them and sends them to all as the 1x1 convolution reads them. What is left then are 64 terms:
// these, and the layer's before.
#pragma once

#include <cstdint>

#include "cuda/cluster.cuh"
#include "cuda/ends.cuh"
#include "cuda/inverted.cuh"
#include "cuda/warp.cuh"

namespace cnn_engine::cuda::dense_layers {

constexpr int kThreads = 256, kWarps = kThreads / kWarpThreads;
constexpr int kAllThreads = kThreads + kWarpThreads;  // and those that let the next kernel start
constexpr int kChannels = 128;  // that the 3x3 convolution reads, and filters of the 1x1 one
constexpr int kGrowth = 32;     // filters of the 3x3 convolution
constexpr int kLate = 32;       // channels of the layer before, which are read behind the wait
constexpr int kPlaces = 32;     // of a tile, at most
constexpr int kTaps = 9, kDepth = 16, kEight = 8;
constexpr int kMostSteps = 8;  // of kDepth channels, of a block before the wait
constexpr int kOperand = 8;    // numbers of a lane's operand of 16 x 16 terms
// Places of the rows and columns that a tile reaches, at most: of one row, or of one column.
constexpr int kReached = 3 * (kPlaces + 2);

struct DenseLayer {
  const float *first_bias, *next_bias, *scale, *shift;
  void *y, *z;
  int h, w, lines, tiles;         // rows of a tile; tiles of an image
  int steps;                      // of channels that are multiplied first
  int x_pitch, y_pitch, z_pitch;  // in numbers
  bool ahead, holds;              // whether those are known before the wait
  float floor, inner_low, inner_high, outer_low, outer_high;
  Overflow overflow;
};

// What one of so many blocks of a cluster does.
template <int Blocks>
struct Share {
  static constexpr int kUnits = 16 / Blocks;                   // eights of filters; pairs of places
  static constexpr int kGroups = Blocks > 8 ? 1 : 8 / Blocks;  // of kDepth channels of e
  static constexpr int kSharing = Blocks > 8 ? Blocks / 8 : 1;  // blocks that share their taps
  static constexpr int kOwnTaps = (kTaps + kSharing - 1) / kSharing;
  static constexpr int kSteps = kGroups * kOwnTaps;
  static constexpr int kPieces = kGroups * 2;            // of kPiece bytes, of a place of e
  static constexpr int kPitch = (kPieces | 1) * kPiece;  // in banks apart
  static constexpr int kSum = kEight * kPlaces;          // numbers of an eight of filters
  static constexpr int kPair = 2 * kGrowth;              // of a pair of places
  // Whether weights are in shared memory, where registers have no room for them.
  static constexpr bool kKept = kSteps > kTaps;
  static constexpr int kWindow = kSteps * 2 * kWarpThreads;  // operands
};

template <typename T, int Blocks>
struct alignas(16) Memory {
  using Own = Share<Blocks>;
  static constexpr int kPitch = kMostSteps * kDepth + 8, kLatePitch = kLate + kGrowth + 8;
  static constexpr int kKnownPitch = Own::kUnits * kEight + 4;
  T first[kPlaces][kPitch];                          // known channels as they are multiplied
  float received[Blocks * Own::kUnits * Own::kSum];  // their sums, of each block
  float known[kPlaces][kKnownPitch];                 // added up
  char reached[kReached * Own::kPitch];              // of e
  float sums[Blocks * Own::kUnits * Own::kPair];     // of the 3x3 convolution, of each block
  T made[2 * Own::kUnits][kGrowth], prepared[2 * Own::kUnits][kGrowth];
  uint4 window[Own::kKept ? Own::kWindow : 1];
  T late[kPlaces][kLatePitch];  // channels of two layers as they are multiplied
  std::uint64_t known_are_here, sums_are_here, late_are_here;
};

template <typename T>
using FormatOf = std::conditional_t<std::is_same_v<T, __half>, Half, Bfloat16>;

// What the second-level cache has, since another kernel may still write beside it.
__device__ inline uint4 load_piece(const void* from) {
  return __ldcg(reinterpret_cast<const uint4*>(from));
}

// Constants, asked for here and not where they are first needed: as what others might write.
__device__ inline uint4 ask_for(const uint4* from) {
  uint4 found;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "l"(from)
               : "memory");
  return found;
}
__device__ inline float ask_for(const float* from) {
  float found;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(found) : "l"(from) : "memory");
  return found;
}

__device__ inline void load_eight(const float* from, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 four = ask_for(reinterpret_cast<const uint4*>(from) + i);
    to[4 * i] = __uint_as_float(four.x);
    to[4 * i + 1] = __uint_as_float(four.y);
    to[4 * i + 2] = __uint_as_float(four.z);
    to[4 * i + 3] = __uint_as_float(four.w);
  }
}

// max(floor, x * scale + shift), NaN where that is.
__device__ inline float prepared(float x, float scale, float shift, float floor) {
  const float z = fmaf(x, scale, shift);
  return z < floor ? floor : z;
}

// Stores eight numbers as the 1x1 convolution reads them, or zeros.
template <typename T>
__device__ inline void store_prepared(T* to, const uint4& read, bool some, const float (&scale)[8],
                                      const float (&shift)[8], float floor) {
  using Format = FormatOf<T>;
  const std::uint32_t words[4] = {read.x, read.y, read.z, read.w};
  std::uint32_t made[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = Format::unpack(words[i]);
    const std::uint32_t both =
        Format::pack(prepared(two.x, scale[2 * i], shift[2 * i], floor),
                     prepared(two.y, scale[2 * i + 1], shift[2 * i + 1], floor));
    made[i] = some ? both : 0;
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(made[0], made[1], made[2], made[3]);
}

__device__ inline float clamped(float x, float low, float high) {
  return min_nan(max_nan(x, low), high);
}

// Has a number ready here, and not where it is first needed.
__device__ inline void have(std::uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ inline void have(uint4& x) {
  asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
}

// Blocks: tiles of images along x; of a cluster along z.
template <typename T, int Blocks>
__global__ void __launch_bounds__(kAllThreads, 2)
    dense_layer_kernel(const T* x, const T* e,
                       const uint4* __restrict__ first_weights,  // [step][warp][lane]
                       const uint4* __restrict__ late_weights,   // [eight][two steps][lane]
                       const uint4* __restrict__ window,         // [group][tap][half][lane]
                       const __grid_constant__ DenseLayer p) {
  using Own = Share<Blocks>;
  using Format = FormatOf<T>;
  extern __shared__ __align__(16) char shared_memory[];
  auto& memory = *reinterpret_cast<Memory<T, Blocks>*>(shared_memory);
  const int thread = threadIdx.x, warp = same_in_warp(thread / kWarpThreads);
  const int lane = thread % kWarpThreads;
  const int rank = static_cast<int>(cluster_rank());
  const int image = static_cast<int>(blockIdx.x) / p.tiles;
  const int line = (static_cast<int>(blockIdx.x) - image * p.tiles) * p.lines;
  const int places = min(p.lines, p.h - line) * p.w;  // that there are
  const std::int64_t begin = (std::int64_t{image} * p.h + line) * p.w;
  const std::uint32_t known_are_here = shared_address(&memory.known_are_here),
                      sums_are_here = shared_address(&memory.sums_are_here),
                      late_are_here = shared_address(&memory.late_are_here);
  if (thread == 0) {
    init_barrier(known_are_here);
    init_barrier(sums_are_here);
    init_barrier(late_are_here);
    expect_bytes(known_are_here, sizeof(memory.received));
    expect_bytes(sums_are_here, sizeof(memory.sums));
    expect_bytes(late_are_here, kPlaces * kGrowth * sizeof(T));
  }
  __syncwarp();
  arrive_at_cluster_barrier_relaxed();
  if (warp == kWarps) {  // not when this block has done what it can: the next one has as much to do
    wait_at_cluster_barrier();
    if (p.holds) wait_for_inputs();
    let_successors_start();
    return;
  }

  const int group = rank / Own::kSharing * Own::kGroups;  // of the 3x3's channels
  if constexpr (Own::kKept) {
    for (int i = thread; i < Own::kWindow; i += kThreads) {
      copy_piece(&memory.window[i], window + group * kTaps * 2 * kWarpThreads + i);
    }
  }

  // ---- channels that are known: this block's share of the steps ----
  const int from = rank * p.steps / Blocks, own = (rank + 1) * p.steps / Blocks - from;
  if (!p.ahead) wait_for_inputs();
  uint4 weights[kMostSteps];
  // What there is not is read at the last that there is: a load that may be left out would wait for
  // its own turn.
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) {
    const int step = min(from + i, max(p.steps - 1, 0));
    weights[i] = ask_for(first_weights + (step * kWarps + warp) * kWarpThreads + lane);
  }
  {
    constexpr int kRow = kMostSteps * 2, kReads = kPlaces * kRow / kThreads;  // pieces of a place
    const int piece = thread % kRow;
    const int column = min(from * kDepth + piece * kEight, p.steps * kDepth);
    uint4 read[kReads];
    float scale[8], shift[8];
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int place = min(thread / kRow + i * (kThreads / kRow), places - 1);
      read[i] = load_piece(x + (begin + place) * p.x_pitch + column);
    }
    load_eight(p.scale + column, scale);
    load_eight(p.shift + column, shift);
#pragma unroll
    for (int i = 0; i < kMostSteps; ++i) have(weights[i]);
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int place = thread / kRow + i * (kThreads / kRow);
      store_prepared(&memory.first[place][piece * kEight], read[i], place < places, scale, shift,
                     p.floor);
    }
  }
  named_barrier<kThreads>(1);
  {
    // Tiles of operands: a lane gives the address of row lane % 8 of tile lane / 8.
    const std::uint32_t rows =
        shared_address(&memory.first[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
    constexpr int kHalf = 16 * sizeof(memory.first[0]);
    float sums[4][4] = {};
#pragma unroll
    for (int i = 0; i < kMostSteps; ++i) {
      if (i >= own) continue;
      std::uint32_t low[4], high[4];
      load_tiles(low, rows + i * kDepth * sizeof(T));
      load_tiles(high, rows + kHalf + i * kDepth * sizeof(T));
      const std::uint32_t a[4] = {weights[i].x, weights[i].y, weights[i].z, weights[i].w};
      Format::mma16(sums[0], a, low);
      Format::mma16(sums[1], a, low + 2);
      Format::mma16(sums[2], a, high);
      Format::mma16(sums[3], a, high + 2);
    }
    wait_at_cluster_barrier();  // all blocks can be sent to
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // eights of filters
      const int eight = 2 * warp + i, owner = eight / Own::kUnits;
      const int unit = rank * Own::kUnits + eight % Own::kUnits;
      const std::uint32_t barrier = cluster_address(known_are_here, owner);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* const slot =
            memory.received + unit * Own::kSum + (j * kWarpThreads + lane) * 4;
        send_cluster(cluster_address(shared_address(slot), owner), barrier, sums[2 * j][2 * i],
                     sums[2 * j][2 * i + 1], sums[2 * j + 1][2 * i], sums[2 * j + 1][2 * i + 1]);
      }
    }
  }

  // ---- what else can be had before the wait ----
  const int half = warp / 4, eighth = warp % 4;  // of the 3x3's filters; eight of its places
  const int tap = rank % Own::kSharing * Own::kOwnTaps;
  uint4 taps[Own::kSteps];
#pragma unroll
  for (int s = 0; s < Own::kSteps && !Own::kKept; ++s) {
    const int of = tap + s % Own::kOwnTaps;
    const int at = ((group + s / Own::kOwnTaps) * kTaps + of) * 2 + half;
    taps[s] = of < kTaps ? ask_for(window + at * kWarpThreads + lane) : uint4{};
  }
  const int finished = warp / 2, rows = warp % 2 * 16;  // an eight of filters, of places
  const bool finishes = finished < Own::kUnits;
  const int filter = (rank * Own::kUnits + finished) * kEight + lane % 4 * 2;
  uint4 last[2] = {};
  float next_bias[2] = {};
  if (finishes) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      last[i] =
          ask_for(late_weights + ((rank * Own::kUnits + finished) * 2 + i) * kWarpThreads + lane);
      if (p.next_bias != nullptr) next_bias[i] = ask_for(p.next_bias + filter + i);
    }
  }
  // A thread adds up a number of the 3x3's: that of a filter, of a place.
  const bool adds = thread < Own::kUnits * Own::kPair;
  const int pair = thread / Own::kPair % Own::kUnits, made_at = 2 * pair + thread % 2;
  const int made_filter = thread / 32 % 2 * 16 + thread / 4 % 8 + thread / 2 % 2 * 8;
  const int late = p.steps * kDepth;  // the first channel of the layer before
  float first_bias = p.first_bias != nullptr ? ask_for(p.first_bias + made_filter) : 0.0f;
  float made_scale = ask_for(p.scale + late + kLate + made_filter),
        made_shift = ask_for(p.shift + late + kLate + made_filter);
  // The second half of the threads reads the layer before.
  constexpr int kLatePieces = kLate / kEight;
  const bool reads_late = thread >= kThreads / 2;
  const int late_place = thread % (kThreads / 2) / kLatePieces;
  const int late_piece = thread % kLatePieces * kEight;
  float late_scale[8], late_shift[8];
  load_eight(p.scale + late + late_piece, late_scale);
  load_eight(p.shift + late + late_piece, late_shift);
  // Places of e that a thread copies pieces of.
  constexpr int kAtOnce = kThreads / Own::kPieces;
  constexpr int kCopies = (kReached + kAtOnce - 1) / kAtOnce;
  const int wide = p.w + 2;
  const T* reached[kCopies];
  bool there[kCopies], copied[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int at = thread / Own::kPieces + i * kAtOnce, down = at / wide;
    const int h = line + down - 1, w = at - down * wide - 1;
    copied[i] = at < (p.lines + 2) * wide;
    there[i] = copied[i] && h >= 0 && h < p.h && w >= 0 && w < p.w;
    const std::int64_t place = there[i] ? (std::int64_t{image} * p.h + h) * p.w + w : 0;
    reached[i] = e + place * kChannels + group * kDepth + thread % Own::kPieces * kEight;
  }
  // Where a lane's rows of tiles of e begin, two steps at once.
  std::uint32_t tiles[(Own::kSteps + 1) / 2];
  {
    const int place = eighth * kEight + lane % 8, down = place / p.w;
    const int first = down < p.lines ? down * wide + place - down * p.w : 0;
#pragma unroll
    for (int s = 0; s < Own::kSteps; s += 2) {
      const int step = min(s + lane / 16, Own::kSteps - 1);
      const int of = min(tap + step % Own::kOwnTaps, kTaps - 1);
      const int at = first + of / 3 * wide + of % 3;
      tiles[s / 2] = shared_address(memory.reached) + at * Own::kPitch +
                     step / Own::kOwnTaps * (2 * kPiece) + lane / 8 % 2 * kPiece;
      have(tiles[s / 2]);
    }
  }
  // The sums of what is known: all blocks' are here.
  wait_for_cluster_bytes(known_are_here);
#pragma unroll
  for (int unit = 0; unit < Own::kUnits; ++unit) {
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
      sum += memory.received[(block * Own::kUnits + unit) * Own::kSum + thread];
    }
    const int place =
        (thread / 128 * 2 + thread / 2 % 2) * kEight + thread / 4 % 4 * 2 + thread % 2;
    memory.known[place][unit * kEight + thread / 16 % 8] = sum;
  }

  // ---- what the kernel before made ----
  if (p.ahead) wait_for_inputs();
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int at = thread / Own::kPieces + i * kAtOnce;
    if (copied[i]) {
      copy_piece(memory.reached + at * Own::kPitch + thread % Own::kPieces * kPiece, reached[i],
                 there[i]);
    }
  }
  commit_copies();
  if (reads_late) {
    const bool some = late_place < places;
    const uint4 read =
        some ? load_piece(x + (begin + late_place) * p.x_pitch + late + late_piece) : uint4{};
    store_prepared(&memory.late[late_place][late_piece], read, some, late_scale, late_shift,
                   p.floor);
  }
  wait_for_copies<0>();
  named_barrier<kThreads>(1);
  {
    float sums[2][4] = {};
#pragma unroll
    for (int s = 0; s < Own::kSteps; s += 2) {
      std::uint32_t b[4];
      load_tiles(b, tiles[s / 2]);
#pragma unroll
      for (int i = 0; i < 2 && s + i < Own::kSteps; ++i) {
        uint4 of;
        if constexpr (Own::kKept) {
          of = memory.window[((s + i) * 2 + half) * kWarpThreads + lane];
        } else {
          of = taps[s + i];
        }
        const std::uint32_t a[4] = {of.x, of.y, of.z, of.w};
        Format::mma16(sums[i], a, b + 2 * i);
      }
    }
    const int which = eighth * 4 + lane % 4, owner = which / Own::kUnits;
    const int slot = (rank * Own::kUnits + which % Own::kUnits) * 16 + half * 8 + lane / 4;
    send_cluster(cluster_address(shared_address(memory.sums + slot * 4), owner),
                 cluster_address(sums_are_here, owner), sums[0][0] + sums[1][0],
                 sums[0][1] + sums[1][1], sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]);
  }

  // ---- y, of some places ----
  bool past = false;
  const int first_place = rank * 2 * Own::kUnits;
  if (adds) {
    wait_for_cluster_bytes(sums_are_here);
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
      sum += memory.sums[block * Own::kUnits * Own::kPair + thread];
    }
    sum = clamped(sum + first_bias, p.inner_low, p.inner_high);
    const T y = narrowed<T>(sum);
    memory.made[made_at][made_filter] = y;
    memory.prepared[made_at][made_filter] =
        narrowed<T>(prepared(widened(y), made_scale, made_shift, p.floor));
    past = std::is_same_v<T, __half> && is_past_float16(sum) && first_place + made_at < places;
  }
  named_barrier<kThreads>(1);
  constexpr int kSent = 2 * Own::kUnits * (kGrowth / kEight);  // pieces
  const int piece = thread % kSent, sent_at = piece / (kGrowth / kEight);
  const int column = piece % (kGrowth / kEight) * kEight;
  if (thread < kThreads / 2) {
    static_assert(kSent * Blocks == kThreads / 2);
    const int to = thread / kSent;
    const float4 four = *reinterpret_cast<const float4*>(&memory.prepared[sent_at][column]);
    const std::uint32_t slot = shared_address(&memory.late[first_place + sent_at][kLate + column]);
    send_cluster(cluster_address(slot, to), cluster_address(late_are_here, to), four.x, four.y,
                 four.z, four.w);
  } else if (thread - kThreads / 2 < kSent && first_place + sent_at < places) {
    *reinterpret_cast<uint4*>(static_cast<T*>(p.y) + (begin + first_place + sent_at) * p.y_pitch +
                              column) =
        *reinterpret_cast<const uint4*>(&memory.made[sent_at][column]);
  }

  // ---- z, of some filters ----
  if (finishes) {
    const int row = rows + lane / 4, of = finished * kEight + lane % 4 * 2;
    float sums[4] = {memory.known[row][of], memory.known[row][of + 1], memory.known[row + 8][of],
                     memory.known[row + 8][of + 1]};
    const std::uint32_t at = shared_address(&memory.late[rows + lane % 16][lane / 16 * kEight]);
    const auto step = [&](int i) {
      std::uint32_t a[4];
      load_tiles(a, at + i * kDepth * sizeof(T));
      const uint4& both = last[i / 2];
      const std::uint32_t b[2] = {i % 2 == 0 ? both.x : both.z, i % 2 == 0 ? both.y : both.w};
      Format::mma16(sums, a, b);
    };
    step(0);
    step(1);
    wait_for_cluster_bytes(late_are_here);
    step(2);
    step(3);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = row + 8 * i;
      float two[2] = {clamped(sums[2 * i] + next_bias[0], p.outer_low, p.outer_high),
                      clamped(sums[2 * i + 1] + next_bias[1], p.outer_low, p.outer_high)};
      if (place >= places) continue;
      *reinterpret_cast<std::uint32_t*>(static_cast<T*>(p.z) + (begin + place) * p.z_pitch +
                                        filter) = Format::pack(two[0], two[1]);
      past |= some_past<T>(two);
    }
  }
  if (past) tell(p.overflow);
}

}  // namespace cnn_engine::cuda::dense_layers
