// One launch of conv2d_nhwc as wgmma multiplies: what it computes, and what the host chooses for
// it.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cuda/sm80/tf32.cuh"
#include "ops/conv2d_nhwc.h"
#include "ops/types.h"
#include "runtime/check.h"

namespace cnn_engine::cuda::wgmma {

constexpr int kFilters = 64;                // of a unit of packed weights
constexpr int kUnitBytes = kFilters * 128;  // which are so much of each filter

// count / by, rounded up.
constexpr int divided(std::int64_t count, int by) {
  return static_cast<int>((count + by - 1) / by);
}

// A convolution's filters and those that fill up their last unit.
inline int padded_filters(const Conv2dShape& shape) {
  return divided(shape.k, kFilters) * kFilters;
}

// A product over so many channels, as its weights are packed.
inline Conv2dShape gemm_over(int channels, int filters) {
  return {1, channels, 1, 1, filters, 1, 1, 1, 1, 0, 0};
}

// Whether a device has wgmma, and the kernels were compiled for it.

constexpr bool has_16_bits(ElementType compute_type) {
  return compute_type == ElementType::float16 || compute_type == ElementType::bfloat16;
}

// Calls body(a null pointer to the type that is multiplied).
template <typename Body>
void with_type(ElementType compute_type, const Body& body) {
  switch (compute_type) {
    case ElementType::float16:
      return body(static_cast<__half*>(nullptr));
    case ElementType::bfloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    case ElementType::tf32:
      return body(static_cast<Tf32*>(nullptr));
    case ElementType::float32:
      return body(static_cast<float*>(nullptr));
    default:
      refuse(compute_type);
  }
}

// What compensated() (conv2d_nhwc_wgmma_split.cuh) needs to give back so much on average, in 2^-24
// of a sum: of leading bits Benford's law tells how many sums grow.
constexpr float cut_off_for(float lost) {
  constexpr float kTwiceLog2E = 2.885390f, kGrowing = 7.0f / 8;
  return (0.5f + lost / (kGrowing * kTwiceLog2E)) * 0x1p-24f;
}

// The images that steps of a sum read, as a convolution's window goes over them.
struct Source {
  bool tiled;  // they are rows of channels: the copy engine need not know of images
  int stride_h, stride_w, pad_top, pad_left, dilation_h, dilation_w;
  int offsets_per_row, offsets_per_column;  // the kernel's width and height
  int chunks;                               // steps of a kernel offset's channels

  CNN_ENGINE_INLINE int own_steps() const { return offsets_per_row * offsets_per_column * chunks; }
};

struct Gemm : Source {
  const char* packed;
  const float *bias, *scale, *shift;
  const float* filter_scales;  // of float32: what each filter's sums are multiplied by
  float cut_off;               // of float32: compensated()'s
  const void* residual;
  void* y;
  bool residual_is_rounded, y_is_rounded;  // stored as what is multiplied, not as float32
  bool in_pieces;  // y and the residual are read and written 16 bytes at once
  int rows;        // positions of the output
  bool scale_per_image;
  float floor;
  int channels, filters, y_pitch, residual_pitch;
  int out_h, out_w;
  int steps;          // of all sources
  int second_filter;  // the filter from which on sums are the second source's; beyond all: none is
  int first_steps;    // of sums before that filter
  int ahead;          // steps that are asked for before the wait for the kernel before
  bool holds;         // the next kernel starts only behind that wait
  bool both;          // there is a second source
  int steps_a_block;  // of a cluster's part
  int split, log_split;  // blocks of a cluster, 1 << log_split
  int stages;
  int slots, tiles, filter_tiles;       // of persistent blocks
  int lines;                            // of the image, of a tile that is its rows
  int patches_a_row, patches_a_column;  // of the image, of tiles that are patches of it
  int residual_rows;  // that a block copies to shared memory with the copy engine; 0: none
  bool at_once;       // clamped results may leave as float32, as products are held
  bool in_fragments;  // the end is computed as products are held: a clamp between low and high
  bool may_persist;   // blocks may be persistent, and the epilogue is always computed so
  bool in_rows;  // tiles may be parts of the image's rows or patches of it, whose end is so too
  bool pools;    // y has the greatest of each two rows' two positions
  float low, high;
  // In shared memory, of what the block has made, in the ring's place, and behind the ring of the
  // residual, as the copy engine brings it, what the cluster's other blocks send, of float32 what
  // positions' sums are multiplied by, and the barriers.
  struct {
    int made, residual, received, scales, barriers;
  } at;
  float alpha, beta;
  UnaryFunction activation;
  Overflow overflow;
  Source second;  // of another convolution, whose sum is added to the first's, or beside it

