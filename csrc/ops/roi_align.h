// roi_align: regions of images pooled into bins: y[r,c,i,j] is the mean of samples of x[image[r],c]
// in bin (i, j) of region r, each between four pixels; or with `max` the largest of the four
// weighted pixels of all samples. A region is (left, top, right, bottom), times `scale`, less 1/2
// with `half_pixel`, else of one pixel at least. A bin has `samples` by `samples` samples; with 0
// as many along each side as it has pixels, rounded up. Samples more than a pixel outside are 0.
//
// Layouts: x [N,C,H,W], rois [R,4], images [R], from 0 to N - 1; y [R,C,out_h,out_w]; float32 and
// int64, C-contiguous. Regions are finite.
#pragma once

#include "runtime/shape.h"

namespace cnn_engine {

struct RoiAlignShape {
  int images, channels, height, width;
  int rois, rows, columns;  // R, and a region's bins
  int samples;
  double scale;
  bool max, half_pixel;

  void validate() const {
    require_at_least("images", images, 0);
    require_at_least("channels", channels, 0);
    require_at_least("height", height, 1);
    require_at_least("width", width, 1);
    require_at_least("regions", rois, 0);
    require_at_least("rows", rows, 1);
    require_at_least("columns", columns, 1);
    require_at_least("samples", samples, 0);
    require_indexable("x", channels, height, width);
    require_indexable("y", channels, rows, columns);
  }
};

namespace cpu {
void roi_align(const float* input,          // [N, C, H, W]
               const float* rois,           // [R, 4]
               const std::int64_t* images,  // [R]
               float* output,               // [R, C, rows, columns]
               const RoiAlignShape& shape, int threads);
}
}  // namespace cnn_engine
