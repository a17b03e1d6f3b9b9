// matmul, matmul_blocked and linear_blocked on the CPU. The blocked forms pack the right matrix,
// some panels of its columns at a time, and pass rows of the left one over them (cpu/blocked.h).
#include "ops/matmul.h"

#include "cpu/blocked.h"
#include "ops/linear_blocked.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr int kRowsTogether = 16 * kColumnsTogether;  // of the left matrix, a task

int panels_at(const Panels& panels, int first) {
  return panels.panels - first < kPanelsTogether ? panels.panels - first : kPanelsTogether;
}

// Rows of x by panels that hold the columns from `first` on.
template <int R>
void rows_by_panels(const float* x, std::int64_t x_stride, int rows, const float* packed,
                    const Panels& panels, int count, const float* bias, float* y,
                    std::int64_t y_stride, int first, int columns, float lowest, float highest) {
  constexpr int kAtOnce = R < kWide ? R : kWide;
  multiply_all_columns<R>(packed, panels, count, x, x_stride, rows,
                          [&](int t, int row, const float* accumulators, int size) {
                            const int column = first + row, left = columns - column;
                            float* to = y + t * y_stride + column;
                            int i = 0;
                            for (; i < size && left - i >= kAtOnce; i += kAtOnce) {
                              Vec<kAtOnce> value = load<kAtOnce>(accumulators + i);
                              if (bias) value += load<kAtOnce>(bias + column + i);
                              store<kAtOnce>(to + i, clamp(value, lowest, highest));
                            }
                            for (; i < size && i < left; ++i) {
                              float value = accumulators[i];
                              if (bias) value += bias[column + i];
                              to[i] = clamp_one(value, lowest, highest);
                            }
                          });
}

template <int R>
void linear_by_panels(const float* input, const float* packed, const float* bias, float* output,
                      const LinearShape& p, float lowest, float highest, int threads) {
  const Panels panels = p.panels();
  const int shares = (panels.panels + kPanelsTogether - 1) / kPanelsTogether;
  const int blocks = (p.n + kRowsTogether - 1) / kRowsTogether;
  const std::int64_t cost =
      std::int64_t{p.n < kRowsTogether ? p.n : kRowsTogether} * kPanelsTogether * R * panels.depth;
  parallel_for(
      std::int64_t{blocks} * shares, cost, threads, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t index = begin; index < end; ++index) {
          const int panel = static_cast<int>(index / blocks) * kPanelsTogether;
          const int row = static_cast<int>(index % blocks) * kRowsTogether;
          const int rows = p.n - row < kRowsTogether ? p.n - row : kRowsTogether;
          rows_by_panels<R>(input + std::int64_t{row} * p.in_features, p.in_features, rows,
                            packed + panel * panels.panel_size(), panels, panels_at(panels, panel),
                            bias, output + std::int64_t{row} * p.out_features, p.out_features,
                            panel * R, p.out_features, lowest, highest);
        }
      });
}

// Of what a call packs for itself, which may be as wide as its vectors.
Panels panels_of(const MatmulShape& p) {
  const Panels usual(p.columns, p.depth);
  return kWide == 16 && p.columns > 8 ? Panels(p.columns, p.depth, 16) : usual;
}

std::int64_t matmul_scratch(const MatmulShape& p) {
  const Panels panels = panels_of(p);
  // Some packed panels, and rows of the left matrix whose values do not lie side by side.
  return panels.panel_size() * kPanelsTogether +
         (p.a_depth == 1 ? 0 : std::int64_t{kColumnsTogether} * p.depth);
}

