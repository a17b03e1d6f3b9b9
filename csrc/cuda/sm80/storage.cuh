// Elements of the types of types.h: neighbours are read and written at once, as float32.
#pragma once

#include "cuda/common/elements.cuh"
#include "ops/types.h"

namespace cnn_engine::cuda {

// Calls body(a null pointer to the type of the elements).
template <typename Body>
void with_element_type(ElementType storage, const Body& body) {
  switch (storage) {
    case ElementType::float32:
      return body(static_cast<float*>(nullptr));
    case ElementType::float16:
      return body(static_cast<__half*>(nullptr));
    case ElementType::bfloat16:
      return body(static_cast<__nv_bfloat16*>(nullptr));
    default:
      refuse(storage);
  }
}

// Where element `offset` of a tensor lies.
inline const void* element(const void* tensor, ElementType storage, std::int64_t offset) {
  return static_cast<const char*>(tensor) + offset * bytes_of(storage);
}
inline void* element(void* tensor, ElementType storage, std::int64_t offset) {
  return static_cast<char*>(tensor) + offset * bytes_of(storage);
}

}  // namespace cnn_engine::cuda
