// Of CUDA's driver what csrc/cuda uses, for emulated kernels: tensor maps, as ptx.h's copies read
// them.
#pragma once

#include <cstdint>

using cuuint32_t = std::uint32_t;
using cuuint64_t = std::uint64_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B = 128, CU_TENSOR_MAP_SWIZZLE_64B = 64 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_128B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// Bytes [dims[3], dims[2], dims[1], dims[0]], from one of which to the next it is strides[i - 1].
struct CUtensorMap {
  const char* data;
  std::int64_t dims[4], strides[3], steps[4];
  int columns, rows;  // of a box; of im2col channels and pixels
  int lower[2], upper[2];
  int swizzle;
};

// Returns whether the driver would take sizes and alignments.
inline bool is_valid(const CUtensorMap& map, int rank) {
  bool valid = reinterpret_cast<std::uintptr_t>(map.data) % 16 == 0 && map.rows <= 1024 &&
               map.columns == map.swizzle;
  for (int i = 0; i + 1 < rank; ++i) valid &= map.strides[i] % 16 == 0;
  for (int i = 0; i < rank; ++i) valid &= map.dims[i] > 0 && map.steps[i] >= 1 && map.steps[i] <= 8;
  return valid;
}

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank,
                                       void* data, const cuuint64_t* dims,
                                       const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  *map = {static_cast<const char*>(data),
          {std::int64_t(dims[0]), std::int64_t(dims[1])},
          {std::int64_t(strides[0])},
          {steps[0], steps[1]},
          static_cast<int>(box[0]),
          static_cast<int>(box[1]),
          {},
          {},
          swizzle};
  return rank == 2 && box[1] <= 256 && is_valid(*map, 2) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

inline CUresult cuTensorMapEncodeIm2col(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank,
                                        void* data, const cuuint64_t* dims,
                                        const cuuint64_t* strides, const int* lower,
                                        const int* upper, cuuint32_t channels, cuuint32_t pixels,
                                        const cuuint32_t* steps, CUtensorMapInterleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                        CUtensorMapFloatOOBfill) {
  *map = {static_cast<const char*>(data), {}, {}, {},     static_cast<int>(channels),
          static_cast<int>(pixels),       {}, {}, swizzle};
  for (int i = 0; i < 4; ++i) {
    map->dims[i] = static_cast<std::int64_t>(dims[i]);
    map->steps[i] = steps[i];
    if (i < 3) map->strides[i] = static_cast<std::int64_t>(strides[i]);
    if (i < 2) map->lower[i] = lower[i], map->upper[i] = upper[i];
  }
  bool valid = rank == 4 && is_valid(*map, 4);
  for (int corner : {lower[0], lower[1], upper[0], upper[1]}) {
    valid &= corner >= -128 && corner <= 127;
  }
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