  // The steps of a tile's sums, as if all sources' followed each other. Kernels that know that
  // there is one source alone have nothing to ask.
  struct Steps {
    int first, end;
  };
  template <bool Both>
  CNN_ENGINE_INLINE Steps steps_at(int first_filter) const {
    if constexpr (!Both) return {0, steps};
    const bool beyond = first_filter >= second_filter;
    return {beyond ? first_steps : 0, beyond ? steps : first_steps};
  }
  // Blocks of packed weights, 64 filters of a step, that come before a tile's.
  template <bool Both>
  CNN_ENGINE_INLINE int weights_at(int first_filter) const {
    if constexpr (!Both) return first_filter / kFilters * steps;
    const int more = first_filter - second_filter, beyond = more > 0 ? more / kFilters : 0;
    return (first_filter / kFilters - beyond) * first_steps + beyond * (steps - first_steps);
  }
  // Whether tiles of so many filters have one source's alone, where any has.
  bool fits(int tile_filters) const {
    return second_filter >= filters || second_filter % tile_filters == 0;
  }
  // Of the tile that has most, and on average.
  int most_steps() const { return std::max(first_steps, steps - first_steps); }
  double mean_steps() const {
    const double first = std::min(second_filter, filters);
    return (first * first_steps + (filters - first) * (steps - first_steps)) / filters;
  }

  bool has_prologue() const {
    return scale || shift || floor > -std::numeric_limits<float>::infinity();
  }
};

// What the copy engine reads a source from.
struct SourceImages {
  const void* x;      // [N, H, W, pitch], or null
  Conv2dShape shape;  // of this part of the batch
  int pitch;
};
struct Sources {
  SourceImages first, second;
};

// Tiles: 64 filters for each group, a warpgroup, and so many positions; whether they are compiled
// with something before the products, too, and for two sources: not where persistent blocks are
// faster.
struct TileShape {
  int groups, columns;
  bool prologue = false;
  bool split = false;  // of float32
  bool both = true;

  constexpr bool is_compiled(bool with_prologue, bool with_both) const {
    return (prologue || !with_prologue) && (both || !with_both);
  }

  // Whether it leaves no registers to a second block of a multiprocessor.
  constexpr bool is_alone() const { return split && groups * columns > 64; }

