// A network as compile-time numbers, and where its activations and weights lie in shared memory.
//
// A convolution is a product A x B on tensor cores: a row of A is a pixel, a column of A a kernel
// offset (input channel, kernel row, kernel column), a column of B a filter. No A is ever built:
// its fragments are read straight from the input, which lies in shared memory with its border of
// zeros, so no bounds are tested.
//
// Pixels are taken as 2x2 squares (`positions`), 16 positions a tile: the four pixels of a square
// are the same elements of four sums, so pooling is a maximum of registers, and one fragment of the
// input serves up to four of them, because pixel (dy, dx) at kernel offset (r, s) reads what pixel
// (0, 0) reads at (r+dy, s+dx).
//
// First layer, few channels (`pixels`): rows of 16-bit values [row][column][channel]. The window of
// a square, kernel+1 columns, is a run of whole 32-bit words, which are A's registers as they lie;
// B has a column for each filter and each dx, with zeros where the window is one column too wide.
// Later layers (`planes`): [8 channels a plane][row][column parity][column / 2][8 channels], so
// that the 16-byte units of 8 neighbouring squares are neighbours, as ldmatrix reads them without
// bank conflicts.
#pragma once

#include "cuda/fused/interface.h"
#include "cuda/sm80/mma.cuh"

namespace cnn_engine::cuda::fused {

enum class Activation { none, relu, tanh };

// A convolution with a square kernel, its activation, and its 2x2 pooling if any, which only a
// stride of 1 may have.
template <int Filters, int Kernel, int Pad, Activation Act, bool Pool, int Stride = 1>
struct Conv {
  static constexpr int kFilters = Filters, kKernel = Kernel, kPad = Pad, kStride = Stride;
  static constexpr Activation kActivation = Act;
  static constexpr bool kPool = Pool;
  static_assert(Stride == 1 || (Stride == 2 && !Pool));
};

__host__ __device__ constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

template <class Layer, int Channels, int Height, int Width, bool First>
struct ConvGeometry : Layer {
  using Layer::kFilters, Layer::kKernel, Layer::kPad, Layer::kPool, Layer::kStride;
  static constexpr int kChannels = Channels, kHeight = Height, kWidth = Width;
  static constexpr bool kFirst = First;
  static constexpr int kOutH = (Height + 2 * kPad - kKernel) / kStride + 1,
                       kOutW = (Width + 2 * kPad - kKernel) / kStride + 1;
  // A square gives one output where it is pooled, and with a stride of 2, where of its pixels the
  // first alone is computed; else four, of which those past an odd edge are dropped.
  static constexpr bool kOne = kPool || kStride == 2;
  static constexpr int kPixels = kStride == 2 ? 1 : 4;  // of a square, that are computed
  static constexpr int kNextH = kPool ? kOutH / 2 : kOutH, kNextW = kPool ? kOutW / 2 : kOutW;
  static constexpr int kSquaresH = kOne ? kNextH : (kOutH + 1) / 2,
                       kSquaresW = kOne ? kNextW : (kOutW + 1) / 2;
  static constexpr bool kWhole = kOne || (kOutH % 2 == 0 && kOutW % 2 == 0);  // no edge is odd
  static constexpr int kPositions = kSquaresH * kSquaresW;
  static constexpr int kTiles = (kPositions + 15) / 16;
  static constexpr int kFilterTiles = (kFilters + 7) / 8;
  static constexpr int kPaddedFilters = 8 * kFilterTiles;
  static constexpr int kWindow = kKernel + (kStride == 1);  // rows, or columns, that a square reads
  static constexpr int kRows = larger(Height + 2 * kPad, 2 * (kSquaresH - 1) + kWindow),
                       kColumns = larger(Width + 2 * kPad, 2 * (kSquaresW - 1) + kWindow);
  static_assert(kNextH > 0 && kNextW > 0);
};

// ---- the first layer ----
// Words of a window's row: every 8 are a step of K (of 16 values); what is left over of all rows is
// gathered into steps of its own.
template <class G>
struct PixelLayout {
  // Pixels that a thread stores at once: what starts on whole words, in a row.
  static constexpr int kRun = G::kWidth % 8 == 0 ? 8 : G::kWidth % 4 == 0 ? 4 : 2 - G::kWidth % 2;
  // Channels as they are stored: one more, of zeros, where words would not be whole without.
  static constexpr bool kEven =
      G::kChannels % 2 == 0 ||
      (G::kPad % 2 == 0 && G::kColumns % 2 == 0 && G::kWindow % 2 == 0 && kRun % 2 == 0);
  static constexpr int kChannels = kEven ? G::kChannels : G::kChannels + 1;
  static constexpr int kWindowWords = G::kWindow * kChannels / 2;
  // A row of fewer words is a step of its own where that makes no more steps of a window: filled up
  // with what is right of the window, of no weight, and read by pairs of words, without conflicts.
  static constexpr bool kRowSteps = kWindowWords < 8 && kWindowWords % 2 == 0 &&
                                    kChannels % 2 == 0 &&
                                    G::kKernel <= (kWindowWords * G::kWindow + 7) / 8;
  static constexpr int kFullSteps = kRowSteps ? 1 : kWindowWords / 8;  // a window row
  static constexpr int kLeftWords = kRowSteps ? 0 : kWindowWords % 8;  // a window row
  static constexpr int kLeftSlots = kLeftWords * G::kWindow;
  static constexpr int kLeftSteps = (kLeftSlots + 7) / 8;  // a window
  // Float32 pixels that a thread stores at once: as many as fill 16 bytes, so that neighbouring
  // threads' lie side by side.
  static constexpr int kFloatRun =
      16 % (2 * kChannels) == 0 && 8 / kChannels < kRun ? 8 / kChannels : kRun;
  // Words before each row, so that the image's own first column is 16-byte aligned.
  static constexpr int kLead = (4 - G::kPad * kChannels / 2 % 4) % 4;
  static constexpr int kRowWords =
      round_up(kLead + larger(G::kColumns * kChannels / 2,
                              kRowSteps ? (G::kSquaresW - 1) * kChannels + 8 : 0),
               4);
  static constexpr int kBytes = G::kRows * kRowWords * 4;
  // Slabs of B: for each kernel row its full steps; then the left-over steps, for dy = 0 and, where
  // a square has more than one pixel, for dy = 1.
  static constexpr int kSides = G::kStride == 1 ? 2 : 1;  // dy, and dx, of a square's pixels
  static constexpr int kSlabs = G::kKernel * kFullSteps + kSides * kLeftSteps;
  static constexpr int kSlabTiles = kSides * G::kFilterTiles;  // dx = 0, then dx = 1
  __host__ __device__ static constexpr int slab_full(int r, int step) {
    return r * kFullSteps + step;
  }
  // The word of a window's row that a full step's slot is.
  __host__ __device__ static constexpr int full_word(int step, int slot) {
    return kRowSteps ? slot % 4 * 2 + slot / 4 : step * 8 + slot;
  }
  __host__ __device__ static constexpr int slab_left(int dy, int step) {
    return G::kKernel * kFullSteps + dy * kLeftSteps + step;
  }
  // The word (window row, word of that row) of a left-over slot; slots past the last read the
  // first.
  __host__ __device__ static constexpr int left_row(int slot) {
    return slot < kLeftSlots ? slot / (kLeftWords ? kLeftWords : 1) : 0;
  }
  __host__ __device__ static constexpr int left_word(int slot) {
    return kWindowWords - kLeftWords +
           (slot < kLeftSlots ? slot % (kLeftWords ? kLeftWords : 1) : 0);
  }
  template <int Parts>
  __host__ __device__ static constexpr int weight_bytes() {
    return kSlabs * kSlabTiles * 256 * Parts;
  }
};

// ---- later layers ----
template <class G>
struct PlaneLayout {
  static constexpr int kPlanes = (G::kChannels + 7) / 8;
  static constexpr int kSteps16 = kPlanes / 2, kSteps8 = kPlanes % 2;  // a kernel offset
  __host__ __device__ static constexpr int half_row() {
    int units = (G::kColumns + 1) / 2;
    // Squares that go on in the next row of squares go on in the next bank, where that can be had.
    if (G::kSquaresW % 4 == 0) {
      while ((4 * units - G::kSquaresW) % 8 != 0) ++units;
    }
    return units;
  }
  // Whether a warpgroup can multiply 64 squares, eight rows of eight, by 32 filters (squares.cuh).
  // Then weights of one part lie as it reads them, for all who read them: 8 filters of 8 channels.
  static constexpr bool kForWarpgroups = G::kStride == 2 && G::kSquaresW == 8 &&
                                         G::kPositions % 64 == 0 && kSteps8 == 0 &&
                                         G::kFilterTiles % 4 == 0;
  // There, all even columns of a plane come before all odd ones, and so far apart that units of
  // eight neighbouring columns are stored in different banks.
  static constexpr int kRowUnits = (G::kColumns + 1) / 2;
  __host__ __device__ static constexpr int parity_units() {
    int units = G::kRows * kRowUnits;
    while (units % 8 != 4 + G::kPad % 2) ++units;
    return units;
  }
  // From an even column to the next, odd one.
  static constexpr int kParityBytes = 16 * (kForWarpgroups ? parity_units() : half_row());
  static constexpr int kRowBytes = kForWarpgroups ? 16 * kRowUnits : 2 * kParityBytes;
  static constexpr int kPlaneBytes = G::kRows * kRowBytes + (kForWarpgroups ? kParityBytes : 0);
  static constexpr int kBytes = kPlanes * kPlaneBytes;
  __host__ __device__ static constexpr int column_bytes(int x) {
    return x % 2 * kParityBytes + x / 2 * 16;
  }
  template <int Parts>
  __host__ __device__ static constexpr int offset_bytes() {
    return G::kFilterTiles * (kSteps16 * 256 + kSteps8 * 128) * Parts;
  }
  template <int Parts>
  __host__ __device__ static constexpr int weight_bytes() {
    return G::kKernel * G::kKernel * offset_bytes<Parts>();
  }
};

// ---- a network ----
// `Classes`: filters of the fully connected layer and softmax that end it, or 0: then the last
// convolution's output is the result.
template <int Channels, int Height, int Width, int Classes, class... Layers>
struct Network {
  static constexpr int kChannels = Channels, kHeight = Height, kWidth = Width, kClasses = Classes;
  static constexpr int kLayers = sizeof...(Layers);
  static constexpr int kPixels = Height * Width;

