// What the modules were built from, and by which compiler.
#pragma once

namespace cnn_engine {

extern const char* const kCommit;
extern const char* const kCompiler;

}  // namespace cnn_engine
