// What the fused kernels need to know: plain structs, filled by plan.cpp, read by code that is
// compiled once for each instruction set (and so holds no standard containers, see
// runtime/shape.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/fused/weight_bound.h"
#include "runtime/shape.h"

namespace cnn_engine::cpu::fused {

enum class Activation { none, relu, tanh };

// One image's activations: [rows, cols, pitch] floats, channels innermost. The image's own pixel
// (y, x) is at (y + top, x + left); what surrounds it is zero, is there for the padding and the
// whole tiles of the step that reads it, and is never written. So are the channels from c to pitch.
struct Layout {
  int c = 0, h = 0, w = 0;
  int pitch = 0;
  int top = 0, left = 0;
  int rows = 0, cols = 0;

  CNN_ENGINE_INLINE std::size_t size() const { return std::size_t(rows) * cols * pitch; }
  CNN_ENGINE_INLINE std::size_t at(int y, int x) const {
    return (std::size_t(y + top) * cols + (x + left)) * pitch;
  }
};

// Columns of a tile before an output's window, at most.
constexpr int kBefore = 3;

// The first layer's image where it has few channels: [c, rows, 4, pitch], a row's pixels dealt out
// by column modulo 4, so that SIMD lanes hold the same position of neighbouring tiles, 4 columns
// apart. Pixel (y, x) is at row y + top, phase x % 4, position x / 4 + margin; the rest is zero.
// After it lie the pixels' sums over channels of |x| and of x^2, see sums_at: [2, rows, sums_step,
// sums_pitch], columns (padding included) dealt out by `sums_step`; then the image as it is, its
// padding included: [c, rows, plain_pitch].
struct PlanarLayout {
  int c = 0, h = 0, w = 0;
  int pitch = 0;
  int top = 0, left = 0, margin = 0;
  int rows = 0;
  int sums_step = 1, sums_pitch = 0;

  CNN_ENGINE_INLINE std::size_t plane() const { return std::size_t(rows) * 4 * pitch; }
  CNN_ENGINE_INLINE std::size_t size() const { return plain() + c * rows * plain_pitch(); }
  CNN_ENGINE_INLINE std::size_t plain() const { return c * plane() + 2 * squares(); }
  CNN_ENGINE_INLINE std::size_t plain_pitch() const { return std::size_t(w) + 2 * left; }
  // Of row `row`, padding included: the first column's |x|; x^2 is squares() further.
  CNN_ENGINE_INLINE std::size_t sums_at(int row) const {
    return c * plane() + std::size_t(row) * sums_step * sums_pitch + kBefore;
  }
  CNN_ENGINE_INLINE std::size_t squares() const {
    return std::size_t(rows) * sums_step * sums_pitch;
  }
};

// What window_bound.h asks of windows of a tile, or of the four of a pooled output together: an
// output is Winograd's where
//
//   (sum of factors and l(x))^2 >= spread e(window) + sum of rows, columns and e(x) of the tile
struct TileBound {
  WindowBound window;
  float rows[4][8];  // by the output's row and the input's
  // By the input's column less that of the window's first, and kBefore; by lane, of a row's
  // outputs.
  float columns[kBefore + 8][16];
};

// Outputs that are computed directly together, beside Winograd's tiles.
constexpr int kDirectOutputs = 64;
// Rows of tiles that are transformed together, of tiles of rows.
constexpr int kRowsTogether = 8;

// conv2d, an activation, and a 2x2 max-pool where the next layer is one (`pool`).
struct ConvStep {
  int c, k, r, s, stride_h, stride_w;
  int conv_h, conv_w;  // the convolution's output, before the pool
  Layout in, out;      // the input's padding is inside `in`
  Activation activation;
  bool pool;
  int lanes;            // SIMD lanes over output channels
  int k_pitch;          // k rounded up to lanes
  const float* weight;  // packed, see pack.h
  int pair_pitch;       // bfloat16: channels of a pixel of the rounded input, an even number
  const float* bias;    // [k_pitch]

  // Winograd only: tiles of tile_h x tile_w outputs, tiles_y x tiles_x of them; 2 x 4 are tiles of
  // rows, whose columns are not transformed
  int tile_h, tile_w, tiles_y, tiles_x;
  int group_rows;   // rows of tiles that are transformed together
  bool ends_in_20;  // the last block, of three narrow vectors, has 20 channels or fewer, and is
                    // packed for multiply_20()
  bool planar;      // the input is `image`, not `in`
  PlanarLayout image;
  int tile_lanes;                // planar: SIMD lanes over tiles
  int tiles_pitch;               // tiles_x, planar rounded up to those lanes
  int v_channels;                // channels of the transformed input as it lies in scratch
  std::size_t v_pitch, m_pitch;  // floats between two frequencies
  std::size_t v_offset, m_offset, p_offset, b_offset;  // of the parts of scratch, in floats
  TileBound bound;
  const float* direct;  // weights of outputs that the bound leaves out, packed as pack_direct does
  int sums_pitch;       // of what is measured of an input row, of columns dealt out by step()

  CNN_ENGINE_INLINE bool along_rows() const { return tile_h < tile_w; }
  // Outputs of the convolution on a side of one of the step.
  CNN_ENGINE_INLINE int step() const { return pool ? 2 : 1; }
  // Of scratch: rows of what is measured, and what it is made of.
  CNN_ENGINE_INLINE std::size_t measured() const {
    return std::size_t(3 * (tile_h + r - 1) + 2 * step()) * sums_pitch;
  }
};

struct PoolStep {
  int r, s, stride_h, stride_w, pad_h, pad_w;
  Layout in, out;
  Activation activation;
};

// linear and an activation, over `in_pitch` values an image that include zeros between channels.
struct LinearStep {
  int in_pitch, out_features, out_pitch, lanes;
  Activation activation;
  int rounded_pitch;    // bfloat16: between two rounded images
  const float* weight;  // packed, see pack.h
  const float* bias;    // [out_pitch]
};

struct Pixels {
  float scale, offset;
  bool is_uint8;
};

// The kernels of one instruction set.
struct FusedKernels {
  int wide, narrow;         // lanes that convolutions and linear are built for
  int channel_lanes;        // what the pitch of activations must be a multiple of
  double product_rounding;  // kProductRounding of vector.h
  // Rows [begin, end) of one image.
  void (*to_planar)(const void* image, const Pixels&, const PlanarLayout&, float* out, int begin,
                    int end);
  void (*to_channels_last)(const void* image, const Pixels&, const Layout&, float* out, int begin,
                           int end);
  void (*winograd)(const ConvStep&, const float* in, float* out, float* scratch, int begin,
                   int end);  // rows of tiles
  void (*direct)(const ConvStep&, const float* in, float* out, float* scratch, int begin,
                 int end);  // output rows
  void (*max_pool)(const PoolStep&, const float* in, float* out, int begin,
                   int end);  // output rows
  void (*activate)(Activation, float* values, std::size_t count);
  // n images, `stride` floats apart; output blocks [begin, end).
  void (*linear)(const LinearStep&, const float* in, std::size_t in_stride, float* out,
                 std::size_t out_stride, float* scratch, int n, int begin, int end);
  void (*flatten)(const Layout&, const float* in, float* out);  // to [c, h, w]
  void (*softmax)(const float* in, float* out, int classes);
  bool (*finite)(const float* values, std::size_t count);
  double (*fma_burst)(std::int64_t iterations);  // returns the FLOPs that it did
};

}  // namespace cnn_engine::cpu::fused