 private:
  template <int I, int C, int H, int W, class First, class... Rest>
  struct Pick {
    using Here = ConvGeometry<First, C, H, W, sizeof...(Rest) + 1 == kLayers>;
    using type = typename Pick<I - 1, Here::kFilters, Here::kNextH, Here::kNextW, Rest...>::type;
  };
  template <int C, int H, int W, class First, class... Rest>
  struct Pick<0, C, H, W, First, Rest...> {
    using type = ConvGeometry<First, C, H, W, sizeof...(Rest) + 1 == kLayers>;
  };

 public:
  template <int I>
  using Layer = typename Pick<I, Channels, Height, Width, Layers...>::type;
  using Last = Layer<kLayers - 1>;
  static constexpr int kFeatures = Last::kFilters * Last::kNextH * Last::kNextW;
  static constexpr int kOutputs = Classes ? Classes : kFeatures;

  template <int I>
  __host__ __device__ static constexpr int input_bytes() {
    if constexpr (I == 0)
      return PixelLayout<Layer<0>>::kBytes;
    else
      return PlaneLayout<Layer<I>>::kBytes;
  }
  template <int I, int Parts>
  __host__ __device__ static constexpr int weight_bytes() {
    if constexpr (I == 0)
      return PixelLayout<Layer<0>>::template weight_bytes<Parts>();
    else
      return PlaneLayout<Layer<I>>::template weight_bytes<Parts>();
  }
};

// How warps share the work: `Warps` of each of `Cluster` blocks work on one image; `Groups` such
// teams make a block, where a team is within one. Weights that are not `KeptWeights`, for devices
// whose shared memory does not hold them, are read from device memory where they are needed. Where
// there is no room for the inputs of four layers, the last one's `Overlays` the first one's. A team
// that `Prefetches` has its next image in registers while it computes the last layer of this one.
template <int Warps, int Groups, int PixelTiles, int Cluster = 1, bool KeptWeights = true,
          bool Overlays = false, bool Prefetches = false>
struct Route {
  using Overlaid = Route<Warps, Groups, PixelTiles, Cluster, KeptWeights, true, Prefetches>;
  template <int Teams>
  using OfTeams = Route<Warps, Teams, PixelTiles, Cluster, KeptWeights, Overlays, Prefetches>;
  static constexpr bool kPrefetchDepth = Prefetches;
  static constexpr bool kKeptWeights = KeptWeights, kOverlays = Overlays;
  static constexpr int kWarps = Warps, kGroups = Groups, kCluster = Cluster;
  static constexpr int kPixelTiles =
      PixelTiles;  // tiles of the first layer that a warp sums at once
  static constexpr int kTeamThreads = 32 * Warps, kThreads = kTeamThreads * Groups;  // of a block
  static constexpr int kWorkers = Warps * Cluster;  // warps of a team
  static_assert(Groups <= 15, "named barriers 1 to 15");
  static_assert(Groups == 1 || Cluster == 1, "a team of several blocks is alone in each");
  static_assert(KeptWeights || Cluster == 1, "a cluster is for speed");
  // Filter tiles of one warp's task in layer G: if that leaves no warp idle all that there are, or
  // as many as half of a thread's registers hold the sums of. Else one; of many teams, whose others
  // keep the multiprocessor busy, two, which read their input once (in two parts not measured).
  template <class G, int Parts>
  __host__ __device__ static constexpr int filter_tiles() {
    constexpr int kRegisters = 64 * 1024 / kThreads < 255 ? 64 * 1024 / kThreads : 255;
    constexpr int kTiles = G::kFirst ? kPixelTiles : 1;  // at once
    const int most = (kRegisters + 1) / 2 / (4 * G::kPixels * Parts * kTiles);
    // Of a first layer with fewer tiles than warps the filters are parted where there are many
    // warps.
    int tiles = G::kFilterTiles;
    if (G::kTiles < kWorkers && (!G::kFirst || kWorkers > 32)) {
      tiles = Groups > 1 && Parts == 1 ? 2 : 1;
    }
    while (tiles > 1 && (tiles > most || G::kFilterTiles % tiles != 0)) --tiles;
    return tiles;
  }
  template <class G, int Parts>
  __host__ __device__ static constexpr int tasks() {
    return G::kTiles * (G::kFilterTiles / filter_tiles<G, Parts>());
  }
  // Tasks of a block of the team: every `Cluster`th.
  template <class G, int Parts>
  __host__ __device__ static constexpr int block_tasks() {
    return (tasks<G, Parts>() + Cluster - 1) / Cluster;
  }
  // Where a layer leaves most of a cluster's warps idle, each kernel row of a task is a warp's, of
  // the block that owns the task, and their sums meet there. That costs a barrier of the block; in
  // one part it pays where all rows find a warp at once and have some products.
  template <class G, int Parts>
  __host__ __device__ static constexpr bool splits_rows() {
    constexpr int kEights = G::kKernel * G::kKernel * ((G::kChannels + 7) / 8);
    if (Cluster == 1 || G::kFirst) return false;
    if (Parts > 1) return 4 * tasks<G, Parts>() <= kWorkers;
    return block_tasks<G, Parts>() * G::kKernel <= Warps && kEights * G::kPixels >= 36;
  }
  // Where a layer of one output a square leaves half of a team's warps idle, two share a task of
  // two filter tiles: each has half of the products, then one tile of the sums.
  template <class G, int Parts>
  __host__ __device__ static constexpr bool shares_accumulators() {
    return Groups > 1 && Parts == 1 && !G::kFirst && G::kPixels == 1 && G::kChannels % 16 == 0 &&
           filter_tiles<G, Parts>() == 2 && 2 * tasks<G, Parts>() == Warps;
  }
  // Sums that go to the fully connected layer apart.
  template <class G, int Parts>
  __host__ __device__ static constexpr int head_tasks() {
    return tasks<G, Parts>() * (shares_accumulators<G, Parts>() ? 2 : 1);
  }
  template <class G, int Parts>
  __host__ __device__ static constexpr int row_sum_bytes() {
    if (shares_accumulators<G, Parts>()) return Warps * 512;
    return splits_rows<G, Parts>() ? block_tasks<G, Parts>() * G::kKernel * 512 * G::kPixels : 0;
  }
};

// Where everything lies in a block's shared memory, in bytes.
template <class Net, int Parts, int InputParts, class R>
struct SharedLayout {
  template <int I>
  __host__ __device__ static constexpr int weights_at() {
    if constexpr (I == 0)
      return 0;
    else
      return weights_at<I - 1>() + Net::template weight_bytes<I - 1, Parts>();
  }
  // Biases as float32 follow the weights, padded with zeros like the filters.
  static constexpr int kBiases =
      weights_at<Net::kLayers - 1>() + Net::template weight_bytes<Net::kLayers - 1, Parts>();
  template <int I>
  __host__ __device__ static constexpr int bias_at() {
    if constexpr (I == 0)
      return kBiases;
    else
      return bias_at<I - 1>() + 4 * Net::template Layer<I - 1>::kPaddedFilters;
  }
  static constexpr int kWeightBytes = bias_at<Net::kLayers - 1>() + 4 * Net::Last::kPaddedFilters;
  static_assert(kWeightBytes % 16 == 0);

