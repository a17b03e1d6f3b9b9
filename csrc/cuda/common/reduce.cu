// reduce and arg_extreme on CUDA. Where the axis is the last dimension a warp takes a line, or a
// block a long one; else a thread takes a column, or where there are few columns the eight warps of
// a block share 32 of them. The order of every sum depends on the shape alone. Sums are of doubles:
// they are bound by memory even where a GPU has few units for doubles.
#include <cooperative_groups.h>

#include "cuda/common/strided.cuh"
#include "ops/reduce.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

constexpr int kMostWarps = 32;  // of a block

// Each kind: its state, how it starts, takes an element in, joins two states, and ends.

struct Itself {
  __device__ static double of(double x) { return x; }
};
struct Magnitude {
  __device__ static double of(double x) { return fabs(x); }
};
struct Square {
  __device__ static double of(double x) { return x * x; }
};

template <Reduction reduction>
__device__ double finish(double value, std::int64_t axis) {
  if constexpr (reduction == Reduction::mean) return value / static_cast<double>(axis);
  if constexpr (reduction == Reduction::l2) return sqrt(value);
  if constexpr (reduction == Reduction::log_sum) return log(value);
  return value;
}

template <Reduction reduction, typename Map>
struct Sum {
  using State = double;
  using Output = float;
  __device__ State start() const { return 0.0; }
  __device__ void take(State& sum, float x, std::int64_t) const { sum += Map::of(x); }
  __device__ State join(State a, State b) const { return a + b; }
  __device__ State other_lane(State a, int distance) const {
    return __shfl_xor_sync(kFullMask, a, distance);
  }
  __device__ float end(State sum, std::int64_t axis) const {
    return static_cast<float>(finish<reduction>(sum, axis));
  }
};

struct Product {
  using State = double;
  using Output = float;
  __device__ State start() const { return 1.0; }
  __device__ void take(State& product, float x, std::int64_t) const { product *= x; }
  __device__ State join(State a, State b) const { return a * b; }
  __device__ State other_lane(State a, int distance) const {
    return __shfl_xor_sync(kFullMask, a, distance);
  }
  __device__ float end(State product, std::int64_t) const { return static_cast<float>(product); }
};

// The largest, or with sign -1 the smallest; NaN wins.
template <int sign>
struct Extreme {
  using State = float;
  using Output = float;
  __device__ State start() const { return sign * -INFINITY; }
  __device__ State join(State a, State b) const { return sign * a > sign * b || a != a ? a : b; }
  __device__ void take(State& best, float x, std::int64_t) const { best = join(best, x); }
  __device__ State other_lane(State a, int distance) const {
    return __shfl_xor_sync(kFullMask, a, distance);
  }
  __device__ float end(State best, std::int64_t) const { return best; }
};

// The logarithm of a sum of exponentials, kept as the largest element and the sum beside it.
struct LogSumExp {
  struct State {
    float largest;
    double sum;  // of exp(x - largest)
  };
  using Output = float;
  // exp(x - largest), 1 where they are the same infinity.
  __device__ static float relative(float x, float largest) {
    return x == largest ? 1.0f : expf(x - largest);
  }
  __device__ State start() const { return {-INFINITY, 0.0}; }
  __device__ void take(State& s, float x, std::int64_t) const {
    if (x > s.largest) {
      s.sum = s.sum * relative(s.largest, x) + 1.0;
      s.largest = x;
    } else {
      s.sum += relative(x, s.largest);
    }
  }
  __device__ State join(State a, State b) const {
    const float largest = fmaxf(a.largest, b.largest);
    return {largest, a.sum * relative(a.largest, largest) + b.sum * relative(b.largest, largest)};
  }
  __device__ State other_lane(State a, int distance) const {
    return {__shfl_xor_sync(kFullMask, a.largest, distance),
            __shfl_xor_sync(kFullMask, a.sum, distance)};
  }
  __device__ float end(State s, std::int64_t) const {
    return static_cast<float>(s.largest + log(s.sum));
  }
};

// The position of the largest or smallest; that of a NaN where there is one. Of equals, and of
// NaNs, the first or the last.
struct ArgExtreme {
  struct State {
    float value;
    std::int64_t index;  // -1: nothing yet
  };
  using Output = std::int64_t;
  float sign;
  bool last;
  __device__ State start() const { return {0.0f, -1}; }
  __device__ bool better(State a, State b) const {
    if (a.index < 0 || b.index < 0) return b.index < 0;
    const bool nan = a.value != a.value;
    const bool other_nan = b.value != b.value;
    if (nan || other_nan ? nan && other_nan : a.value == b.value) {
      return last ? a.index > b.index : a.index < b.index;
    }
    return nan || a.value > b.value;
  }
  __device__ State join(State a, State b) const { return better(a, b) ? a : b; }
  __device__ void take(State& best, float x, std::int64_t index) const {
    best = join({sign * x, index}, best);
  }
  __device__ State other_lane(State a, int distance) const {
    return {__shfl_xor_sync(kFullMask, a.value, distance),
            __shfl_xor_sync(kFullMask, a.index, distance)};
  }
  __device__ std::int64_t end(State best, std::int64_t) const { return best.index; }
};

