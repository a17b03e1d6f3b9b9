// recurrent on the CPU: a step is the product of a few rows' states by packed panels of R, with
// columns on SIMD lanes and the accumulators in registers, then the cell's functions over rows of
// gates. Rows of a batch do not know of each other: groups of them, of each direction, are the
// tasks; where there are fewer than threads, these share a step's panels.
#include "ops/recurrent.h"

#include <cmath>
#include <cstring>

#include "cpu/fused/vector.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

extern decltype(cpu::unary) unary;

namespace {

constexpr int kPanel = RecurrentShape::kPanel;
constexpr int kRows = 4;  // of the batch, that a task takes where rows do not know of each other

int rows_of(const RecurrentShape& p) { return p.rounds_states ? p.batch : kRows; }

// Vectors of a panel that are summed together for so many rows: half of the registers.
constexpr int vectors_of(int rows) {
  const int fit = kRegisters / 2 / rows;
  return fit < kPanel / kWide ? fit : kPanel / kWide;
}

// accumulators[t] += states[t] R over one panel, of which `columns` count.
template <int T>
void multiply_panel(const float* states, const float* panel, float* accumulators,
                    std::int64_t accumulators_stride, int hidden, int columns) {
  constexpr int V = vectors_of(T);
  // Two accumulators of every second product where one would wait for the product before.
  constexpr int kAccumulators = V * T < 8 ? 2 : 1;
  for (int first = 0; first < columns; first += V * kWide) {
    Vec<kWide> sum[kAccumulators][T][V] = {};
    const float* r = panel + first;
    const auto add = [&](int k, Vec<kWide>(&to)[T][V]) __attribute__((always_inline)) {
      Vec<kWide> weights[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) weights[v] = load<kWide>(r + v * kWide);
      r += kPanel;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const float value = states[std::int64_t{t} * hidden + k];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) to[t][v] += weights[v] * value;
      }
    };
    int k = 0;
    for (; k + kAccumulators <= hidden; k += kAccumulators) {
      add(k, sum[0]);
      if constexpr (kAccumulators == 2) add(k + 1, sum[1]);
    }
    if (k < hidden) add(k, sum[0]);
    for (int t = 0; t < T; ++t) {
      float* to = accumulators + t * accumulators_stride + first;
      float results[V * kWide];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        Vec<kWide> total = sum[0][t][v];
        if constexpr (kAccumulators == 2) total += sum[1][t][v];
        store<kWide>(results + v * kWide, total);
      }
      const int count = columns - first < V * kWide ? columns - first : V * kWide;
      for (int i = 0; i < count; ++i) to[i] += results[i];
    }
  }
}

// accumulators[t] += states[t] R for `rows` rows and `columns` columns of R.
void multiply(const float* states, const float* packed, float* accumulators,
              std::int64_t accumulators_stride, int rows, int hidden, int columns, int threads) {
  const int panels = (columns + kPanel - 1) / kPanel;
  const std::int64_t cost = std::int64_t{rows} * kPanel * hidden;
  parallel_for(panels, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t p = begin; p < end; ++p) {
      const float* panel = packed + p * kPanel * hidden;
      float* to = accumulators + p * kPanel;
      const int left = columns - static_cast<int>(p) * kPanel;
      const int count = left < kPanel ? left : kPanel;
      int row = 0;
      for (; row + 4 <= rows; row += 4) {
        multiply_panel<4>(states + row * hidden, panel, to + row * accumulators_stride,
                          accumulators_stride, hidden, count);
      }
      for (; row + 2 <= rows; row += 2) {
        multiply_panel<2>(states + row * hidden, panel, to + row * accumulators_stride,
                          accumulators_stride, hidden, count);
      }
      if (row < rows) {
        multiply_panel<1>(states + row * hidden, panel, to + row * accumulators_stride,
                          accumulators_stride, hidden, count);
      }
    }
  });
}

// One direction of some rows of the batch, from first to last step.
struct Task {
  const RecurrentShape& p;
  int direction, first, rows, threads;
  const float *packed, *bias, *peepholes;
  float *h, *c, *accumulators, *more;  // [rows, H], [rows, H], [rows, G*H], [rows, H]
  int* at;                             // for each row the step of its sequence, or -1 past its end

  // Applies function `which` of the direction to `count` numbers within the clip.
  void apply(int which, float* x, std::int64_t count) const {
    if (p.clip < std::numeric_limits<float>::infinity()) {
      unary(x, x, count, UnaryFunction::clip, -p.clip, p.clip, 1);
    }
    function(which, x, x, count);
  }
  void function(int which, const float* x, float* y, std::int64_t count) const {
    const int at = 3 * direction + which;
    unary(x, y, count, p.functions[at], p.alphas[at], p.betas[at], 1);
  }

  void rnn(int row) const {
    float* x = accumulators + row * p.gate_size();
    apply(0, x, p.hidden);
    std::memcpy(h + std::int64_t{row} * p.hidden, x, p.hidden * sizeof(float));
  }

