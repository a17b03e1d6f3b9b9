// One launch of conv2d_nhwc on CUDA: what it computes, and what the host chooses for it.
#pragma once

#include <cstdint>

#include "ops/conv2d_nhwc.h"

namespace cnn_engine::cuda::nhwc {

constexpr int kTiles = 7;

// Terms of a step: 128 bytes of a row of x.
constexpr int step_terms(ElementType compute_type) {
  return compute_type == ElementType::float32 || compute_type == ElementType::tf32 ? 32 : 64;
}

struct Gemm {
  const void* x;  // as the operands lie in memory; so do the residual and y, where they are rounded
  const void* packed;
  const float *bias, *scale, *shift;
  const void* residual;
  void* y;
  bool residual_is_rounded, y_is_rounded;
  Overflow overflow;
  Conv2dShape shape;      // of this part of the batch
  int channels, filters;  // of a group
  int out_h, out_w;
  int x_pitch, y_pitch, residual_pitch;
  int rows;           // positions of the output
  int terms;          // of a sum
  int steps;          // ceil(terms / step_terms)
  int steps_a_block;  // of a cluster's part
  int split;          // blocks of a cluster
  int first_group;    // of a launch
  bool scale_per_image;
  float floor, alpha, beta;
  UnaryFunction activation;
};

// How the terms come: 16 bytes of neighbouring channels at once, these with a prologue, four
// channels of 16 bits, or one by one.
enum class Reads { vectors, prologue, fours, single };

struct Choice {
  int tile;   // of conv2d_nhwc.cuh's list
  int split;  // blocks that share a tile's terms
};

// Tiles that are compiled for a way of reading. Splitting float32 leaves no room for the largest.
constexpr bool is_compiled(int tile, ElementType compute_type, Reads reads) {
  if (compute_type == ElementType::float32 && tile == 5) return false;
  if (reads == Reads::vectors) return true;
  if (reads == Reads::prologue) return tile < 3 || tile == 4;
  if (reads == Reads::fours) return step_terms(compute_type) == 64 && (tile < 2 || tile == 4);
  return tile < 2;
}

// The fastest choice by a model of its time: the same on every GPU of as many multiprocessors.
// Those after it, to be measured, have ranks from 1 on. `most`: blocks of a cluster.
Choice choose(const Gemm& p, ElementType compute_type, Reads reads, int multiprocessors, int most,
              int rank);

// Names for what is multiplied; conv2d_nhwc_{float32,tf32,float16,bfloat16}.cu have each by itself.
struct Split;
struct Tf32;
struct Float16;
struct Bfloat16;

template <typename Operand>
void launch_gemm(const Gemm& p, Reads reads, const Choice& choice, Stream stream);
// Packs weights for `channels` of a group, of which those past the shape's are zeros.
template <typename Operand>
void launch_pack(const float* weight, void* packed, const Conv2dShape& shape, int channels,
                 int units, Stream stream);

}  // namespace cnn_engine::cuda::nhwc
