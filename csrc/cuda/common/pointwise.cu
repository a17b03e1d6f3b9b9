// Launches the kernels of trees of functions that were compiled at first use.
#include <algorithm>
#include <memory>

#include "cuda/common/binary.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/pointwise.cuh"
#include "ops/pointwise.h"
#include "runtime/check.h"

namespace cnn_engine::cuda {
namespace {

const void* kernel_of(cudaLibrary_t library, const char* name) {
  cudaKernel_t found = nullptr;
  CUDA_CHECK(cudaLibraryGetKernel(&found, library, name));
  return static_cast<const void*>(found);
}

}  // namespace

PointwiseProgram::PointwiseProgram(const std::string& code) {
  cudaLibrary_t library = nullptr;
  CUDA_CHECK(cudaLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  library_.reset(library,
                 [](void* loaded) { cudaLibraryUnload(static_cast<cudaLibrary_t>(loaded)); });
  fours_ = kernel_of(library, "pointwise_fours");
  ones_ = kernel_of(library, "pointwise_ones");
  many_ = kernel_of(library, "pointwise_many");
  cudaFuncAttributes attributes;
  CUDA_CHECK(cudaFuncGetAttributes(&attributes, ones_));
  waits_ = attributes.ptxVersion >= 90;  // else wait_for_inputs() is nothing
}

void PointwiseProgram::launch(const PointwiseTensors& tensors, const PointwiseShape& shape,
                              const PointwiseStorage& storage, const Overflow& overflow,
                              Stream stream) const {
  std::int64_t strides[kPointwiseTensors][kMaxDims];
  std::copy_n(shape.y_strides, kMaxDims, strides[0]);
  std::copy_n(shape.a_strides, kMaxDims, strides[1]);
  std::copy_n(shape.b_strides, kMaxDims, strides[2]);
  std::copy_n(shape.c_strides, kMaxDims, strides[3]);
  std::copy_n(shape.d_strides, kMaxDims, strides[4]);
  Strided<kPointwiseTensors> walk = collapse<kPointwiseTensors>(shape.dims, strides);
  if (walk.size == 0) return;
  const void* const all[kPointwiseTensors] = {tensors.y, tensors.a, tensors.b, tensors.c,
                                              tensors.d};
  const ElementType types[kPointwiseTensors] = {storage.y, storage.a, storage.b, storage.c,
                                                storage.d};
  bool aligned[kPointwiseTensors];
  for (int k = 0; k < kPointwiseTensors; ++k) {
    aligned[k] = is_aligned(all[k], 4 * bytes_of(types[k]));
  }
  const bool narrow = is_narrow(walk.size);
  const bool fours = narrow && take_fours(walk, aligned);
  PointwiseCall call = {{}, Walk<kPointwiseTensors>(walk), overflow};
  for (int k = 0; k < kPointwiseTensors; ++k) call.tensors[k] = const_cast<void*>(all[k]);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks_for(walk.size));
  config.blockDim = dim3(kBlockThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = waits_ ? 1 : 0;
  void* arguments[] = {&call};
  check(cudaLaunchKernelExC(&config,
                            fours    ? fours_
                            : narrow ? ones_
                                     : many_,
                            arguments),
        "launch of pointwise", __FILE__, __LINE__);
}

void pointwise_compiled(const PointwiseProgram* program, const PointwiseTensors& tensors,
                        const PointwiseShape& shape, const PointwiseStorage& storage,
                        const Overflow& overflow, Stream stream) {
  program->launch(tensors, shape, storage, overflow, stream);
}

}  // namespace cnn_engine::cuda
