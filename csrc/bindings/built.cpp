// A file of its own, so that nothing else is compiled again for another commit.
#include "bindings/built.h"

namespace cnn_engine {

const char* const kCommit = CNN_ENGINE_COMMIT;
const char* const kCompiler = CNN_ENGINE_CXX_COMPILER;

}  // namespace cnn_engine
