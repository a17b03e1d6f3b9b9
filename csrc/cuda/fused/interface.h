// What a network's kernels and the host that launches them share. Programs are compiled at first
// use from this, too (program.cuh), so nothing of the host's library is used here.
#pragma once

#ifdef __CUDACC__
#define CNN_ENGINE_EVERYWHERE __host__ __device__
#else
#define CNN_ENGINE_EVERYWHERE
#include <vector_types.h>
#endif

namespace cnn_engine::cuda::fused {

constexpr int kMostLayers = 4;  // convolutions of a network

// ---- parameters ----
// Powers of two of a layer: sums times `unscale` are values, values times `rescale` are stored.
struct Scale {
  float unscale, rescale;
};

struct Parameters {
  const void* images;            // [N, C, H, W]
  float* output;                 // [N, outputs]
  const unsigned char* weights;  // SharedLayout's first kWeightBytes
  const float4* head;      // [tile][filter tile][class][lane] of 4: the fully connected weights
  const float* head_bias;  // [classes]
  int count;               // images
  bool is_uint8;
  bool ahead;                // images may be copied 8 bytes at a time
  float multiply, add;       // of uint8 pixels, to what the first layer stores
  Scale scale[kMostLayers];  // for uint8
  // For float32: |output| <= largest |input| * gain + bias; and 1 / what the weights are times.
  float gain[kMostLayers], bias[kMostLayers], unscale[kMostLayers];
};

// `ticks` are added to (ticks.cuh): [parts].
struct TimedParameters : Parameters {
  unsigned long long* ticks;
};

// ---- routes ----
// Shared memory that a block can have on every device of an architecture (90 for 9.0). What takes
// more is not compiled for it, nor launched where the driver made machine code from its PTX.
constexpr int kLeastShared = 99 * 1024, kMiddleShared = 163 * 1024, kMostShared = 227 * 1024;
CNN_ENGINE_EVERYWHERE constexpr int shared_of(int architecture) {
  if (architecture == 80 || architecture == 87) return kMiddleShared;
  return architecture < 90 || architecture / 10 == 12 ? kLeastShared : kMostShared;
}

// Which kernel runs when (Route in geometry.cuh): `many` for batches that fill the device, or
// `middle`, its twin of fewer teams; `few` for an image a multiprocessor, or `small`, the same with
// its weights in device memory; `very_few` for an image a cluster of multiprocessors. A device runs
// those that its shared memory holds.
enum RouteKind { many, middle, few, small, very_few, kRouteKinds };

// Each route twice: for pixels that 16 bits hold exactly, and for any.
constexpr int kForms = 2;

struct RouteFacts {
  int threads, cluster;    // of a block, 0: there is no such route; blocks of a cluster
  int bytes, timed_bytes;  // of shared memory per block; of the instrumented kernel
};

struct Facts {
  RouteFacts routes[kRouteKinds][kForms];
  int image, outputs;  // numbers, of an image
  int weight_bytes, head_floats, classes;
  int needed;  // bytes of shared memory that a block needs at least
};

// ---- weights ----
struct LayerWeights {
  const float* weight;  // convolution [K, C, R, S]; fully connected [M, F]
  const float* bias;    // [K] or [M], or null
};

struct Unpacked {
  float scale, offset;                   // of pixels
  LayerWeights layers[kMostLayers + 1];  // convolutions, then the fully connected layer if any
};

// What a packer fills (pack.cuh); all zeros before.
struct Packed {
  unsigned char* weights;  // [weight_bytes]
  float *head, *head_bias;
  Parameters* parameters;  // its scales, and how pixels enter
  bool* exact_pixels;      // uint8 pixels are stored without rounding, in one part
};

}  // namespace cnn_engine::cuda::fused