template <typename Kind>
__device__ typename Kind::State join_warp(const Kind& kind, typename Kind::State state) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    state = kind.join(state, kind.other_lane(state, distance));
  }
  return state;
}

// One warp makes one output, from a line [axis].
template <typename Kind>
__global__ void reduce_warp_kernel(const float* x,            // [outer, axis]
                                   typename Kind::Output* y,  // [outer]
                                   const AxisShape p, const Kind kind) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * blockDim.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  for (std::int64_t o = grid_thread() / kWarpThreads; o < p.outer; o += warps) {
    const float* line = x + o * p.axis;
    typename Kind::State state = kind.start();
    for (std::int64_t a = lane; a < p.axis; a += kWarpThreads) kind.take(state, line[a], a);
    state = join_warp(kind, state);
    if (lane == 0) y[o] = kind.end(state, p.axis);
  }
}

// One block makes one output, from a long line [axis]; four sums a thread keep loads in flight.
template <typename Kind>
__global__ void reduce_block_kernel(const float* x,            // [outer, axis]
                                    typename Kind::Output* y,  // [outer]
                                    const AxisShape p, const Kind kind, bool vectors) {
  wait_for_inputs();
  let_successors_start();
  using State = typename Kind::State;
  __shared__ State states[kBlockThreads / kWarpThreads];
  const int warp = threadIdx.x / kWarpThreads;
  for (std::int64_t o = blockIdx.x; o < p.outer; o += gridDim.x) {
    const float* line = x + o * p.axis;
    State part[4] = {kind.start(), kind.start(), kind.start(), kind.start()};
    const std::int64_t groups = vectors ? p.axis / 4 : 0;
    for (std::int64_t a = threadIdx.x; a < groups; a += blockDim.x) {
      const float4 v = reinterpret_cast<const float4*>(line)[a];
      kind.take(part[0], v.x, 4 * a);
      kind.take(part[1], v.y, 4 * a + 1);
      kind.take(part[2], v.z, 4 * a + 2);
      kind.take(part[3], v.w, 4 * a + 3);
    }
    for (std::int64_t a = groups * 4 + threadIdx.x; a < p.axis; a += blockDim.x) {
      kind.take(part[0], line[a], a);
    }
    State state = kind.join(kind.join(part[0], part[1]), kind.join(part[2], part[3]));
    state = join_warp(kind, state);
    if (threadIdx.x % kWarpThreads == 0) states[warp] = state;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kBlockThreads / kWarpThreads; ++w) state = kind.join(state, states[w]);
      y[o] = kind.end(state, p.axis);
    }
    __syncthreads();  // before the next line's states
  }
}

// One thread makes one output, from a column; neighbours read neighbouring elements.
template <typename Kind>
__global__ void reduce_column_kernel(const float* x,            // [outer, axis, inner]
                                     typename Kind::Output* y,  // [outer, inner]
                                     const AxisShape p, const Kind kind) {
  wait_for_inputs();
  let_successors_start();
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = grid_thread(); i < p.outer * p.inner; i += threads) {
    const std::int64_t o = i / p.inner;
    const float* column = x + o * p.axis * p.inner + (i - o * p.inner);
    typename Kind::State state = kind.start();
    for (std::int64_t a = 0; a < p.axis; ++a) kind.take(state, column[a * p.inner], a);
    y[i] = kind.end(state, p.axis);
  }
}

// A cluster of gridDim.z blocks makes 32 neighbouring outputs: each of its warps takes a part of
// the columns' elements, as many apart as there are warps in the cluster.
template <typename Kind>
__global__ void reduce_columns_kernel(const float* x,            // [outer, axis, inner]
                                      typename Kind::Output* y,  // [outer, inner]
                                      const AxisShape p, const Kind kind, std::int64_t groups) {
  using State = typename Kind::State;
  __shared__ State states[kMostWarps][kWarpThreads];
  wait_for_inputs();
  let_successors_start();
  const int lane = threadIdx.x % kWarpThreads;
  const int warp = threadIdx.x / kWarpThreads;
  const int warps = blockDim.x / kWarpThreads;
  const int first = blockIdx.z * warps + warp;
  const std::int64_t step = static_cast<std::int64_t>(warps) * gridDim.z;
  for (std::int64_t block = blockIdx.x; block < p.outer * groups; block += gridDim.x) {
    const std::int64_t o = block / groups;
    const std::int64_t i = (block - o * groups) * kWarpThreads + lane;
    State state = kind.start();
    if (i < p.inner) {
      const float* column = x + o * p.axis * p.inner + i;
#pragma unroll 8
      for (std::int64_t a = first; a < p.axis; a += step) kind.take(state, column[a * p.inner], a);
    }
    states[warp][lane] = state;
    __syncthreads();
    if (warp == 0) {
      for (int w = 1; w < warps; ++w) state = kind.join(state, states[w][lane]);
      states[0][lane] = state;
    }
#if __CUDA_ARCH__ >= 900
    if (gridDim.z > 1) {
      const auto cluster = cooperative_groups::this_cluster();
      cluster.sync();
      if (blockIdx.z == 0 && warp == 0) {
        for (unsigned b = 1; b < gridDim.z; ++b) {
          state = kind.join(state, cluster.map_shared_rank(&states[0][0], b)[lane]);
        }
      }
      cluster.sync();  // no block ends, or goes on, before its states were read
    }
#endif
    if (blockIdx.z == 0 && warp == 0 && i < p.inner) {
      y[o * p.inner + i] = kind.end(state, p.axis);
    }
    __syncthreads();  // before the next columns' states
  }
}

