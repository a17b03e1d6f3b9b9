// The operators in OpenACC directives: the contracts of csrc/ops, on the device that `device`
// names.
//
// Every tensor is given by its host address and is present on the device (data.cpp brings it
// there): the loop nests say `present` and never copy. Work has ended when a function returns.
#pragma once

#include <cstdint>

#include "ops/conv2d.h"
#include "ops/elementwise.h"
#include "ops/linear.h"
#include "ops/max_pool2d.h"
#include "ops/pad2d.h"
#include "ops/softmax.h"

namespace cnn_engine::openacc {

// A device: kHost runs the directives on the host, in the calling thread; 0 and more are GPUs.
inline constexpr int kHost = -1;

void conv2d(const float* input,   // [N, C, H, W]
            const float* weight,  // [K, C / groups, R, S]
            const float* bias,    // [K] or null
            float* output,        // [N, K, OH, OW]
            const Conv2dShape& shape, Conv2dVariant variant, bool reduction, int device);
void pad2d(const float* input,  // [N, C, H, W]
           float* output,       // [N, C, OH, OW]
           const Pad2dShape& shape, int device);
void relu(const float* input, float* output, const ElementwiseShape& shape, int device);
void tanh(const float* input, float* output, const ElementwiseShape& shape, int device);
void normalize(const std::uint8_t* input, float* output, const ElementwiseShape& shape, float scale,
               float offset, int device);
void max_pool2d(const float* input,  // [N, C, H, W]
                float* output,       // [N, C, OH, OW]
                const MaxPool2dShape& shape, int device);
void linear(const float* input,   // [N, F]
            const float* weight,  // [M, F]
            const float* bias,    // [M] or null
            float* output,        // [N, M]
            const LinearShape& shape, bool reduction, int device);
void softmax(const float* input,  // [N, M]
             float* output,       // [N, M]
             const SoftmaxShape& shape, bool reduction, int device);

// The nests of conv2d, one a variant and form, with the contract of conv2d.
void conv2d_if(const float* input, const float* weight, const float* bias, float* output,
               const Conv2dShape& shape);
void conv2d_if_reduction(const float* input, const float* weight, const float* bias, float* output,
                         const Conv2dShape& shape);
void conv2d_pad(const float* input, const float* weight, const float* bias, float* output,
                const Conv2dShape& shape);
void conv2d_pad_reduction(const float* input, const float* weight, const float* bias, float* output,
                          const Conv2dShape& shape);

}  // namespace cnn_engine::openacc
