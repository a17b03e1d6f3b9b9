// conv2d_nhwc on the CPU: which method it is.
#include "ops/conv2d_nhwc.h"

#include <algorithm>

#include "cpu/conv2d_nhwc_depthwise.h"
#include "cpu/conv2d_nhwc_direct.h"
#include "cpu/conv2d_nhwc_phases.h"
#include "cpu/conv2d_nhwc_trimmed.h"
#include "cpu/conv2d_nhwc_winograd.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {

namespace {

// Groups of several channels go directly where vectors do not hold whole ones.
bool is_depthwise(const Conv2dShape& p, Conv2dMethod method) {
  return method == Conv2dMethod::depthwise && (p.group_channels() == 1 || has_lanes_of_groups(p));
}

}  // namespace

std::int64_t conv2d_nhwc_packed(const Conv2dShape& p, Conv2dMethod method) {
  if (method == Conv2dMethod::winograd4 || method == Conv2dMethod::winograd2) {
    return WinogradShape(p, method).packed(p);
  }
  if (is_depthwise(p, method)) return depthwise_packed(p);
  if (method == Conv2dMethod::planar && is_phased(p)) return phases_packed(p);
  return direct_packed<Float32>(p, method == Conv2dMethod::planar);
}

void conv2d_nhwc_pack(const float* weight, float* packed, const Conv2dShape& shape,
                      Conv2dMethod method, int threads) {
  const Conv2dShape p = shape;
  if (method == Conv2dMethod::winograd4 || method == Conv2dMethod::winograd2) {
    const WindowBound bound = winograd_bound(weight, p, method);
    if (bound.fits != 0.0f) return winograd_pack(weight, packed, bound, p, method, threads);
    __builtin_memcpy(packed, &bound, sizeof bound);
    return direct_pack<Float32>(weight, packed + kBoundFloats, p);
  }
  if (is_depthwise(p, method)) return depthwise_pack(weight, packed, p);
  if (method == Conv2dMethod::planar && is_phased(p)) {
    const WindowBound bound = phases_bound(weight, p);
    if (bound.fits != 0.0f) return phases_pack(weight, packed, bound, p);
    __builtin_memcpy(packed, &bound, sizeof bound);
    return direct_pack<Float32>(weight, packed + kBoundFloats, p, true);
  }
  direct_pack<Float32>(weight, packed, p, method == Conv2dMethod::planar);
}

namespace {

std::int64_t scratch_floats(const Conv2dShape& p, Conv2dMethod method) {
  if (method == Conv2dMethod::winograd4 || method == Conv2dMethod::winograd2) {
    const std::int64_t tiles = winograd_scratch(p, method);
    const std::int64_t bands = direct_scratch<Float32>(p);
    return tiles > bands ? tiles : bands;
  }
  if (is_depthwise(p, method)) return depthwise_scratch(p);
  if (method == Conv2dMethod::planar && is_phased(p)) {
    const std::int64_t tiles = PhasesShape(p).floats(p), bands = direct_scratch<Float32>(p, true);
    return tiles > bands ? tiles : bands;
  }
  const std::int64_t bands = direct_scratch<Float32>(p, method == Conv2dMethod::planar);
  return std::max(bands, trimmed_scratch(p));
}

}  // namespace

std::int64_t conv2d_nhwc_workspace(const Conv2dShape& shape, Conv2dMethod method, int threads) {
  return Scratch::bytes(threads, scratch_floats(shape, method));
}

void conv2d_nhwc(const float* input, const float* packed, const float* bias, const float* residual,
                 const float* scale, const float* shift, float* output, void* workspace,
                 const Conv2dShape& shape, const Conv2dPitches& pitches, Conv2dMethod method,
                 bool scale_per_image, float floor, UnaryFunction activation, float alpha,
                 float beta, int threads) {
  if (shape.n == 0) return;
  const Conv2dShape p = shape;
  const Scratch scratch(workspace, threads, scratch_floats(p, method));
  const Activation function{activation, alpha, beta};
  Direct call{input,
              packed,
              residual,
              {scale, shift, scale_per_image, floor},
              output,
              pitches,
              function.epilogue(bias),
              function};
  const Winograd tiled{input, packed, residual, output, pitches, function, call.last};
  switch (method) {
    case Conv2dMethod::winograd2:
    case Conv2dMethod::winograd4:
      if (fits_winograd(packed)) return winograd(tiled, scratch, p, method, threads);
      call.packed += kBoundFloats;
      return banded(call, scratch, p, false, threads);
    case Conv2dMethod::planar:
      if (is_phased(p)) {
        if (fits_winograd(packed)) return phases(tiled, scratch, p, threads);
        call.packed += kBoundFloats;
      }
      return banded(call, scratch, p, true, threads);
    case Conv2dMethod::depthwise:
      if (is_depthwise(p, method)) {
        return depthwise(input, packed, bias, residual, output, scratch, p, pitches,
                         call.activation, threads);
      }
      [[fallthrough]];
    case Conv2dMethod::direct:
      if (is_pointwise(p)) return pointwise(call, scratch, p, threads);
      if (is_trimmed(p) && !call.prologue.any()) return trimmed(call, scratch, p, threads);
      return banded(call, scratch, p, false, threads);
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
