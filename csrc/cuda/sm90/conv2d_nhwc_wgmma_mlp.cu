// mlp: what it takes, and its launch.
#include <algorithm>
#include <string>

#include "cuda/common/launch.cuh"
#include "cuda/common/strided.cuh"
#include "cuda/sm80/halves.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_map.h"
#include "cuda/sm90/conv2d_nhwc_wgmma_mlp.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_mlp.h"

namespace cnn_engine::cuda {
namespace mlps {
namespace {

// The kernel's channels and outputs for a shape, 0: none.
int width_of(const Conv2dShape& shape, int outputs) {
  for (const int width : {96, 192}) {
    const int units = divided(width, kFilters);
    if (shape.c <= width && outputs <= width && divided(shape.c, kFilters) == units &&
        divided(outputs, kFilters) == units) {
      return width;
    }
  }
  return 0;
}

const char* why_not(const Conv2dShape& shape) {
  if (shape.groups != 1) return "one group";
  if (!wgmma::is_tiled(shape)) return "a kernel of 1x1, one place apart, without padding";
  return nullptr;
}

const char* why_not_halves(const Conv2dShape& shape, int outputs) {
  if (shape.c % 8 != 0 || outputs % 8 != 0) return "channels and outputs in eights";
  if (shape.k % (2 * kHidden) != 0 || shape.k > kMostHidden) {
    return "hidden channels in 128s, at most 1,024";
  }
  if (width_of(shape, outputs) == 0) return "65 to 96 channels and outputs, or 129 to 192";
  return nullptr;
}

// Float32's kernel takes tf32, too.
bool is_clustered(ElementType compute_type) { return !wgmma::has_16_bits(compute_type); }

const char* why_not(const Conv2dShape& shape, int outputs, ElementType compute_type) {
  if (const char* expected = why_not(shape)) return expected;
  return is_clustered(compute_type) ? mlp_clusters::why_not(shape, outputs)
                                    : why_not_halves(shape, outputs);
}

void check(const Conv2dShape& shape, int outputs, ElementType compute_type) {
  if (const char* expected = why_not(shape, outputs, compute_type)) {
    throw std::invalid_argument(std::string("mlp: expected ") + expected);
  }
}

std::int64_t first_bytes(const Conv2dShape& shape) {
  return std::int64_t{divided(shape.c, kFilters)} * (shape.k / kFilters) * kUnitBytes;
}
std::int64_t second_bytes(const Conv2dShape& shape, int outputs) {
  return std::int64_t{divided(outputs, kFilters)} * (shape.k / kFilters) * kUnitBytes;
}

// What a launch takes, in microseconds: fitted to launches of batches of 1 to 20 on an H200.
double time_of(const Conv2dShape& shape, int outputs, int multiprocessors) {
  const int tiles = divided(std::int64_t{shape.n} * shape.h * shape.w, kGroups * kPositions);
  const double step = width_of(shape, outputs) == 96 ? 1.0 : 1.67;
  return 3.0 + divided(tiles, multiprocessors) * (1.5 + shape.k / kHidden * step);
}

template <typename T, int Width>
void launch_width(const Mlp& p, const CUtensorMap& images, const CUtensorMap& residuals,
                  const CUtensorMap& results, int multiprocessors, Stream stream) {
  const auto kernel = mlp_kernel<T, Width>;
  constexpr int kBytes = Block<Width>::kBytes;
  make_ready(kernel, kBytes);
  launch("mlp_kernel", kernel, dim3(std::min(p.tiles, multiprocessors)), dim3(kThreads), kBytes,
         stream, 1, images, residuals, results, p);
}

void run(const MlpCall& call, ElementType compute_type) {
  const Conv2dShape& shape = call.shape;
  const int multiprocessors = target_here().multiprocessors;
  with_halves("mlp", compute_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const std::int64_t positions = std::int64_t{shape.h} * shape.w;
    for_each_part_of_batch(shape.n, positions, [&](std::int64_t before, int images) {
      Mlp p = {};
      p.first = static_cast<const char*>(call.packed);
      p.second = p.first + first_bytes(shape);
      p.first_bias = call.first_bias;
      p.second_bias = call.second_bias;
      p.adds = call.residual != nullptr;
      p.rows = static_cast<int>(images * positions);
      p.tiles = wgmma::divided(p.rows, kGroups * kPositions);
      p.steps = shape.k / kHidden;
      p.outputs = call.outputs;
      p.outer = call.outer;
      p.overflow = call.overflow;
      if (p.tiles == 0) return;
      const auto map = [&](const void* rows, int columns) {
        return wgmma::map_of_rows<T>(static_cast<const T*>(rows) + before * positions * columns,
                                     p.rows, columns, columns, kPositions,
                                     CU_TENSOR_MAP_SWIZZLE_128B);
      };
      const CUtensorMap of_images = map(call.x, shape.c), of_results = map(call.y, call.outputs),
                        of_residuals =
                            call.residual ? map(call.residual, call.outputs) : CUtensorMap{};
      if (width_of(shape, call.outputs) == 96) {
        launch_width<T, 96>(p, of_images, of_residuals, of_results, multiprocessors, call.stream);
      } else {
        launch_width<T, 192>(p, of_images, of_residuals, of_results, multiprocessors, call.stream);
      }
    });
  });
}

}  // namespace
}  // namespace mlps

