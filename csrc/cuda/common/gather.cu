// gather on CUDA: one thread makes one element.
#include "cuda/common/strided.cuh"
#include "ops/gather.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

// The walk's only operand is the tables: its strides are where each dimension's begins.
template <typename Item, typename Index>
__global__ void gather_kernel(const Item* __restrict__ input,
                              const std::int64_t* __restrict__ tables,  // [sum of dims]
                              Item* __restrict__ output,                // [size, run]
                              const Walk<1> walk, std::int64_t run, Divisor run_divisor,
                              Item value) {
  const std::int64_t size = walk.size * run;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = grid_thread(); i < size; i += threads) {
    Index above;
    if constexpr (sizeof(Index) == 4) {
      above = run_divisor.quotient(static_cast<Index>(i));
    } else {
      above = static_cast<Index>(i) / static_cast<Index>(run);
    }
    std::int64_t offset = i - static_cast<std::int64_t>(above) * run;
    bool inside = true;
#pragma unroll
    for (int d = kMaxDims - 1; d >= 0; --d) {
      if (d >= walk.rank) continue;
      const Index index = above;
      if constexpr (sizeof(Index) == 4) {
        above = d == 0 ? 0 : walk.divisors[d].quotient(index);
      } else {
        above = d == 0 ? 0 : index / static_cast<Index>(walk.dims[d]);
      }
      const std::int64_t position = index - above * static_cast<Index>(walk.dims[d]);
      const std::int64_t step = tables[walk.strides[0][d] + position];
      inside = inside && step >= 0;
      offset += step;
    }
    output[i] = inside ? input[offset] : value;
  }
}

template <typename Item>
void launch_gather(const void* input, const std::int64_t* tables, void* output,
                   const GatherShape& shape, Stream stream) {
  Strided<1> dims{};
  dims.rank = shape.rank;
  dims.size = 1;
  std::int64_t begin = 0;
  for (int d = 0; d < shape.rank; ++d) {
    dims.dims[d] = shape.dims[d];
    dims.strides[0][d] = begin;
    dims.size *= shape.dims[d];
    begin += shape.dims[d];
  }
  const std::int64_t size = dims.size * shape.run;
  if (size == 0) return;
  with_index(size, [&](auto index) {
    gather_kernel<Item, decltype(index)><<<blocks_for(size), kBlockThreads, 0, stream>>>(
        static_cast<const Item*>(input), tables, static_cast<Item*>(output), Walk<1>(dims),
        shape.run, Divisor(is_narrow(shape.run) ? shape.run : 1), static_cast<Item>(shape.fill));
  });
  CUDA_CHECK_LAUNCH("gather_kernel");
}

}  // namespace

void gather(const void* input, const std::int64_t* tables, void* output, const GatherShape& shape,
            Stream stream) {
  switch (shape.itemsize) {
    case 1:
      return launch_gather<std::uint8_t>(input, tables, output, shape, stream);
    case 2:
      return launch_gather<std::uint16_t>(input, tables, output, shape, stream);
    case 4:
      return launch_gather<std::uint32_t>(input, tables, output, shape, stream);
    default:
      return launch_gather<std::uint64_t>(input, tables, output, shape, stream);
  }
}

}  // namespace cnn_engine::cuda