  constexpr int stage_bytes() const { return 128 * (groups * kFilters + columns); }
};
constexpr TileShape kShapes[] = {{1, 16, true},
                                 {1, 24},
                                 {1, 32, true},
                                 {1, 56},
                                 {1, 64, true},
                                 {1, 104},
                                 {1, 128, true, false, false},
                                 {2, 64, true},
                                 {2, 128}};
constexpr int kTiles = sizeof(kShapes) / sizeof(kShapes[0]);
// Of tf32, and of float32.
constexpr TileShape kTf32Shapes[] = {
    {1, 16}, {1, 32, true}, {1, 64, true}, {1, 128, true, false, false}, {2, 64}, {2, 128}};
constexpr TileShape kSplitShapes[] = {
    {1, 32, true, true}, {1, 64, true, true}, {2, 128, false, true}};

// A kind of operands' tiles.
struct Shapes {
  const TileShape* at;
  int count;
};
template <typename T>
constexpr Shapes kShapesOf =
    std::is_same_v<T, Tf32>    ? Shapes{kTf32Shapes, sizeof(kTf32Shapes) / sizeof(TileShape)}
    : std::is_same_v<T, float> ? Shapes{kSplitShapes, sizeof(kSplitShapes) / sizeof(TileShape)}
                               : Shapes{kShapes, kTiles};

// Tiles of persistent blocks, and how many blocks of how many stages and slots a multiprocessor
// has, slots of 16 bits: of 32 it has half as many.
struct PersistentShape {
  int groups, columns, blocks, stages, slots;
};
constexpr PersistentShape kPersistent[] = {{1, 64, 3, 3, 2}, {1, 128, 2, 3, 2}, {2, 128, 1, 5, 2}};
constexpr int kPersistentTiles = sizeof(kPersistent) / sizeof(kPersistent[0]);

// Positions of a tile that a block of a cluster adds up, in eights, and what others send it for
// that.
constexpr int own_rows(int columns, int split) { return (columns / 8 + split - 1) / split * 8; }
constexpr int received_bytes(int groups, int columns, int split) {
  return (split - 1) * own_rows(columns, split) * groups * kFilters * 4;
}

// Tiles that are parts of the image's rows, or several of its rows, each with two columns behind it
// that are not kept, whose channels the blocks of a cluster may share; how many blocks a
// multiprocessor has.
struct RowsShape {
  int groups, columns, blocks;
  bool several = false;
};
constexpr RowsShape kRows[] = {{1, 56, 2}, {2, 64, 1, true}};
constexpr int kRowsTiles = sizeof(kRows) / sizeof(kRows[0]);
constexpr int kRowsSplit = 2;

// How many rows of images of that size a tile is; 0: none, or less than three quarters of its
// columns were kept.
constexpr int lines_of(const RowsShape& shape, int out_h, int out_w) {
  if (!shape.several) return out_w % shape.columns == 0 ? 1 : 0;
  const int lines = (shape.columns + 2) / (out_w + 2);
  const bool fits = lines > 1 && out_w % 2 == 0 && out_h % lines == 0;
  return fits && 4 * lines * out_w >= 3 * shape.columns ? lines : 0;
}

// Tiles that are patches of the image, eight positions of each of so many rows, of 64 filters.
// Blocks of a cluster may share the channels of the smaller ones.
constexpr int kPatchRows[] = {28, 14};
constexpr int kPatches = sizeof(kPatchRows) / sizeof(kPatchRows[0]), kPatchSplit = 8;

constexpr int log2_of(int power) { return power > 1 ? 1 + log2_of(power / 2) : 0; }

enum class Form { one_tile, persistent, rows, patches };

struct Choice {
  Form form;
  int tile;    // of kShapesOf, kPersistent, kRows or kPatchRows
  int split;   // blocks that share a tile's steps
  int stages;  // that a block has room for
  int multiprocessors;
};

// The fastest choice by a model of its time: the same on every GPU of as many multiprocessors.
// Those after it, to be measured, have ranks from 1 on.
Choice choose(const Gemm& p, ElementType compute_type, int multiprocessors, int rank);

// What that model says in microseconds: of the fastest choice, and of a max pool of 2x2 by itself
// that reads and writes so many bytes.
double least_time(const Gemm& p, ElementType compute_type, int multiprocessors);
double pool_time(double bytes);
// Of a convolution's fastest choice with a function behind it, of results stored as what is
// multiplied; of the residual, that there is one.
double gemm_time(const Conv2dShape& shape, const void* residual, UnaryFunction function,
                 ElementType compute_type, int multiprocessors);

// For __half, __nv_bfloat16, Tf32 and float, whose products are exact, in files of their own.
template <typename T>
void launch_gemm(const Sources& from, const Gemm& p, const Choice& choice, Stream stream);
// Finds what filters' sums are multiplied by, of float32: with `adds` of those whose scales are
// there already, to whose sums these add.
template <typename T>
void launch_scales(const float* weight, float* scales, const Conv2dShape& shape, bool adds,
                   Stream stream);
// Packs weights whose kernel offsets have `chunks` steps, which are those from `first_step` on of
// `steps`.
template <typename T>
void launch_pack(const float* weight, void* packed, const float* scales, const Conv2dShape& shape,
                 int chunks, int first_step, int steps, Stream stream);
// Those of one convolution, as 16 bits.
template <typename T>
void launch_pack(const float* weight, void* packed, const Conv2dShape& shape, int chunks,
                 Stream stream) {
  launch_pack<T>(weight, packed, nullptr, shape, chunks, 0, shape.r * shape.s * chunks, stream);
}

}  // namespace cnn_engine::cuda::wgmma
