// recurrent on CUDA: a kernel for each step, two for a GRU whose reset gate comes before the
// product. A warp makes one unit of one row: its lanes share the products of every gate's row of R,
// which the second-level cache keeps from step to step. States go from one buffer to another, since
// all units of a step read those of the step before.
#include "cuda/common/launch.cuh"
#include "cuda/common/unary.cuh"
#include "ops/recurrent.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

// What the steps of a layer share.
struct Recurrence {
  RecurrentShape p;
  const float *gates, *weights, *bias, *peepholes;
  const std::int32_t* lengths;
  float *output, *update, *reset;  // [D, N, H] for `update` and `reset`, of a GRU in two kernels
};

// Where a warp's unit of a row is in a step.
struct Unit {
  int direction, row, unit;
  int at;  // the step of the row's sequence, or -1 past its end
  std::int64_t state;

  __device__ Unit(const Recurrence& r, std::int64_t warp, int step) {
    const int hidden = r.p.hidden;
    state = warp;
    unit = static_cast<int>(warp % hidden);
    const int rows = static_cast<int>(warp / hidden);
    row = rows % r.p.batch;
    direction = rows / r.p.batch;
    const int length = r.lengths != nullptr ? min(max(r.lengths[row], 0), r.p.steps) : r.p.steps;
    at = step >= length ? -1 : r.p.begins_at_end(direction) ? length - 1 - step : step;
  }
};

__device__ float function_of(const Recurrence& r, int direction, int which, float x) {
  const int at = 3 * direction + which;
  return unary_of(r.p.functions[at], x, r.p.alphas[at], r.p.betas[at]);
}
// Within the clip; a NaN stays.
__device__ float applied(const Recurrence& r, int direction, int which, float x) {
  const float low = x < -r.p.clip ? -r.p.clip : x;
  return function_of(r, direction, which, low > r.p.clip ? r.p.clip : low);
}

// The products of `count` gates from `first` on with a row of states; every lane has the sums.
template <int count>
__device__ void multiply(const Recurrence& r, const Unit& u, const float* states, int first,
                         float (&sum)[count]) {
  const int hidden = r.p.hidden, lane = threadIdx.x % kWarpThreads;
#pragma unroll
  for (int g = 0; g < count; ++g) sum[g] = 0.0f;
  if (states != nullptr) {
    const float* h = states + u.state - u.unit;
    const float* w =
        r.weights +
        (u.direction * r.p.gate_size() + std::int64_t{first} * hidden + u.unit) * hidden;
    for (int k = lane; k < hidden; k += kWarpThreads) {
      const float value = h[k];
#pragma unroll
      for (int g = 0; g < count; ++g) {
        sum[g] = fmaf(w[std::int64_t{g} * hidden * hidden + k], value, sum[g]);
      }
    }
  }
#pragma unroll
  for (int g = 0; g < count; ++g) {
#pragma unroll
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      sum[g] += __shfl_xor_sync(kFullMask, sum[g], distance);
    }
  }
}

__device__ const float* gates_of(const Recurrence& r, const Unit& u) {
  return r.gates +
         ((std::int64_t{u.at} * r.p.batch + u.row) * r.p.directions + u.direction) *
             r.p.gate_size() +
         u.unit;
}

// A GRU's z, and r times the state.
__global__ void recurrent_reset_kernel(const Recurrence r, const float* from, int step) {
  const std::int64_t warp = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarpThreads;
  if (warp >= std::int64_t{r.p.directions} * r.p.batch * r.p.hidden) return;
  const Unit u(r, warp, step);
  if (u.at < 0) return;
  float sum[2];
  multiply(r, u, from, 0, sum);
  if (threadIdx.x % kWarpThreads != 0) return;
  const float* x = gates_of(r, u);
  r.update[u.state] = applied(r, u.direction, 0, x[0] + sum[0]);
  const float reset = applied(r, u.direction, 0, x[r.p.hidden] + sum[1]);
  r.reset[u.state] = from != nullptr ? reset * from[u.state] : 0.0f;
}