std::int64_t mlp_takes(const MlpShape& both, ElementType compute_type, const Target& target) {
  const Conv2dShape& shape = both.first;
  const int outputs = both.outputs;
  if (mlps::why_not(shape, outputs, compute_type) != nullptr) return 0;
  const int multiprocessors = target.multiprocessors;
  const bool clustered = mlps::is_clustered(compute_type);
  // bfloat16 as float16, whose times costs are fitted to.
  const ElementType costs = clustered ? compute_type : ElementType::float16;
  const Conv2dShape second{shape.n, shape.k, shape.h, shape.w, outputs, 1, 1, 1, 1, 0, 0};
  const int any = 0;
  const double apart =
      wgmma::gemm_time(shape, nullptr, UnaryFunction::gelu, costs, multiprocessors) +
      wgmma::gemm_time(second, &any, UnaryFunction::relu, costs, multiprocessors);
  const double together = clustered ? mlp_clusters::time_of(shape, target)
                                    : mlps::time_of(shape, outputs, multiprocessors);
  return together < apart;
}

std::int64_t mlp_packed(const MlpShape& both, ElementType compute_type, int) {
  const Conv2dShape& shape = both.first;
  const int outputs = both.outputs;
  mlps::check(shape, outputs, compute_type);
  if (mlps::is_clustered(compute_type)) return mlp_clusters::packed_bytes(shape, outputs);
  return mlps::first_bytes(shape) + mlps::second_bytes(shape, outputs);
}

void mlp_pack(const float* first, const float* second, void* packed, const MlpShape& both,
              ElementType compute_type, Stream stream) {
  const Conv2dShape& shape = both.first;
  const int outputs = both.outputs;
  mlps::check(shape, outputs, compute_type);
  if (mlps::is_clustered(compute_type)) {
    mlp_clusters::pack(first, second, packed, shape, outputs, stream);
  } else {
    with_halves("mlp", compute_type, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      const auto pack = [&](const float* weight, char* to, int channels, int filters) {
        wgmma::launch_pack<T>(weight, to, wgmma::gemm_over(channels, filters),
                              wgmma::divided(channels, wgmma::kFilters), stream);
      };
      char* const to = static_cast<char*>(packed);
      pack(first, to, shape.c, shape.k);
      pack(second, to + mlps::first_bytes(shape), shape.k, outputs);
    });
  }
  // The kernel reads them before it waits for the kernels before it.
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void mlp(const void* x, const void* packed, void* y, const MlpShape& both, ElementType compute_type,
         const std::array<Epilogue, 2>& epilogues, Stream stream) {
  const Conv2dShape& shape = both.first;
  const int outputs = both.outputs;
  const Epilogue& last = epilogues[1];
  const void* const residual = last.residual.data;
  mlps::check(shape, outputs, compute_type);
  for (const void* address : {x, packed, residual, const_cast<const void*>(y)}) {
    if (!is_aligned(address, 16)) {
      throw std::invalid_argument("mlp: expected addresses that are multiples of 16");
    }
  }
  const wgmma::Clamp clamp =
      wgmma::clamp_of(last.activation, "mlp: expected relu or clip behind the sums");
  const MlpCall call = {x,       packed, epilogues[0].bias, last.bias, residual, y, shape,
                        outputs, clamp,  last.overflow,     stream};
  if (mlps::is_clustered(compute_type)) return mlp_clusters::run(call);
  mlps::run(call, compute_type);
}

}  // namespace cnn_engine::cuda