  // z and r of a row, and what R_n is multiplied by, or its product is.
  void reset(int row) const {
    float* x = accumulators + row * p.gate_size();
    apply(0, x, 2 * std::int64_t{p.hidden});
    const float *r = x + p.hidden, *state = h + std::int64_t{row} * p.hidden;
    float* to = more + std::int64_t{row} * p.hidden;
    if (p.reset_after) {
      float* n = x + 2 * p.hidden;
#pragma omp simd
      for (int i = 0; i < p.hidden; ++i) n[i] += r[i] * to[i];
    } else {
#pragma omp simd
      for (int i = 0; i < p.hidden; ++i) to[i] = r[i] * state[i];
    }
  }
  void gru(int row) const {
    float* x = accumulators + row * p.gate_size();
    float *n = x + 2 * p.hidden, *state = h + std::int64_t{row} * p.hidden;
    apply(1, n, p.hidden);
#pragma omp simd
    for (int i = 0; i < p.hidden; ++i) state[i] = (1.0f - x[i]) * n[i] + x[i] * state[i];
  }

  void lstm(int row) const {
    const int count = p.hidden;
    float* input = accumulators + row * p.gate_size();
    float *output = input + count, *forget = output + count, *next = forget + count;
    float *state = h + std::int64_t{row} * count, *memory = c + std::int64_t{row} * count;
    if (peepholes == nullptr && !p.coupled) {
      apply(0, input, 3 * std::int64_t{count});
    } else {
      if (peepholes != nullptr) {
#pragma omp simd
        for (int i = 0; i < count; ++i) {
          input[i] += peepholes[i] * memory[i];
          forget[i] += peepholes[2 * count + i] * memory[i];
        }
      }
      apply(0, input, count);
      if (p.coupled) {
        for (int i = 0; i < count; ++i) forget[i] = 1.0f - input[i];
      } else {
        apply(0, forget, count);
      }
    }
    apply(1, next, count);
#pragma omp simd
    for (int i = 0; i < count; ++i) memory[i] = forget[i] * memory[i] + input[i] * next[i];
    if (peepholes != nullptr || p.coupled) {
      if (peepholes != nullptr) {
#pragma omp simd
        for (int i = 0; i < count; ++i) output[i] += peepholes[count + i] * memory[i];
      }
      apply(0, output, count);
    }
    function(2, memory, next, count);
#pragma omp simd
    for (int i = 0; i < count; ++i) state[i] = output[i] * next[i];
  }

  // Makes `more` of the states as 8 bits would hold them, by the range of all rows and 0.
  void round_states() const {
    float low = 0.0f, high = 0.0f, wrong = 0.0f;  // NaN of what is not finite
    for (int row = 0; row < rows; ++row) {
      if (at[row] < 0) continue;
      const float* state = h + std::int64_t{row} * p.hidden;
      for (int i = 0; i < p.hidden; ++i) {
        low = state[i] < low ? state[i] : low;
        high = state[i] > high ? state[i] : high;
        wrong += state[i] * 0.0f;
      }
    }
    const auto whole = [](float value, float zero) {
      value = std::nearbyint(value) + zero;
      return value > 0.0f ? value < 255.0f ? value : 255.0f : 0.0f;
    };
    float scale = (high - low) / 255.0f + wrong;
    if (scale == 0.0f) scale = 1.0f;
    const float zero = whole(-low / scale, 0.0f);
    for (std::int64_t i = 0; i < std::int64_t{rows} * p.hidden; ++i) {
      more[i] = (whole(h[i] / scale, zero) - zero) * scale;
    }
  }

  void step(const float* gates, float* output) const {
    const std::int64_t gate_size = p.gate_size();
    const int hidden = p.hidden, columns = p.first_gates() * hidden;
    for (int row = 0; row < rows; ++row) {
      const std::int64_t position = std::int64_t{at[row] < 0 ? 0 : at[row]} * p.batch + first + row;
      std::memcpy(accumulators + row * gate_size,
                  gates + (position * p.directions + direction) * gate_size,
                  gate_size * sizeof(float));
    }
    if (p.rounds_states) round_states();
    multiply(p.rounds_states ? more : h, packed, accumulators, gate_size, rows, hidden, columns,
             threads);
    if (p.cell == RecurrentCell::gru) {
      const float* last = packed + p.panels_size(2);
      if (p.reset_after) {
        for (int row = 0; row < rows; ++row) {
          float* to = more + std::int64_t{row} * hidden;
          for (int i = 0; i < hidden; ++i) to[i] = bias != nullptr ? bias[i] : 0.0f;
        }
        multiply(h, last, more, hidden, rows, hidden, hidden, threads);
      }
      for (int row = 0; row < rows; ++row) reset(row);
      if (!p.reset_after) {
        multiply(more, last, accumulators + columns, gate_size, rows, hidden, hidden, threads);
      }
    }
    for (int row = 0; row < rows; ++row) {
      if (at[row] < 0) continue;
      if (p.cell == RecurrentCell::rnn) rnn(row);
      if (p.cell == RecurrentCell::gru) gru(row);
      if (p.cell == RecurrentCell::lstm) lstm(row);
      const std::int64_t position = std::int64_t{at[row]} * p.directions + direction;
      std::memcpy(output + (position * p.batch + first + row) * hidden,
                  h + std::int64_t{row} * hidden, hidden * sizeof(float));
    }
  }

