// fused on the CPU: a whole network, an image or a few at a time, with everything between the image
// and its probabilities in the core's own caches (--variant fused).
//
//   output[n] = the description's layers, in order, over images[n]
//
// Layouts: images [N, C, H, W], uint8 (entering as x * scale + offset) or float32; output [N,
// outputs] float32; both C-contiguous, images read in place.
//
// Square 5x5 and 3x3 convolutions of stride 1 run as Winograd's where that is fewer
// multiplications, all others directly; activations and 2x2 pools are part of the convolution
// before them. Results are bit-identical for any number of threads and any N, and differ between
// instruction sets.
//
// NaN and infinity: a float32 image that holds one is left out, for whoever calls to have computed
// layer by layer. Every output is within the bound of its own window (cpu/window_bound.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ops/network.h"

namespace cnn_engine::cpu {

enum class FusedDtype { float32, bfloat16 };

class FusedNetwork {
 public:
  // Copies and packs the weights for the instruction set that is selected now.
  // Throws std::invalid_argument with why_not's reason.
  FusedNetwork(const NetworkDescription& description, FusedDtype dtype);
  ~FusedNetwork();
  FusedNetwork(FusedNetwork&&) noexcept;
  FusedNetwork& operator=(FusedNetwork&&) noexcept;
  FusedNetwork(const FusedNetwork&) = delete;
  FusedNetwork& operator=(const FusedNetwork&) = delete;

  // Why this CPU, with the instruction set that is selected now, does not run the network, or "".
  static std::string why_not(const NetworkDescription& description, FusedDtype dtype);

  // May be called from several threads at once; they share the CPUs. No more threads work for one
  // call than this process has CPUs, and one alone where others do not pay
  // (runtime/adaptive_threads.h). A call has memory of its own, one workspace a thread whatever n
  // is, which is kept for later ones. Returns the images that were left out, in order; their
  // outputs are not written.
  std::vector<int> run(const void* images,  // [N, C, H, W] uint8 or float32
                       bool is_uint8, int n,
                       float* output,  // [N, outputs]
                       int threads) const;

  // The same pass, and where its time went: adds to seconds[i] those of parts()[i], by the clock
  // between steps. With several threads, each thread's own time counts, waiting too, scaled so that
  // the parts sum to the pass as its caller sees it.
  std::vector<int> run_timed(const void* images, bool is_uint8, int n, float* output, int threads,
                             double* seconds) const;  // [parts]

  // The layers, by index, that are computed, and timed, together: in order, each layer once. What
  // brings the images in is in the first part; what takes the results out, in the last.
  const std::vector<std::vector<int>>& parts() const;

  std::size_t image_size() const;       // values an image
  int outputs() const;                  // that it makes of an image
  const char* instruction_set() const;  // that the weights are packed for

 private:
  struct State;
  template <bool timed>
  std::vector<int> run_with(const void* images, bool is_uint8, int n, float* output, int threads,
                            double* seconds) const;
  std::unique_ptr<State> state_;
};

// FLOP/s of fp32 multiply-adds (two each) on one core, measured by a loop that does nothing else.
double measure_fma_peak(double seconds);

}  // namespace cnn_engine::cpu
