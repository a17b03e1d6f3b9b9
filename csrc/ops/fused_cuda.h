// fused: a whole network, or its convolutions, as one kernel: images in, probabilities out,
// activations on the chip (--variant fused on CUDA).
//
//   output[n] = the description's layers, in order, over images[n]
//
// Layouts: images [N, C, H, W], uint8 (entering as x * scale + offset) or float32; output [N,
// outputs], float32; all C-contiguous. Products run on tensor cores, sums are float32.
//
// float32: values are split into two float16 parts, 22 bits together: as close to float64 as
// float32 arithmetic is. Powers of two keep them in float16's range, for activations up to 2^75
// (past it, and for infinite input, NaN). float16, bfloat16: weights and activations are rounded to
// the format; the fully connected end is float32. tf32: what TF32 keeps of a value, 11 significant
// bits, is what float16 keeps, and the powers of two stand in for its exponent; so it is computed
// as float16 is, at twice the rate that tensor cores have for TF32. Values below 2^-29 of the
// largest possible one of their layer lose bits that TF32 would keep.
//
// Which networks: chains of two to four convolutions (stride 1 or 2), each with an activation and
// 2x2 pooling or without, and a linear layer and softmax or none, whose activations fit into a
// block's shared memory. Some are compiled in (csrc/cuda/fused/), for devices of some kinds; others
// are compiled at first use by the caller (NVRTC), from source(). why_not says what does not fit.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ops/network.h"
#include "runtime/stream.h"

namespace cnn_engine::cuda {

enum class FusedDtype { float32, tf32, float16, bfloat16 };

class FusedNetwork {
 public:
  static constexpr int kNoLimit = std::numeric_limits<int>::max();

  // Packs the weights and uploads them to the device, complete on return. Throws
  // std::invalid_argument with why_not's reason. `shared_limit` stands in for a device with less
  // shared memory per block, in tests of the kernels that it would run. `program`: what source()
  // was compiled to for the device, where that is not empty; it is taken before what is compiled
  // in.
  FusedNetwork(const NetworkDescription& description, FusedDtype dtype, int device,
               int shared_limit = kNoLimit, const std::string& program = "");
  ~FusedNetwork();
  FusedNetwork(FusedNetwork&&) noexcept;
  FusedNetwork& operator=(FusedNetwork&&) noexcept;
  FusedNetwork(const FusedNetwork&) = delete;
  FusedNetwork& operator=(const FusedNetwork&) = delete;

  // Why the network cannot run as one kernel on the device, or "" if it can; where it is not
  // compiled in and without its program: "" if it may, as far as can be told.
  static std::string why_not(const NetworkDescription& description, FusedDtype dtype, int device,
                             int shared_limit = kNoLimit, const std::string& program = "");

  // The CUDA source of a network's program, "" for one that is compiled in for `device`. It
  // includes headers of csrc/cuda, which the module has as text; CNN_ENGINE_FUSED_TIMED defined
  // gives the instrumented one. Throws std::invalid_argument with why_not's reason.
  static constexpr int kNoDevice = -1;
  static std::string source(const NetworkDescription& description, FusedDtype dtype,
                            int device = kNoDevice);

  // Only launches: no allocation and no wait, so it may be captured into a graph.
  void run(const void* images,  // [N, C, H, W] uint8 or float32
           bool is_uint8, int n,
           float* output,  // [N, outputs]
           Stream stream) const;

  // Takes the instrumented program of a network that is not compiled in; once is enough.
  void instrument(const std::string& program);
  bool is_instrumented() const;
  // The same from instrumented kernels, which add to ticks[i] (device memory) what parts()[i] took
  // of the multiprocessors' clocks. The shares of the parts in their sum are meant, not the
  // numbers.
  void run_timed(const void* images, bool is_uint8, int n, float* output, Stream stream,
                 unsigned long long* ticks) const;
  // The layers of each part, as indices of the description's: in order, and all of them.
  const std::vector<std::vector<int>>& parts() const;

  int outputs() const;                // values an image
  const char* instantiation() const;  // the compiled-in network that runs it, or "at first use"
  int shared_bytes() const;           // that a block of its kernels takes at most

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// float32 multiply-adds a second, measured by a kernel that does nothing else: the ceiling of
// arithmetic without tensor cores. On the current device; waits for it.
double measure_fma_peak();

}  // namespace cnn_engine::cuda
