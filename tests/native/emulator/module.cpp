// The emulated kernels as a module for tests; tests/helpers/emulated_cuda.py compiles it.
#include "bindings/no_gil.h"
#include "bindings/operators.h"
#include "cuda/common/target.h"
#include "cuda/sm80/conv2d_nhwc_gemm.h"
#include "faulty.h"

namespace cnn_engine {

namespace cuda {

const Target& target_here() {  // small, so that grids are, too
  static const Target target = {
      __CUDA_ARCH__ / 10, 4, 99 << 10, 100 << 10, 1, 0, 1 << 20, 1e12, 1e9, {}};
  return target;
}

#if __CUDA_ARCH__ >= 800  // types of operands that are not compiled here
namespace nhwc {
template <typename Operand>
void launch_gemm(const Gemm&, Reads, const Choice&, Stream) {
  throw std::invalid_argument("expected operands of float16");
}
template <typename Operand>
void launch_pack(const float*, void*, const Conv2dShape&, int, int, Stream) {
  throw std::invalid_argument("expected operands of float16");
}
#define CNN_ENGINE_OTHER(Operand)                                                \
  template void launch_gemm<Operand>(const Gemm&, Reads, const Choice&, Stream); \
  template void launch_pack<Operand>(const float*, void*, const Conv2dShape&, int, int, Stream);
CNN_ENGINE_OTHER(Split)
CNN_ENGINE_OTHER(Tf32)
CNN_ENGINE_OTHER(Bfloat16)
#undef CNN_ENGINE_OTHER
}  // namespace nhwc
#endif
}  // namespace cuda

namespace bindings {
PYBIND11_MODULE(CNN_ENGINE_MODULE, module) {
  py::module_::import("cnn_engine._cpu");  // where the shapes are registered
#define CNN_ENGINE_EMULATED(name) bind<OnHost>(module, #name, +[] { return &cuda::name; });
  CNN_ENGINE_EMULATED(copy_nd)
  CNN_ENGINE_EMULATED(gather)
  CNN_ENGINE_EMULATED(linear_mma_packed)
  CNN_ENGINE_EMULATED(linear_mma_pack)
  CNN_ENGINE_EMULATED(linear_mma)
  CNN_ENGINE_EMULATED(quantized_conv2d_packed)
  CNN_ENGINE_EMULATED(quantized_conv2d_pack)
  CNN_ENGINE_EMULATED(quantized_conv2d_workspace)
  CNN_ENGINE_EMULATED(quantized_conv2d)
  CNN_ENGINE_EMULATED(quantize_linear)
  CNN_ENGINE_EMULATED(dequantize_linear)
  CNN_ENGINE_EMULATED(lookup)
  CNN_ENGINE_EMULATED(quantized_add)
  CNN_ENGINE_EMULATED(quantized_mul)
  CNN_ENGINE_EMULATED(quantized_mean)
  CNN_ENGINE_EMULATED(quantized_max_pool2d)
#if __CUDA_ARCH__ >= 800
  CNN_ENGINE_EMULATED(conv2d_nhwc_packed)
  CNN_ENGINE_EMULATED(conv2d_nhwc_workspace)
  CNN_ENGINE_EMULATED(conv2d_nhwc_pack)
  CNN_ENGINE_EMULATED(conv2d_nhwc)
#endif
#if __CUDA_ARCH__ >= 900
  CNN_ENGINE_EMULATED(quantized_conv2d_wgmma_takes)
  CNN_ENGINE_EMULATED(quantized_conv2d_wgmma_packed)
  CNN_ENGINE_EMULATED(quantized_conv2d_wgmma_pack)
  CNN_ENGINE_EMULATED(quantized_conv2d_wgmma)
#endif
  module.def("set_order", [](int order) { emulator::order = static_cast<emulator::Order>(order); });
  module.def("faulty_product", &faulty_product);
}
}  // namespace bindings
}  // namespace cnn_engine