  void run(const float* gates, const std::int32_t* lengths, float* output) const {
    for (int s = 0; s < p.steps; ++s) {
      bool any = false;
      for (int row = 0; row < rows; ++row) {
        const int length = lengths != nullptr ? lengths[first + row] : p.steps;
        const bool in = s < length;
        at[row] = !in ? -1 : p.begins_at_end(direction) ? length - 1 - s : s;
        any = any || in;
        if (in) continue;
        const std::int64_t position = std::int64_t{s} * p.directions + direction;
        std::memset(output + (position * p.batch + first + row) * p.hidden, 0,
                    p.hidden * sizeof(float));
      }
      if (any) step(gates, output);
    }
  }
};

int groups_of(const RecurrentShape& p) {
  return p.batch == 0 ? 0 : (p.batch + rows_of(p) - 1) / rows_of(p);
}

std::int64_t task_size(const RecurrentShape& p) {
  return rows_of(p) * (3 * std::int64_t{p.hidden} + p.gate_size() + 1);
}

void start(float* to, const float* from, std::int64_t count) {
  if (from != nullptr) {
    std::memcpy(to, from, count * sizeof(float));
  } else {
    std::memset(to, 0, count * sizeof(float));
  }
}

}  // namespace

void recurrent_pack(const float* weights, float* packed, const RecurrentShape& shape, int) {
  const int hidden = shape.hidden, first = shape.first_gates(), gates = shape.gates();
  std::memset(packed, 0, shape.packed_size() * sizeof(float));
  for (int direction = 0; direction < shape.directions; ++direction) {
    for (const int count : {first, gates - first}) {
      if (count == 0) continue;
      for (int column = 0; column < count * hidden; ++column) {
        float* to = packed + std::int64_t{column / kPanel} * kPanel * hidden + column % kPanel;
        for (int k = 0; k < hidden; ++k) to[std::int64_t{k} * kPanel] = *weights++;
      }
      packed += shape.panels_size(count);
    }
  }
}

std::int64_t recurrent_workspace(const RecurrentShape& shape, int) {
  const std::int64_t groups = groups_of(shape);
  return groups * shape.directions * task_size(shape) * static_cast<int>(sizeof(float));
}

void recurrent(const float* gates, const float* packed, const float* bias,
               const std::int32_t* lengths, const float* hidden, const float* cell,
               const float* peepholes, float* output, float* last_hidden, float* last_cell,
               float* workspace, const RecurrentShape& shape, int threads) {
  const RecurrentShape p = shape;
  const int groups = groups_of(p), tasks = groups * p.directions, most = rows_of(p);
  const std::int64_t packed_size = p.packed_size() / p.directions;
  const std::int64_t size = std::int64_t{most} * p.hidden;
  const auto run = [&](int index, int shared) {
    const int direction = index / groups, first = index % groups * most;
    const int rows = p.batch - first < most ? p.batch - first : most;
    const std::int64_t states = std::int64_t{rows} * p.hidden;
    const std::int64_t at = (std::int64_t{direction} * p.batch + first) * p.hidden;
    float* h = workspace + index * task_size(p);
    float* c = h + size;
    float* more = c + size;
    float* sums = more + size;
    const Task task{
        p,
        direction,
        first,
        rows,
        shared,
        packed + direction * packed_size,
        bias != nullptr ? bias + direction * p.hidden : nullptr,
        peepholes != nullptr ? peepholes + std::int64_t{direction} * 3 * p.hidden : nullptr,
        h,
        c,
        sums,
        more,
        reinterpret_cast<int*>(sums + most * p.gate_size())};
    start(h, hidden != nullptr ? hidden + at : nullptr, states);
    start(c, cell != nullptr ? cell + at : nullptr, states);
    task.run(gates, lengths, output);
    std::memcpy(last_hidden + at, h, states * sizeof(float));
    if (p.cell == RecurrentCell::lstm) std::memcpy(last_cell + at, c, states * sizeof(float));
  };
  // Within a loop that threads share nothing is shared again.
  const std::int64_t step = std::int64_t{p.gates()} * p.hidden * p.hidden;
  if (tasks < threads && step > 16 * kWorthAThread) {
    for (int index = 0; index < tasks; ++index) run(index, threads);
    return;
  }
  parallel_for(tasks, step * p.steps, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) run(static_cast<int>(index), 1);
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