constexpr std::int64_t kLongLine = 2048;        // elements that are worth a block
constexpr std::int64_t kManyColumns = 1 << 16;  // threads that fill a GPU
constexpr std::int64_t kMostBlocks = 1 << 30;
constexpr int kMostParts = 8;  // blocks of a cluster that any GPU with clusters has

template <typename Kind>
void launch_reduce(const float* x, typename Kind::Output* y, const AxisShape& p, const Kind& kind,
                   Stream stream) {
  if (p.outer * p.inner == 0) return;
  if (p.inner == 1 && p.axis >= kLongLine) {
    const bool vectors = p.axis % 4 == 0 && is_aligned(x, 16);
    const unsigned blocks = static_cast<unsigned>(p.outer < kMostBlocks ? p.outer : kMostBlocks);
    launch("launch of reduce_block_kernel", reduce_block_kernel<Kind>, blocks, kBlockThreads, 0,
           stream, 1, x, y, p, kind, vectors);
  } else if (p.inner == 1) {
    launch("launch of reduce_warp_kernel", reduce_warp_kernel<Kind>,
           blocks_for(p.outer * kWarpThreads), kBlockThreads, 0, stream, 1, x, y, p, kind);
  } else if (p.outer * p.inner >= kManyColumns || p.axis < 16) {
    launch("launch of reduce_column_kernel", reduce_column_kernel<Kind>,
           blocks_for(p.outer * p.inner), kBlockThreads, 0, stream, 1, x, y, p, kind);
  } else {
    const std::int64_t groups = (p.inner + kWarpThreads - 1) / kWarpThreads;
    const std::int64_t blocks = p.outer * groups < kMostBlocks ? p.outer * groups : kMostBlocks;
    int warps = kBlockThreads / kWarpThreads, parts = 1;
    while (warps < kMostWarps && p.axis >= 8 * warps) warps *= 2;
    if (waits_in_kernels()) {  // where there are clusters
      const int many = target_here().multiprocessors;
      while (parts < kMostParts && blocks * parts < many && p.axis >= 8 * warps * parts) {
        parts *= 2;
      }
    }
    launch("launch of reduce_columns_kernel", reduce_columns_kernel<Kind>,
           dim3(static_cast<unsigned>(blocks), 1, parts), warps * kWarpThreads, 0, stream, parts, x,
           y, p, kind, groups);
  }
}

}  // namespace

void reduce(const float* x, float* y, const AxisShape& shape, Reduction reduction, Stream stream) {
  switch (reduction) {
    case Reduction::sum:
      return launch_reduce(x, y, shape, Sum<Reduction::sum, Itself>{}, stream);
    case Reduction::mean:
      return launch_reduce(x, y, shape, Sum<Reduction::mean, Itself>{}, stream);
    case Reduction::log_sum:
      return launch_reduce(x, y, shape, Sum<Reduction::log_sum, Itself>{}, stream);
    case Reduction::l1:
      return launch_reduce(x, y, shape, Sum<Reduction::l1, Magnitude>{}, stream);
    case Reduction::l2:
      return launch_reduce(x, y, shape, Sum<Reduction::l2, Square>{}, stream);
    case Reduction::sum_square:
      return launch_reduce(x, y, shape, Sum<Reduction::sum_square, Square>{}, stream);
    case Reduction::prod:
      return launch_reduce(x, y, shape, Product{}, stream);
    case Reduction::max:
      return launch_reduce(x, y, shape, Extreme<1>{}, stream);
    case Reduction::min:
      return launch_reduce(x, y, shape, Extreme<-1>{}, stream);
    case Reduction::log_sum_exp:
      return launch_reduce(x, y, shape, LogSumExp{}, stream);
  }
}

void arg_extreme(const float* x, std::int64_t* y, const AxisShape& shape, bool largest, bool last,
                 Stream stream) {
  launch_reduce(x, y, shape, ArgExtreme{largest ? 1.0f : -1.0f, last}, stream);
}

}  // namespace cnn_engine::cuda