// One step of every row and unit: states [D, N, H] `from` (null: 0) and `to`; `cell_from` (null: 0)
// and `cell_to`, which may be one buffer.
template <RecurrentCell cell>
__global__ void recurrent_step_kernel(const Recurrence r, const float* from, float* to,
                                      const float* cell_from, float* cell_to, int step) {
  const std::int64_t warp = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarpThreads;
  if (warp >= std::int64_t{r.p.directions} * r.p.batch * r.p.hidden) return;
  const Unit u(r, warp, step);
  const int hidden = r.p.hidden, d = u.direction;
  const bool first_lane = threadIdx.x % kWarpThreads == 0;
  const std::int64_t position = std::int64_t{u.at < 0 ? step : u.at} * r.p.directions + d;
  float* y = r.output + (position * r.p.batch + u.row) * hidden + u.unit;
  const float state = from != nullptr ? from[u.state] : 0.0f;
  if (u.at < 0) {
    if (!first_lane) return;
    *y = 0.0f;
    to[u.state] = state;
    if constexpr (cell == RecurrentCell::lstm) {
      cell_to[u.state] = cell_from != nullptr ? cell_from[u.state] : 0.0f;
    }
    return;
  }
  const float* x = gates_of(r, u);
  float next = 0.0f;
  if constexpr (cell == RecurrentCell::rnn) {
    float sum[1];
    multiply(r, u, from, 0, sum);
    if (!first_lane) return;
    next = applied(r, d, 0, x[0] + sum[0]);
  } else if constexpr (cell == RecurrentCell::gru) {
    float update, product;
    if (r.p.reset_after) {
      float sum[3];
      multiply(r, u, from, 0, sum);
      if (!first_lane) return;
      update = applied(r, d, 0, x[0] + sum[0]);
      const float bias = r.bias != nullptr ? r.bias[std::int64_t{d} * hidden + u.unit] : 0.0f;
      product = applied(r, d, 0, x[hidden] + sum[1]) * (sum[2] + bias);
    } else {
      float sum[1];
      multiply(r, u, r.reset, 2, sum);
      if (!first_lane) return;
      update = r.update[u.state];
      product = sum[0];
    }
    const float n = applied(r, d, 1, x[2 * std::int64_t{hidden}] + product);
    next = (1.0f - update) * n + update * state;
  } else {
    float sum[4];
    multiply(r, u, from, 0, sum);
    if (!first_lane) return;
    const float memory = cell_from != nullptr ? cell_from[u.state] : 0.0f;
#pragma unroll
    for (int g = 0; g < 4; ++g) sum[g] += x[std::int64_t{g} * hidden];
    const float* p =
        r.peepholes != nullptr ? r.peepholes + std::int64_t{d} * 3 * hidden + u.unit : nullptr;
    if (p != nullptr) {
      sum[0] += p[0] * memory;
      sum[2] += p[2 * std::int64_t{hidden}] * memory;
    }
    const float input = applied(r, d, 0, sum[0]);
    const float forget = r.p.coupled ? 1.0f - input : applied(r, d, 0, sum[2]);
    const float kept = forget * memory + input * applied(r, d, 1, sum[3]);
    if (p != nullptr) sum[1] += p[hidden] * kept;
    cell_to[u.state] = kept;
    next = applied(r, d, 0, sum[1]) * function_of(r, d, 2, kept);
  }
  to[u.state] = next;
  *y = next;
}

template <RecurrentCell cell>
void launch_recurrent(const Recurrence& r, const float* hidden, const float* cells,
                      float* last_hidden, float* last_cell, float* buffers, std::int64_t states,
                      Stream stream) {
  const unsigned blocks = blocks_for(states * kWarpThreads);
  const float* from = hidden;
  for (int step = 0; step < r.p.steps; ++step) {
    float* to = step + 1 == r.p.steps ? last_hidden : buffers + step % 2 * states;
    if (cell == RecurrentCell::gru && !r.p.reset_after) {
      recurrent_reset_kernel<<<blocks, kBlockThreads, 0, stream>>>(r, from, step);
      CUDA_CHECK_LAUNCH("recurrent_reset_kernel");
    }
    recurrent_step_kernel<cell><<<blocks, kBlockThreads, 0, stream>>>(
        r, from, to, step == 0 ? cells : last_cell, last_cell, step);
    CUDA_CHECK_LAUNCH("recurrent_step_kernel");
    from = to;
  }
}

void keep_state(float* to, const float* from, std::int64_t states, Stream stream) {
  const std::size_t bytes = states * sizeof(float);
  if (from != nullptr) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  } else {
    CUDA_CHECK(cudaMemsetAsync(to, 0, bytes, stream));
  }
}

std::int64_t states_of(const RecurrentShape& p) {
  return std::int64_t{p.directions} * p.batch * p.hidden;
}

}  // namespace

// R as it is: a warp reads rows of it.
void recurrent_pack(const float* weights, float* packed, const RecurrentShape& shape,
                    Stream stream) {
  const std::size_t size = shape.directions * shape.gate_size() * shape.hidden;
  CUDA_CHECK(
      cudaMemcpyAsync(packed, weights, size * sizeof(float), cudaMemcpyDeviceToDevice, stream));
}

std::int64_t recurrent_workspace(const RecurrentShape& shape, Stream) {
  const int more = shape.cell == RecurrentCell::gru ? 2 : 0;
  return states_of(shape) * (2 + more) * static_cast<int>(sizeof(float));
}

void recurrent(const float* gates, const float* packed, const float* bias,
               const std::int32_t* lengths, const float* hidden, const float* cell,
               const float* peepholes, float* output, float* last_hidden, float* last_cell,
               float* workspace, const RecurrentShape& shape, Stream stream) {
  const std::int64_t states = states_of(shape);
  if (states == 0) return;
  if (shape.steps == 0) {
    keep_state(last_hidden, hidden, states, stream);
    if (shape.cell == RecurrentCell::lstm) keep_state(last_cell, cell, states, stream);
    return;
  }
  const Recurrence r{shape,
                     gates,
                     packed,
                     bias,
                     peepholes,
                     lengths,
                     output,
                     workspace + 2 * states,
                     workspace + 3 * states};
  switch (shape.cell) {
    case RecurrentCell::rnn:
      return launch_recurrent<RecurrentCell::rnn>(r, hidden, cell, last_hidden, last_cell,
                                                  workspace, states, stream);
    case RecurrentCell::gru:
      return launch_recurrent<RecurrentCell::gru>(r, hidden, cell, last_hidden, last_cell,
                                                  workspace, states, stream);
    case RecurrentCell::lstm:
      return launch_recurrent<RecurrentCell::lstm>(r, hidden, cell, last_hidden, last_cell,
                                                   workspace, states, stream);
  }
}

}  // namespace cnn_engine::cuda
