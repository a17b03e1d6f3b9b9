// Tensor maps of images for TMA.
#pragma once

#include <cuda.h>

#include <string>
#include <type_traits>

#include "cuda/sm80/tf32.cuh"
#include "cuda/sm90/conv2d_nhwc_wgmma_gemm.h"
#include "runtime/check.h"
#include "runtime/device.h"

namespace cnn_engine::cuda::wgmma {

inline void check_map(CUresult result, const char* name) {
  if (result != CUDA_SUCCESS) {
    throw cuda::Error(std::string(name) + ": CUDA error " + std::to_string(result));
  }
}

// Bits, as they are; tf32 is rounded as it is copied.
template <typename T>
constexpr CUtensorMapDataType kMapType = std::is_same_v<T, Tf32> ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                         : sizeof(T) == 4        ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                                                 : CU_TENSOR_MAP_DATA_TYPE_UINT16;

// Whether rows of channels say it all: no window, no stride.
inline bool is_tiled(const Conv2dShape& p) {
  return p.r * p.s == 1 && p.stride_h * p.stride_w == 1 &&
         p.pad_top + p.pad_left + p.pad_bottom + p.pad_right == 0;
}

// Rows of `columns`, of which a copy has `rows`, 128 bytes each.
template <typename T>
CUtensorMap map_of_rows(const void* x,  // [count, pitch]
                        std::int64_t count, int columns, int pitch, int rows,
                        CUtensorMapSwizzle swizzle) {
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  const cuuint64_t dims[] = {cuuint64_t(columns), cuuint64_t(count)},
                   strides[] = {pitch * sizeof(T)};
  const cuuint32_t box[] = {128 / sizeof(T), cuuint32_t(rows)}, steps[] = {1, 1};
  CUtensorMap map;
  check_map(encode(&map, kMapType<T>, 2, const_cast<void*>(x), dims, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
            "cuTensorMapEncodeTiled");
  return map;
}

// Images of which a copy has so many rows, columns and channels: 128 bytes of them.
template <typename T, int Channels = 128 / sizeof(T)>
CUtensorMap map_of_boxes(const void* x,  // [N, H, W, pitch]
                         const Conv2dShape& p, int pitch, int rows, int columns,
                         CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  const cuuint64_t row = pitch * sizeof(T);
  const cuuint64_t dims[] = {cuuint64_t(p.c), cuuint64_t(p.w), cuuint64_t(p.h), cuuint64_t(p.n)},
                   strides[] = {row, row * p.w, row * p.w * p.h};
  const cuuint32_t box[] = {Channels, cuuint32_t(columns), cuuint32_t(rows), 1},
                   steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  check_map(encode(&map, kMapType<T>, 4, const_cast<void*>(x), dims, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
            "cuTensorMapEncodeTiled");
  return map;
}

// Images of which a copy has `positions`, 128 bytes of channels each; none of none.
template <typename T>
CUtensorMap map_of_images(const SourceImages& images, int positions) {
  const auto& [x, p, pitch] = images;
  if (!x) return {};
  if (is_tiled(p)) {
    const std::int64_t all = std::int64_t{p.n} * p.h * p.w;
    return map_of_rows<T>(x, all, p.c, pitch, positions, CU_TENSOR_MAP_SWIZZLE_128B);
  }
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col", 12000);
  const cuuint64_t row = pitch * sizeof(T);
  const cuuint64_t dims[] = {cuuint64_t(p.c), cuuint64_t(p.w), cuuint64_t(p.h), cuuint64_t(p.n)};
  const cuuint64_t strides[] = {row, row * p.w, row * p.w * p.h};
  const int lower[] = {-p.pad_left, -p.pad_top};
  const int upper[] = {p.pad_right - (p.s - 1) * p.dilation_w,
                       p.pad_bottom - (p.r - 1) * p.dilation_h};
  const cuuint32_t steps[] = {1, cuuint32_t(p.stride_w), cuuint32_t(p.stride_h), 1};
  CUtensorMap map;
  check_map(encode(&map, kMapType<T>, 4, const_cast<void*>(x), dims, strides, lower, upper,
                   128 / sizeof(T), positions, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
            "cuTensorMapEncodeIm2col");
  return map;
}

}  // namespace cnn_engine::cuda::wgmma