  // A team's part:
  template <int I>
  __host__ __device__ static constexpr int input_bytes() {
    return (I == 0 ? InputParts : Parts) * Net::template input_bytes<I>();
  }
  static constexpr bool kOverlays = R::kOverlays && Net::kLayers == 4;
  template <int I>
  __host__ __device__ static constexpr int input_at() {
    constexpr int kFirst = kOverlays ? 1 : 0;
    if constexpr (I == kFirst)
      return 0;
    else if constexpr (I == 0)
      return input_at<Net::kLayers - 1>();
    else
      return input_at<I - 1>() + input_bytes<I - 1>();
  }
  static constexpr int kStaged =
      input_at<Net::kLayers - 1>() +
      larger(input_bytes<Net::kLayers - 1>(), kOverlays ? input_bytes<0>() : 0);
  // Pixels of a thread, if it has few enough to keep them in registers.
  using Pixels = PixelLayout<typename Net::template Layer<0>>;
  static constexpr int kRuns =
      (Net::kPixels / Pixels::kFloatRun + R::kTeamThreads - 1) / R::kTeamThreads;
  static constexpr bool kKeeps = kRuns * Net::kChannels * Pixels::kFloatRun <= 24;
  static constexpr bool kPrefetchDepth = R::kPrefetchDepth && kKeeps;
  // uint8 pixels as they came, in runs of 8, where there is room: not beside an input of two parts.
  static constexpr bool kStages = InputParts == 1 && Pixels::kRun == 8 && !kPrefetchDepth;
  static constexpr int kAccumulators = kStaged + (kStages ? Net::kChannels * Net::kPixels : 0);
  static constexpr int kAccumulatorRows = R::template head_tasks<typename Net::Last, Parts>();
  static constexpr int kAccumulatorStride = Net::kClasses;
  static constexpr int kScales =
      kAccumulators + round_up(4 * kAccumulatorRows * kAccumulatorStride, 16);
  static constexpr int kLargest = kScales + round_up(8 * Net::kLayers, 16);
  static constexpr int kRowSums = round_up(kLargest + 4 * R::kWarps, 128);
  template <int I = 0>
  __host__ __device__ static constexpr int row_sum_bytes() {
    constexpr int kHere = R::template row_sum_bytes<typename Net::template Layer<I>, Parts>();
    if constexpr (I + 1 < Net::kLayers) {
      return kHere > row_sum_bytes<I + 1>() ? kHere : row_sum_bytes<I + 1>();
    } else {
      return kHere;
    }
  }
  static constexpr int kTeamBytes = kRowSums + row_sum_bytes();
  // One mbarrier a layer, for weights that come by bulk copies.
  static constexpr int kWeightBarriers = R::kKeptWeights ? round_up(kWeightBytes, 16) : 0;
  static constexpr int kFirstTeam =
      round_up(kWeightBarriers + (R::kCluster > 1 ? 8 * Net::kLayers : 0), 128);
  static constexpr int kBytes = kFirstTeam + R::kGroups * kTeamBytes;
};

}  // namespace cnn_engine::cuda::fused
