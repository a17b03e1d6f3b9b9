#include "cpu/fused/pack.h"

#include <cstring>
#include <vector>

#include "cpu/fused/block.h"
#include "cpu/fused/kernel_transform.h"

namespace cnn_engine::cpu::fused {
namespace {

// Calls visit(first channel, channels) for each block.
template <typename Visit>
void for_each_block(int pitch, int lanes, const Visit& visit) {
  for (int k = 0; k < pitch;) {
    const int channels = block_size((pitch - k) / lanes) * lanes;
    visit(k, channels);
    k += channels;
  }
}

// Of four input channels' weights for multiply_20(), where that of channel c for filter k is.
std::size_t position_of_20(int c, int k) {
  return k < 16 ? c * 16 + k : 64 + (k - 16 + 4 - c) % 4 * 4 + c;
}

}  // namespace

std::unique_ptr<Buffer> pack_winograd(const ConvStep& s, const float* weight) {
  double gh[8][5] = {}, gw[8][5];
  if (s.along_rows()) {
    for (int i = 0; i < s.r; ++i) gh[i][i] = 1;
  } else {
    kernel_transform(s.tile_h, s.r, gh);
  }
  kernel_transform(s.tile_w, s.s, gw);
  const std::size_t rows = s.along_rows() ? s.r : s.tile_h + s.r - 1;
  const std::size_t columns = s.tile_w + s.s - 1;
  const std::size_t frequencies = rows * columns;
  auto packed = std::make_unique<Buffer>(frequencies * s.c * s.k_pitch);
  float* block = packed->data();
  std::vector<double> half(rows * s.s);
  const auto pack_block = [&](int first, int channels) {
    const bool is_20 = s.ends_in_20 && first + channels == s.k_pitch;
    for (int k = first; k < first + channels && k < s.k; ++k) {
      for (int c = 0; c < s.c; ++c) {
        const float* g = weight + (std::size_t(k) * s.c + c) * s.r * s.s;
        for (std::size_t i = 0; i < rows; ++i) {
          for (int x = 0; x < s.s; ++x) {
            double sum = 0;
            for (int y = 0; y < s.r; ++y) sum += gh[i][y] * g[y * s.s + x];
            half[i * s.s + x] = sum;
          }
        }
        for (std::size_t f = 0; f < frequencies; ++f) {
          double sum = 0;
          for (int x = 0; x < s.s; ++x) sum += half[f / columns * s.s + x] * gw[f % columns][x];
          const std::size_t position = s.planar ? c * frequencies + f : f * s.c + c;
          const std::size_t to = is_20 ? (position - c % 4) * 20 + position_of_20(c % 4, k - first)
                                       : position * channels + (k - first);
          block[to] = static_cast<float>(sum);
        }
      }
    }
    block += frequencies * s.c * channels;
  };
  if (s.planar) {
    for (int k = 0; k < s.k_pitch; k += s.lanes) pack_block(k, s.lanes);
  } else {
    for_each_block(s.k_pitch, s.lanes, pack_block);
  }
  return packed;
}

namespace {

// Calls put(block's first position, position, channel in the block, channels of the block, value)
// for every weight of a convolution whose positions are (kernel offset, c) with `c_pitch` of c, and
// (c, kernel offset) of a planar image.
template <typename Put>
void for_each_direct(const ConvStep& s, const float* weight, int c_pitch, const Put& put) {
  const std::size_t kernel_offsets = std::size_t(s.r) * s.s;
  std::size_t start = 0;
  for_each_block(s.k_pitch, s.lanes, [&](int first, int channels) {
    for (int k = first; k < first + channels && k < s.k; ++k) {
      for (int c = 0; c < s.c; ++c) {
        for (std::size_t kernel_offset = 0; kernel_offset < kernel_offsets; ++kernel_offset) {
          put(start, s.planar ? c * kernel_offsets + kernel_offset : kernel_offset * c_pitch + c,
              k - first, channels,
              weight[(std::size_t(k) * s.c + c) * kernel_offsets + kernel_offset]);
        }
      }
    }
    start += kernel_offsets * c_pitch * channels;
  });
}

template <typename Put>
void for_each_linear(const LinearStep& s, const Layout& in, const float* weight, const Put& put) {
  std::size_t start = 0;
  for_each_block(s.out_pitch, s.lanes, [&](int first, int channels) {
    for (int m = first; m < first + channels && m < s.out_features; ++m) {
      const float* row = weight + std::size_t(m) * in.c * in.h * in.w;
      for (int c = 0; c < in.c; ++c) {
        for (int y = 0; y < in.h; ++y) {
          for (int x = 0; x < in.w; ++x) put(start, in.at(y, x) + c, m - first, channels, *row++);
        }
      }
    }
    start += std::size_t(s.in_pitch) * channels;
  });
}

// Puts values where they belong in a buffer of floats, or of bfloat16 with pairs of positions
// together.
auto put_float(Buffer& buffer) {
  return [data = buffer.data()](std::size_t start, std::size_t position, int channel, int channels,
                                float value) {
    data[start + position * channels + channel] = value;
  };
}

auto put_bfloat16(Buffer& buffer) {
  return [data = reinterpret_cast<std::uint16_t*>(buffer.data())](
             std::size_t start, std::size_t position, int channel, int channels, float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
    data[start + (position / 2 * channels + channel) * 2 + position % 2] =
        static_cast<std::uint16_t>(bits);
  };
}

}  // namespace

std::unique_ptr<Buffer> pack_direct(const ConvStep& s, const float* weight) {
  auto packed = std::make_unique<Buffer>(std::size_t(s.r) * s.s * s.c * s.k_pitch);
  for_each_direct(s, weight, s.c, put_float(*packed));
  return packed;
}

std::unique_ptr<Buffer> pack_direct_bfloat16(const ConvStep& s, const float* weight) {
  const int even = (s.c + 1) / 2 * 2;
  auto packed = std::make_unique<Buffer>(std::size_t(s.r) * s.s * even * s.k_pitch / 2);
  for_each_direct(s, weight, even, put_bfloat16(*packed));
  return packed;
}

std::unique_ptr<Buffer> pack_linear(const LinearStep& s, const Layout& in, const float* weight) {
  auto packed = std::make_unique<Buffer>(std::size_t(s.in_pitch) * s.out_pitch);
  for_each_linear(s, in, weight, put_float(*packed));
  return packed;
}

std::unique_ptr<Buffer> pack_linear_bfloat16(const LinearStep& s, const Layout& in,
                                             const float* weight) {
  auto packed = std::make_unique<Buffer>(std::size_t(s.in_pitch) * s.out_pitch / 2);
  for_each_linear(s, in, weight, put_bfloat16(*packed));
  return packed;
}

std::unique_ptr<Buffer> pack_bias(const float* bias, int count, int pitch) {
  auto packed = std::make_unique<Buffer>(pitch);
  for (int k = 0; bias && k < count; ++k) packed->data()[k] = bias[k];
  return packed;
}

}  // namespace cnn_engine::cpu::fused