template <int R>
void multiply_blocked(const float* a, const float* b, const float* bias, float* output,
                      const Scratch& scratch, const MatmulShape& p, float lowest, float highest,
                      int threads) {
  const Panels panels = panels_of(p);
  const int groups = (panels.panels + kPanelsTogether - 1) / kPanelsTogether;
  // Rows are shared out only where there are few columns: every share packs them.
  std::int64_t shares = 4 * threads / (p.matrices() * groups);
  if (shares > p.rows / kRowsTogether) shares = p.rows / kRowsTogether;
  if (threads == 1 || shares < 1) shares = 1;
  const std::int64_t cost =
      (std::int64_t{p.rows} / shares + 1) * kPanelsTogether * R * (std::int64_t{p.depth} + 1);
  parallel_for(
      p.matrices() * groups * shares, cost, threads, [&](std::int64_t begin, std::int64_t end) {
        const Scratch::Part part(scratch);
        float* packed = part.data();
        float* copied = packed + panels.panel_size() * kPanelsTogether;
        for (std::int64_t index = begin; index < end; ++index) {
          const std::int64_t share = index % shares;
          const int first_panel = static_cast<int>(index / shares % groups) * kPanelsTogether;
          const std::int64_t z = index / shares / groups;
          const int count = panels_at(panels, first_panel), first = first_panel * R;
          const float* right = b + p.offset(p.b_batch, z);
          for (int i = 0; i < count; ++i) {
            const int column = first + i * R;
            pack_panel(right + column * p.b_column, p.b_column, p.b_depth, p.columns - column,
                       panels, packed + i * panels.panel_size());
          }
          const float* left = a + p.offset(p.a_batch, z);
          float* y = output + z * p.rows * p.columns;
          const int end_row = static_cast<int>(p.rows * (share + 1) / shares);
          int row = static_cast<int>(p.rows * share / shares);
          while (row < end_row) {
            int rows = end_row - row;
            const float* x = left + row * p.a_row;
            std::int64_t stride = p.a_row;
            if (p.a_depth != 1) {
              if (rows > kColumnsTogether) rows = kColumnsTogether;
              for (int t = 0; t < rows; ++t) {
                for (int c = 0; c < p.depth; ++c) {
                  copied[std::int64_t{t} * p.depth + c] = x[t * p.a_row + c * p.a_depth];
                }
              }
              x = copied;
              stride = p.depth;
            }
            rows_by_panels<R>(x, stride, rows, packed, panels, count, bias,
                              y + std::int64_t{row} * p.columns, p.columns, first, p.columns,
                              lowest, highest);
            row += rows;
          }
        }
      });
}

}  // namespace

void matmul(const float* a, const float* b, const float* bias, float* output,
            const MatmulShape& shape, float lowest, float highest, int threads) {
  const MatmulShape p = shape;
  const std::int64_t cost = std::int64_t{p.columns} * (std::int64_t{p.depth} + 1);
  if (p.columns == 0) return;
  parallel_for(p.matrices() * p.rows, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t z = index / p.rows;
      const float* left = a + p.offset(p.a_batch, z) + index % p.rows * p.a_row;
      const float* right = b + p.offset(p.b_batch, z);
      for (int j = 0; j < p.columns; ++j) {
        float sum = 0.0f;
        for (int t = 0; t < p.depth; ++t) {
          sum += left[t * p.a_depth] * right[t * p.b_depth + j * p.b_column];
        }
        output[index * p.columns + j] = clamp_one(bias ? sum + bias[j] : sum, lowest, highest);
      }
    }
  });
}

std::int64_t matmul_blocked_workspace(const MatmulShape& shape, int threads) {
  return Scratch::bytes(threads, matmul_scratch(shape));
}

void matmul_blocked(const float* a, const float* b, const float* bias, float* output,
                    void* workspace, const MatmulShape& shape, float lowest, float highest,
                    int threads) {
  if (shape.output_size() == 0) return;
  const Scratch scratch(workspace, threads, matmul_scratch(shape));
  const int rows = panels_of(shape).rows;
  if (rows == 4) {
    multiply_blocked<4>(a, b, bias, output, scratch, shape, lowest, highest, threads);
  } else if (rows == 8) {
    multiply_blocked<8>(a, b, bias, output, scratch, shape, lowest, highest, threads);
  } else if constexpr (kWide == 16) {
    multiply_blocked<16>(a, b, bias, output, scratch, shape, lowest, highest, threads);
  }
}

void linear_pack(const float* weight, float* packed, const LinearShape& shape, int threads) {
  const Panels panels = shape.panels();
  parallel_for(
      panels.panels, panels.panel_size(), threads, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t panel = begin; panel < end; ++panel) {
          const int first = static_cast<int>(panel) * panels.rows;
          pack_panel(weight + std::int64_t{first} * panels.depth, panels.depth, 1,
                     shape.out_features - first, panels, packed + panel * panels.panel_size());
        }
      });
}

std::int64_t linear_blocked_workspace(const LinearShape&, int) { return 0; }

void linear_blocked(const float* input, const float* packed, const float* bias, float* output,
                    void*, const LinearShape& shape, float lowest, float highest, int threads) {
  if (shape.n == 0) return;
  if (shape.panels().rows == 8) {
    linear_by_panels<8>(input, packed, bias, output, shape, lowest, highest, threads);
  } else {
    linear_by_panels<4>(input, packed, bias, output, shape, lowest, highest, threads);
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
