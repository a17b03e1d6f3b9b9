// matmul and linear_blocked on CUDA. Plain: one thread makes one output. Blocked: tiles as in
// blocked.cuh, whose matrices are read by strides 4 bytes at a time, or packed (linear) 16 at a
// time.
#include "cuda/common/blocked.cuh"
#include "ops/linear_blocked.h"
#include "ops/matmul.h"

namespace cnn_engine::cuda {
namespace {

__global__ void matmul_kernel(const float* __restrict__ a, const float* __restrict__ b,
                              float* __restrict__ output,  // [matrices, rows, columns]
                              const Epilogue epilogue, const MatmulShape p) {
  const std::int64_t index = grid_thread();
  if (index >= p.output_size()) return;
  const std::int64_t matrix = std::int64_t{p.rows} * p.columns, z = index / matrix;
  const unsigned position = static_cast<unsigned>(index - z * matrix);
  const unsigned row = position / p.columns, column = position - row * p.columns;
  const float* x = a + p.offset(p.a_batch, z) + row * p.a_row;
  const float* y = b + p.offset(p.b_batch, z) + column * p.b_column;
  float sum = 0.0f;
  for (int t = 0; t < p.depth;) {
    const int end = min(t + kPartOfSum, p.depth);
    float part = 0.0f;
    for (; t < end; ++t) part += x[t * p.a_depth] * y[t * p.b_depth];
    sum += part;
  }
  output[index] = epilogue(sum, column, index);
}

// `Size` rows or columns of a tile, read by strides; neighbouring threads read along the dimension
// that has stride 1.
template <int Size, int Pitch, int Threads>
class StridedMatrix {
 public:
  __device__ StridedMatrix(const float* matrix, std::int64_t stride, std::int64_t depth_stride,
                           int size)
      : matrix_(matrix) {
    const int thread = threadIdx.x;
    const bool along_depth = Threads < Size || depth_stride == 1;
    const int at = along_depth ? thread / kBlockDepth : thread % Size;
    t_ = along_depth ? thread % kBlockDepth : thread / Size;
    t_step_ = along_depth ? 0 : Threads / Size;
    left_ = size - at;
    left_step_ = along_depth ? Threads / kBlockDepth : 0;
    to_ = t_ * Pitch + at;
    to_step_ = t_step_ * Pitch + left_step_;
    from_ = matrix + at * stride + t_ * depth_stride;
    step_ = left_step_ * stride + t_step_ * depth_stride;
    depth_stride_ = depth_stride;
  }

  __device__ void load(float* to, int first, int end) const {
    const float* from = from_ + first * depth_stride_;
#pragma unroll(kCopies < 8 ? kCopies : 4)
    for (int j = 0; j < kCopies; ++j) {
      const bool valid = j * left_step_ < left_ && first + t_ + j * t_step_ < end;
      copy_async<4>(to + to_ + j * to_step_, valid ? from + j * step_ : matrix_, valid);
    }
  }

 private:
  static constexpr int kCopies = Size * kBlockDepth / Threads;
  static_assert(Size * kBlockDepth % Threads == 0);
  const float* matrix_;
  const float* from_;  // this thread's first
  std::int64_t step_, depth_stride_;
  int t_, t_step_, left_, left_step_, to_, to_step_;  // left: that exist, from its first
};

// A tile's sums, into y[row, column], or y[column, row] where `transposed`.
struct MatrixOutput {
  float* to;          // of the tile
  Epilogue epilogue;  // its bias begins with the tile's
  bool last, transposed;
  std::int64_t pitch;
  int rows, columns;  // that exist, from the tile's first

  __device__ void write(int m, int q, float4 accumulators) const {
    if (m >= rows) return;
    const float values[4] = {accumulators.x, accumulators.y, accumulators.z, accumulators.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (q + i >= columns) return;
      const std::int64_t at = transposed ? (q + i) * pitch + m : m * pitch + q + i;
      to[at] = last ? epilogue(values[i], transposed ? m : q + i, at) : values[i];
    }
  }
};

struct GemmPlan {
  bool large;  // tiles of 128 x 128, else 64 x 64
  std::int64_t row_tiles, column_tiles;
  int splits;

