// The headers that programs are compiled from at first use; CMakeLists.txt writes their text into a
// file of its own.
#pragma once

namespace cnn_engine::bindings {

struct ProgramHeader {
  const char *name, *text;
};

extern const ProgramHeader kProgramHeaders[];  // up to one without a name

}  // namespace cnn_engine::bindings
