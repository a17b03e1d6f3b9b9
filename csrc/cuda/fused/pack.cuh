// Weights as the kernel reads them: in the order of tensor-core registers, split into 16-bit parts,
// each layer times a power of two that puts its largest weight near 2^7 (exact, and far from
// float16's ends).
#pragma once

#include "cuda/fused/kernel.cuh"

#ifndef __CUDACC_RTC__
#include <math.h>
#endif

namespace cnn_engine::cuda::fused {

template <class Net>
constexpr int kHeadFloats = Net::Last::kTiles * Net::Last::kFilterTiles * Net::kClasses * 32 * 4;

// Puts value = high + low of one 16-bit element into word `word` of every part of a register
// group: words of part 0, then of part 1.
template <class M, int Parts>
void put(std::uint32_t* words, int part_words, int word, int half, double value) {
  double left = value;
  for (int part = 0; part < Parts; ++part) {
    const float rounded = static_cast<float>(left);
    words[part * part_words + word] |= static_cast<std::uint32_t>(M::bits(rounded)) << (16 * half);
    left -= M::round(rounded);
  }
}

// Lanes `first`, `first` + `step` and so on of every register: all by one thread of the host, or
// each by a thread of a warp.
template <class Net, class M, int Parts>
class Packer {
 public:
  Packer(const Unpacked& from, const Packed& to, int first, int step)
      : from_(from), to_(to), first_(first), step_(step) {}
  void pack() {
    pixels();
    layer<0>();
    if constexpr (Net::kClasses > 0) head();
    *to_.parameters = parameters_;
  }

 private:
  using S = SharedLayout<Net, Parts, 1, Route<1, 1, 1>>;  // the weights' part is the same for all

  // How uint8 pixels enter: as pixel + c, which 16 bits hold exactly, with the scale moved into the
  // weights, where offset / scale is near enough to a multiple of 1/2; else as pixel * scale +
  // offset.
  void pixels() {
    const double scale = from_.scale, offset = from_.offset;
    largest_ = fmax(fabs(offset), fabs(255 * scale + offset));
    const double c = nearbyint(offset / scale * 2) / 2;
    bool exact = scale != 0 && isfinite(c) && fabs(offset - c * scale) <= largest_ * 6e-8;
    for (int pixel = 0; exact && pixel < 256; ++pixel) {
      exact = M::round(static_cast<float>(pixel + c)) == pixel + c;
    }
    *to_.exact_pixels = exact;
    stored_ = exact ? 1.0 : storing_scale(static_cast<float>(largest_));
    first_factor_ = exact ? scale : 1.0;
    parameters_.multiply = static_cast<float>(exact ? 1.0 : scale * stored_);
    parameters_.add = static_cast<float>(exact ? c : offset * stored_);
  }

  template <int I>
  void layer() {
    using G = typename Net::template Layer<I>;
    const LayerWeights& from = from_.layers[I];
    constexpr int kKernelOffsets = G::kChannels * G::kKernel * G::kKernel;
    double largest = 0, gain = 0, bias = 0;
    for (int k = 0; k < G::kFilters; ++k) {
      double sum = 0;
      for (int i = 0; i < kKernelOffsets; ++i) {
        const double w = fabs(double{from.weight[k * kKernelOffsets + i]});
        largest = fmax(largest, w);
        sum += w;
      }
      gain = fmax(gain, sum);
      if (from.bias != nullptr) bias = fmax(bias, fabs(double{from.bias[k]}));
    }
    const double input_factor = I == 0 ? first_factor_ : 1.0;
    largest *= fabs(input_factor);
    const double factor = largest > 0 && isfinite(largest) ? ldexp(1.0, 7 - ilogb(largest)) : 1.0;

    unsigned char* to = to_.weights + S::template weights_at<I>();
    const auto weight = [&](int k, int c, int r, int s) {
      const bool inside = k < G::kFilters && c < G::kChannels && r >= 0 && r < G::kKernel &&
                          s >= 0 && s < G::kKernel;
      return inside ? from.weight[((k * G::kChannels + c) * G::kKernel + r) * G::kKernel + s] *
                          input_factor * factor
                    : 0.0;
    };
    if constexpr (I == 0)
      pack_pixels<G>(to, weight);
    else
      pack_planes<G>(to, weight);
    if (from.bias != nullptr) {
      float* biases = reinterpret_cast<float*>(to_.weights + S::template bias_at<I>());
      for (int k = 0; k < G::kFilters; ++k) biases[k] = from.bias[k];
    }

    // largest_ bounds what the layer reads; here it becomes what bounds its output.
    Parameters& p = parameters_;
    p.gain[I] = static_cast<float>(gain * 1.0001);  // rounded up
    p.bias[I] = static_cast<float>(bias * 1.0001);
    p.unscale[I] = static_cast<float>(1.0 / (factor * input_factor));
    const double unscale = 1.0 / (factor * stored_);
    largest_ = G::kActivation == Activation::tanh ? 1.0 : largest_ * gain * 1.0001 + bias;
    stored_ = storing_scale(static_cast<float>(largest_));
    p.scale[I] = Scale{static_cast<float>(unscale), static_cast<float>(stored_)};
    if constexpr (I + 1 < Net::kLayers) layer<I + 1>();
  }