  GemmPlan(std::int64_t matrices, int rows, int columns, int depth, const Target& target) {
    const auto parts = [](int size, int part) {
      return std::int64_t{size / part} + (size % part != 0);
    };
    large = rows > 64 && columns > 64 &&
            matrices * parts(rows, 128) * parts(columns, 128) >= target.multiprocessors;
    const int size = large ? 128 : 64;
    row_tiles = parts(rows, size);
    column_tiles = parts(columns, size);
    splits = depth_splits(matrices * row_tiles * column_tiles, depth, target);
  }
};

using Large = BlockTile<128, 128, 8, 8>;
using Small = BlockTile<64, 64, 8, 4>;

// Blocks: row tiles, then splits, then column tiles, then matrices.
struct GemmGrid {
  int row_tiles, column_tiles, splits;
  std::int64_t part_size;
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::threads, 384 / Tile::threads + (Tile::threads == 256))
    matmul_blocked_kernel(const float* __restrict__ a, const float* __restrict__ b,
                          float* __restrict__ output,  // [matrices, rows, columns]
                          const Epilogue epilogue, const __grid_constant__ MatmulShape p,
                          const GemmGrid grid) {
  __shared__ __align__(16) float shared[kBlockStages * Tile::stage];
  unsigned block = blockIdx.x;
  const int row = static_cast<int>(block % grid.row_tiles) * Tile::M;
  block /= grid.row_tiles;
  const int split = block % grid.splits;
  block /= grid.splits;
  const int column = static_cast<int>(block % grid.column_tiles) * Tile::N;
  const std::int64_t z = block / grid.column_tiles;
  const StridedMatrix<Tile::M, Tile::a_pitch, Tile::threads> x(
      a + p.offset(p.a_batch, z) + row * p.a_row, p.a_row, p.a_depth, p.rows - row);
  const StridedMatrix<Tile::N, Tile::N, Tile::threads> y(
      b + p.offset(p.b_batch, z) + column * p.b_column, p.b_column, p.b_depth, p.columns - column);
  MatrixOutput out;
  out.to = output + split * grid.part_size + (z * p.rows + row) * p.columns + column;
  out.epilogue = epilogue;
  if (epilogue.bias) out.epilogue.bias += column;
  out.last = grid.splits == 1;
  out.transposed = false;
  out.pitch = p.columns;
  out.rows = p.rows - row;
  out.columns = p.columns - column;
  blocked_gemm<Tile>(shared, x, y, split_begin(p.depth, grid.splits, split),
                     split_begin(p.depth, grid.splits, split + 1), out);
}

// Rows of a tile are output features, columns are images.
template <typename Tile>
__global__ void __launch_bounds__(Tile::threads, 384 / Tile::threads + (Tile::threads == 256))
    linear_blocked_kernel(const float* __restrict__ input,   // [N, F]
                          const float* __restrict__ packed,  // [panels][F][rows]
                          float* __restrict__ output,        // [N, M]
                          const Epilogue epilogue, const __grid_constant__ LinearShape p,
                          const GemmGrid grid) {
  __shared__ __align__(16) float shared[kBlockStages * Tile::stage];
  unsigned block = blockIdx.x;
  const int row = static_cast<int>(block % grid.row_tiles) * Tile::M;
  block /= grid.row_tiles;
  const int split = block % grid.splits;
  const int column = static_cast<int>(block / grid.splits) * Tile::N;
  const Panels panels = p.panels();
  const PackedRows<Tile> x(packed + row / PackedRows<Tile>::kRows * panels.panel_size(),
                           panels.panels - row / PackedRows<Tile>::kRows, panels.depth);
  const StridedMatrix<Tile::N, Tile::N, Tile::threads> y(
      input + static_cast<std::int64_t>(column) * p.in_features, p.in_features, 1, p.n - column);
  MatrixOutput out;
  out.to =
      output + split * grid.part_size + static_cast<std::int64_t>(column) * p.out_features + row;
  out.epilogue = epilogue;
  if (epilogue.bias) out.epilogue.bias += row;
  out.last = grid.splits == 1;
  out.transposed = true;
  out.pitch = p.out_features;
  out.rows = p.out_features - row;
  out.columns = p.n - column;
  blocked_gemm<Tile>(shared, x, y, split_begin(p.in_features, grid.splits, split),
                     split_begin(p.in_features, grid.splits, split + 1), out);
}

GemmGrid grid_of(const GemmPlan& plan, std::int64_t outputs) {
  return {static_cast<int>(plan.row_tiles), static_cast<int>(plan.column_tiles), plan.splits,
          outputs};
}

// Linear layers of so few features that a panel has 4 rows take matmul's plain form of tile: 4 x
// 256.
using Few = BlockTile<4, 256, 4, 4>;

GemmPlan plan_of(const LinearShape& p, const Target& target) {
  GemmPlan plan(1, p.out_features, p.n, p.in_features, target);
  if (p.panels().rows == 4) {
    plan.row_tiles = 1;
    plan.column_tiles = (std::int64_t{p.n} + Few::N - 1) / Few::N;
    plan.splits = depth_splits(plan.column_tiles, p.in_features, target);
  }
  return plan;
}

__global__ void linear_pack_kernel(const float* __restrict__ weight,  // [M, F]
                                   float* __restrict__ packed,        // [panels][F][rows]
                                   const LinearShape p) {
  const std::int64_t index = grid_thread();
  if (index >= p.packed_size()) return;
  const Panels panels = p.panels();
  const std::int64_t position = index / panels.rows;
  const std::int64_t m = position / panels.depth * panels.rows + index % panels.rows;
  packed[index] = m < p.out_features ? weight[m * panels.depth + position % panels.depth] : 0.0f;
}

}  // namespace

void matmul(const float* a, const float* b, const float* bias, float* output,
            const MatmulShape& shape, float lowest, float highest, Stream stream) {
  if (shape.output_size() == 0) return;
  const Epilogue epilogue = {bias, nullptr, lowest, highest};
  matmul_kernel<<<blocks_for(shape.output_size()), kBlockThreads, 0, stream>>>(a, b, output,
                                                                               epilogue, shape);
  CUDA_CHECK_LAUNCH("matmul_kernel");
}

std::int64_t matmul_blocked_workspace(const MatmulShape& shape, const Target& target) {
  if (shape.output_size() == 0) return 0;
  const GemmPlan plan(shape.matrices(), shape.rows, shape.columns, shape.depth, target);
  return plan.splits == 1 ? 0 : 4 * plan.splits * shape.output_size();
}

void matmul_blocked(const float* a, const float* b, const float* bias, float* output,
                    void* workspace, const MatmulShape& shape, float lowest, float highest,
                    Stream stream) {
  if (shape.output_size() == 0) return;
  const GemmPlan plan(shape.matrices(), shape.rows, shape.columns, shape.depth, target_here());
  const std::int64_t blocks = plan.row_tiles * plan.column_tiles * plan.splits * shape.matrices();
  if (blocks > std::numeric_limits<std::int32_t>::max()) {
    return matmul(a, b, bias, output, shape, lowest, highest, stream);
  }
  const Epilogue epilogue = {bias, nullptr, lowest, highest};
  const GemmGrid grid = grid_of(plan, shape.output_size());
  const bool split = plan.splits > 1;
  float* to = split ? static_cast<float*>(workspace) : output;
  const auto launch = [&](auto kernel, int threads) {
    kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(a, b, to, epilogue, shape, grid);
    CUDA_CHECK_LAUNCH("matmul_blocked_kernel");
  };
  if (plan.large) {
    launch(matmul_blocked_kernel<Large>, Large::threads);
  } else {
    launch(matmul_blocked_kernel<Small>, Small::threads);
  }
  if (split) {
    launch_blocked_sum(to, output, epilogue, plan.splits, grid.part_size, 1, shape.columns, stream);
  }
}

void linear_pack(const float* weight, float* packed, const LinearShape& shape, Stream stream) {
  linear_pack_kernel<<<blocks_for(shape.packed_size()), kBlockThreads, 0, stream>>>(weight, packed,
                                                                                    shape);
  CUDA_CHECK_LAUNCH("linear_pack_kernel");
}

std::int64_t linear_blocked_workspace(const LinearShape& shape, const Target& target) {
  if (shape.n == 0) return 0;
  const GemmPlan plan = plan_of(shape, target);
  return plan.splits == 1 ? 0 : 4 * plan.splits * shape.output_size();
}

void linear_blocked(const float* input, const float* packed, const float* bias, float* output,
                    void* workspace, const LinearShape& shape, float lowest, float highest,
                    Stream stream) {
  if (shape.n == 0) return;
  if (!at_16_bytes(packed)) {
    throw std::invalid_argument("packed weights: expected an address that is a multiple of 16");
  }
  const GemmPlan plan = plan_of(shape, target_here());
  const Epilogue epilogue = {bias, nullptr, lowest, highest};
  const GemmGrid grid = grid_of(plan, shape.output_size());
  const std::int64_t blocks = plan.row_tiles * plan.column_tiles * plan.splits;
  const bool split = plan.splits > 1;
  float* to = split ? static_cast<float*>(workspace) : output;
  const auto launch = [&](auto kernel, int threads) {
    kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(input, packed, to, epilogue,
                                                                  shape, grid);
    CUDA_CHECK_LAUNCH("linear_blocked_kernel");
  };
  if (shape.panels().rows == 4) {
    launch(linear_blocked_kernel<Few>, Few::threads);
  } else if (plan.large) {
    launch(linear_blocked_kernel<Large>, Large::threads);
  } else {
    launch(linear_blocked_kernel<Small>, Small::threads);
  }
  if (split) {
    launch_blocked_sum(to, output, epilogue, plan.splits, grid.part_size, 1, shape.out_features,
                       stream);
  }
}

}  // namespace cnn_engine::cuda
