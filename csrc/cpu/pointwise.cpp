// pointwise on the CPU: runs along the last dimension, in blocks of which all results stay in the
// first-level cache.
#include "ops/pointwise.h"

#include <algorithm>

#include "cpu/blocks.h"
#include "cpu/strided.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr std::int64_t kPointwiseBlock = 512;  // 2 KiB per step

// An input where a block reads it.
struct PointwiseSource {
  const float* at;
  std::int64_t step;
};

// Copies the first `count` numbers of rows of `width`, `row_step` apart, in which numbers are
// `step` apart.
void gather_rows(const float* from, std::int64_t row_step, std::int64_t step, std::int64_t width,
                 std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; from += row_step) {
    for (std::int64_t k = 0; k < width && i < count; ++k) to[i++] = from[k * step];
  }
}

struct ReadyStep {
  UnaryBlock unary;
  BinaryBlock binary;
  int x, y;
  float alpha, beta;
};

// Throws std::invalid_argument for a step that reads what is not there.
void check_step(const PointwiseStep& step, int index) {
  const int known = kPointwiseInputs + index;
  const auto is_known = [&](int position) {
    return position >= 0 && position < known;
  };
  const bool is_function = step.is_binary
                               ? name_of(static_cast<BinaryFunction>(step.function)) != nullptr
                               : name_of(static_cast<UnaryFunction>(step.function)) != nullptr;
  if (!is_function || !is_known(step.x) || (step.is_binary && !is_known(step.y))) {
    refuse_step(index);
  }
}

}  // namespace

void pointwise(const float* a, const float* b, const float* c, const float* d, float* y,
               const PointwiseShape& shape, const PointwiseStep* steps, int threads) {
  constexpr int kOperands = 1 + kPointwiseInputs;
  std::int64_t strides[kOperands][kMaxDims];
  std::copy_n(shape.y_strides, kMaxDims, strides[0]);
  std::copy_n(shape.a_strides, kMaxDims, strides[1]);
  std::copy_n(shape.b_strides, kMaxDims, strides[2]);
  std::copy_n(shape.c_strides, kMaxDims, strides[3]);
  std::copy_n(shape.d_strides, kMaxDims, strides[4]);
  const Strided<kOperands> walk = collapse<kOperands>(shape.dims, strides);
  if (walk.size == 0) return;
  const int count_of_steps = static_cast<int>(shape.steps);
  ReadyStep ready[kPointwiseSteps];
  std::int64_t cost = 0;
  for (int i = 0; i < count_of_steps; ++i) {
    check_step(steps[i], i);
    ReadyStep& made = ready[i] = {{}, {}, steps[i].x, steps[i].y, steps[i].alpha, steps[i].beta};
    if (steps[i].is_binary) {
      made.binary = binary_block(static_cast<BinaryFunction>(steps[i].function));
      cost += made.binary.cost;
    } else {
      made.unary = unary_block(static_cast<UnaryFunction>(steps[i].function));
      cost += made.unary.cost;
    }
  }
  const float* const inputs[kPointwiseInputs] = {a, b, c, d};
  // Where the last dimension is short, such as a few channels beside a scale of each, a block is
  // several rows of it: what repeats in each row is written out once.
  const int last = walk.rank - 1;
  const bool by_rows = walk.rank > 1 && walk.dims[last] <= kPointwiseBlock / 2;
  const std::int64_t width = by_rows ? walk.dims[last] : 1;
  const std::int64_t most = kPointwiseBlock / width;  // rows of a block
  Strided<kOperands> rows = walk;
  if (by_rows) {
    rows.rank -= 1;
    rows.size /= width;
  }
  for_each_run(rows, cost * width, threads, [&](const std::int64_t* at, std::int64_t length) {
    alignas(64) float results[kPointwiseSteps][kPointwiseBlock];
    alignas(64) float copies[kPointwiseInputs][kPointwiseBlock];
    PointwiseSource known[kPointwiseInputs + kPointwiseSteps];
    for (std::int64_t first = 0; first < length; first += most) {
      const std::int64_t some = std::min(most, length - first), count = some * width;
      for (int i = 0; i < kPointwiseInputs; ++i) {
        const std::int64_t* const strides = walk.strides[1 + i];
        const std::int64_t row_step = rows.rank ? strides[rows.rank - 1] : 0;
        const float* const from = inputs[i] + at[1 + i] + first * row_step;
        const std::int64_t step = by_rows ? strides[last] : row_step;
        if (!by_rows || row_step == width * step) {
          known[i] = {from, step};
        } else {
          const bool is_there = row_step == 0 && first > 0;  // the first block has the most rows
          if (!is_there) gather_rows(from, row_step, step, width, count, copies[i]);
          known[i] = {copies[i], 1};
        }
      }
      const std::int64_t out_row = rows.rank ? walk.strides[0][rows.rank - 1] : 1;
      const std::int64_t out_step = by_rows ? walk.strides[0][last] : out_row;
      float* const out = y + at[0] + first * out_row;
      const bool direct = out_step == 1 && out_row == width;  // else columns among others
      for (int i = 0; i < count_of_steps; ++i) {
        const ReadyStep& step = ready[i];
        float* const to = i + 1 < count_of_steps || !direct ? results[i] : out;
        const PointwiseSource x = known[step.x];
        if (step.binary.run != nullptr) {
          const PointwiseSource other = known[step.y];
          step.binary.run(x.at, x.step, other.at, other.step, to, count);
        } else if (x.step == 1) {
          step.unary.run(x.at, to, count, step.alpha, step.beta);
        } else {
          for (std::int64_t k = 0; k < count; ++k) to[k] = x.at[k * x.step];
          step.unary.run(to, to, count, step.alpha, step.beta);
        }
        known[kPointwiseInputs + i] = {to, 1};
      }
      for (std::int64_t k = 0; k < count && !direct; ++k) {
        out[k / width * out_row + k % width * out_step] = results[count_of_steps - 1][k];
      }
    }
  });
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