  // As sum_pixels reads it: [slab][dx, filter tile][lane][part][2 words].
  template <class G, class Weight>
  void pack_pixels(unsigned char* to, const Weight& weight) const {
    using L = PixelLayout<G>;
    const auto tile =
        [&](int slab,
            auto&& position) {  // position(slot) -> window row less dy, word of the row
          for (int j = 0; j < L::kSlabTiles; ++j) {
            const int dx = j / G::kFilterTiles;
            for (int lane = first_; lane < 32; lane += step_) {
              std::uint32_t* words =
                  reinterpret_cast<std::uint32_t*>(to + (slab * L::kSlabTiles + j) * 256 * Parts) +
                  lane * 2 * Parts;
              const int k = j % G::kFilterTiles * 8 + lane / 4;
              for (int b = 0; b < 2; ++b) {
                int r = 0, word = 0;
                if (!position(lane % 4 + 4 * b, r, word)) continue;
                for (int half = 0; half < 2; ++half) {
                  const int element = 2 * word + half;  // of the window's row: column, channel
                  put<M, Parts>(words, 2, b, half,
                                weight(k, element % L::kChannels, r, element / L::kChannels - dx));
                }
              }
            }
          }
        };
    for (int r = 0; r < G::kKernel; ++r) {
      for (int step = 0; step < L::kFullSteps; ++step) {
        tile(L::slab_full(r, step), [&](int slot, int& row, int& word) {
          row = r;
          word = L::full_word(step, slot);
          return word < L::kWindowWords;
        });
      }
    }
    for (int dy = 0; dy < L::kSides; ++dy) {
      for (int step = 0; step < L::kLeftSteps; ++step) {
        tile(L::slab_left(dy, step), [&](int slot, int& row, int& word) {
          const int index = step * 8 + slot;
          row = L::left_row(index) - dy;
          word = L::left_word(index);
          return index < L::kLeftSlots;
        });
      }
    }
  }

  // As sum_planes reads it: [row][column]{[step of 16][filter tile][lane][part][2 words],
  // [filter tile][lane][part][1 word]}.
  template <class G, class Weight>
  void pack_planes(unsigned char* to, const Weight& weight) const {
    using L = PlaneLayout<G>;
    for (int r = 0; r < G::kKernel; ++r) {
      for (int s = 0; s < G::kKernel; ++s, to += L::template offset_bytes<Parts>()) {
        for (int f = 0; f < G::kFilterTiles; ++f) {
          for (int lane = first_; lane < 32; lane += step_) {
            const int k = 8 * f + lane / 4, t = lane % 4;
            for (int step = 0; step < L::kSteps16; ++step) {
              constexpr bool kMatrices = Parts == 1 && L::kForWarpgroups;
              std::uint32_t* words = reinterpret_cast<std::uint32_t*>(
                                         to + (step * G::kFilterTiles + f) * 256 * Parts) +
                                     lane * (kMatrices ? 1 : 2 * Parts);
              for (int i = 0; i < 4; ++i) {
                put<M, Parts>(words, 2, i / 2 * (kMatrices ? 32 : 1), i % 2,
                              weight(k, 16 * step + i / 2 * 8 + 2 * t + i % 2, r, s));
              }
            }
            if constexpr (L::kSteps8 > 0) {
              std::uint32_t* words =
                  reinterpret_cast<std::uint32_t*>(
                      to + (L::kSteps16 * G::kFilterTiles * 256 + f * 128) * Parts) +
                  lane * Parts;
              for (int i = 0; i < 2; ++i) {
                put<M, Parts>(words, 1, 0, i, weight(k, 16 * L::kSteps16 + 2 * t + i, r, s));
              }
            }
          }
        }
      }
    }
  }

  // As hand_on reads it: [tile][filter tile][class][lane] of the 4 values that a lane holds.
  void head() {
    using G = typename Net::Last;
    const LayerWeights& from = from_.layers[Net::kLayers];
    for (int m = first_; m < Net::kClasses && from.bias != nullptr; m += step_) {
      to_.head_bias[m] = from.bias[m];
    }
    for (int tile = 0; tile < G::kTiles; ++tile) {
      for (int f = 0; f < G::kFilterTiles; ++f) {
        for (int m = 0; m < Net::kClasses; ++m) {
          for (int lane = first_; lane < 32; lane += step_) {
            float* to =
                to_.head + (((tile * G::kFilterTiles + f) * Net::kClasses + m) * 32 + lane) * 4;
            for (int i = 0; i < 4; ++i) {
              const int position = tile * 16 + lane / 4 + i / 2 * 8,
                        channel = 8 * f + 2 * (lane % 4) + i % 2;
              if (channel >= G::kFilters || position >= G::kPositions) continue;
              to[i] = from.weight[m * Net::kFeatures + channel * G::kPositions + position];
            }
          }
        }
      }
    }
  }

  const Unpacked& from_;
  const Packed to_;
  const int first_, step_;
  Parameters parameters_ = {};
  double largest_ = 0, stored_ = 1, first_factor_ = 1;
};

}  // namespace cnn_engine::cuda::fused
