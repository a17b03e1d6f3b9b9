// Where kernels report results that 16 bits do not hold, for programs too that are compiled at
// first use.
#pragma once

#include <cstdint>
#ifndef __CUDACC_RTC__
#include <stdexcept>
#endif

namespace cnn_engine {

// Where a kernel reports that a finite number became an infinity on its way to memory, being past
// float16's 65,504, or that a function of finite numbers is none: `number` is written to the word
// at address `word`, which host and device reach. 0: no one.
struct Overflow {
  std::uint64_t word;
  int number;

#ifndef __CUDACC_RTC__
  void validate() const {
    if (word % 4 != 0 || number < 0) {
      throw std::invalid_argument("overflow: expected the address of a word and a number from 0");
    }
  }
#endif
};

}  // namespace cnn_engine
