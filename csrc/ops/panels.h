// How the left matrix of a blocked product is packed, for conv2d_blocked, matmul_blocked and their
// like, on both devices: [panels][depth][rows], a panel being so many of its rows, missing ones
// zero.
#pragma once

#include "runtime/shape.h"

namespace cnn_engine {

struct Panels {
  int rows;    // of a panel
  int panels;  // that hold all rows of the matrix
  int depth;   // products of a sum

  CNN_ENGINE_INLINE Panels(int matrix_rows, int matrix_depth)
      : Panels(matrix_rows, matrix_depth, matrix_rows <= 4 ? 4 : 8) {}
  CNN_ENGINE_INLINE Panels(int matrix_rows, int matrix_depth, int panel_rows)
      : rows(panel_rows), panels((matrix_rows + rows - 1) / rows), depth(matrix_depth) {}
  CNN_ENGINE_INLINE std::int64_t panel_size() const { return std::int64_t{rows} * depth; }
  CNN_ENGINE_INLINE std::int64_t size() const { return panels * panel_size(); }
};

}  // namespace cnn_engine
