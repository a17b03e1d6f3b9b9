// How tensors between kernels lie in memory, where that is not float32: what is computed is float32
// whatever it is.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace cnn_engine {

enum class Stored { float32, float16, bfloat16 };

inline const char* name_of(Stored stored) {
  switch (stored) {
    case Stored::float32:
      return "float32";
    case Stored::float16:
      return "float16";
    case Stored::bfloat16:
      return "bfloat16";
  }
  return nullptr;
}

inline int bytes_of(Stored stored) { return stored == Stored::float32 ? 4 : 2; }

// Who is told that a finite number became an infinity on its way to memory, being past float16's
// 65,504, or that a function of finite numbers is none: `number` is written to the word at address
// `word`, which host and device reach. 0: no one.
struct Overflow {
  std::uint64_t word;
  int number;

  void validate() const {
    if (word % 4 != 0 || number < 0) {
      throw std::invalid_argument("overflow: expected the address of a word and a number from 0");
    }
  }
};

}  // namespace cnn_engine
