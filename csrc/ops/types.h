// The types of elements: what tensors hold in memory, and what is multiplied.
//
// Tensors between kernels lie in memory as float32, float16 or bfloat16: what is computed is
// float32 whatever it is. Products are of float32 (three parts of bfloat16 on tensor cores, with
// float32's error), or of operands that are rounded to tf32, float16 or bfloat16; sums are float32.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "ops/overflow.h"

namespace cnn_engine {

enum class ElementType { float32, tf32, float16, bfloat16, float64, int32, int8, uint8 };

inline const char* name_of(ElementType type) {
  switch (type) {
    case ElementType::float32:
      return "float32";
    case ElementType::tf32:
      return "tf32";
    case ElementType::float16:
      return "float16";
    case ElementType::bfloat16:
      return "bfloat16";
    case ElementType::float64:
      return "float64";
    case ElementType::int32:
      return "int32";
    case ElementType::int8:
      return "int8";
    case ElementType::uint8:
      return "uint8";
  }
  return nullptr;
}

// Of one element in memory.
inline int bytes_of(ElementType type) {
  switch (type) {
    case ElementType::float64:
      return 8;
    case ElementType::float32:
    case ElementType::tf32:
    case ElementType::int32:
      return 4;
    case ElementType::float16:
    case ElementType::bfloat16:
      return 2;
    case ElementType::int8:
    case ElementType::uint8:
      return 1;
  }
  return 0;
}

// Throws for a type that a kernel is not compiled for.
[[noreturn]] inline void refuse(ElementType type) {
  throw std::invalid_argument(
      std::string("element type: expected one that this kernel has, found ") + name_of(type));
}

// Throws where a tensor is stored as neither float32 nor what is multiplied.
inline void check_storage(const char* tensor, ElementType storage, ElementType compute_type) {
  if (storage != ElementType::float32 && storage != compute_type) {
    throw std::invalid_argument(std::string(tensor) + ": expected float32 or " +
                                name_of(compute_type) + ", which is multiplied, found " +
                                name_of(storage));
  }
}

}  // namespace cnn_engine
