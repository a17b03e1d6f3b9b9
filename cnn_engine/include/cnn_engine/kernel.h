// What a kernel of your own is called with: one struct per operator, passed by value, the same for
// CUDA and C++. All tensors are float32, row-major ("NCHW": the last dimension runs fastest), and
// none overlaps another. The members are also the names that the lines `launch:`, `call:`,
// `workspace:` and `requires:` of a kernel file may use.
#pragma once

#define CNN_ENGINE_KERNEL_H 1

// conv2d: y[n,f,i,j] = bias[f] + sum over q,u,v of weight[f,q,u,v] *
//     x[n, g*(c/groups) + q,
//       i*stride_h + u*dilation_h - pad_top, j*stride_w + v*dilation_w - pad_left]
// with g = f / (k/groups); x is 0 outside the image. One group: channel q is all there is to it.
// x [n,c,h,w], weight [k, c/groups, r, s], bias [k] or null, y [n,k,out_h,out_w].
struct Conv2d {
  int n, c, h, w;
  int k, r, s;
  int out_h, out_w;
  int stride_h, stride_w;
  int pad_top, pad_left, pad_bottom, pad_right;
  int dilation_h, dilation_w;
  int groups;
};

// conv_transpose2d: every input adds a filter to the output, and bias[f] is added once:
//     y[n, f, i*stride_h + u*dilation_h - pad_top, j*stride_w + v*dilation_w - pad_left] +=
//     x[n,q,i,j] * weight[q,f,u,v], f counted within the group of channel q.
// x [n,c,h,w], weight [c, k/groups, r, s], bias [k] or null, y [n,k,out_h,out_w].
struct ConvTranspose2d {
  int n, c, h, w;
  int k, r, s;
  int out_h, out_w;
  int stride_h, stride_w;
  int pad_top, pad_left, pad_bottom, pad_right;
  int dilation_h, dilation_w;
  int groups;
};

// pad2d: y[n,c,i,j] = x[n, c, i - pad_top, j - pad_left] inside the image, else 0.
// x [n,c,h,w], y [n,c,out_h,out_w].
struct Pad2d {
  int n, c, h, w;
  int out_h, out_w;
  int pad_top, pad_left, pad_bottom, pad_right;
};

// max_pool2d, average_pool2d: y[n,c,i,j] = the maximum, or the mean, over the window r, s of
//   x[n, c, i*stride_h + r*dilation_h - pad_top, j*stride_w + s*dilation_w - pad_left].
// Positions outside the image do not take part in a maximum (NaN wins); in a mean they are 0, and
// count_padding says whether the divisor counts them. x [n,c,h,w], y [n,c,out_h,out_w].
struct Pool2d {
  int n, c, h, w;
  int r, s;
  int out_h, out_w;
  int stride_h, stride_w;
  int pad_top, pad_left, pad_bottom, pad_right;
  int dilation_h, dilation_w;
  int count_padding;
};

// linear: y[i,j] = bias[j] + sum over q of x[i,q] * weight[j,q].
// x [n,f], weight [m,f], bias [m] or null, y [n,m].
struct Linear {
  int n, f, m;
};

// matmul: y[p,i,j] = sum over q of a[p,i,q] * b[p,q,j].
// a [batch,n,f], b [batch,f,m], y [batch,n,m].
struct Matmul {
  int batch, n, f, m;
};

// softmax, log_softmax: of every row. x [n,m], y [n,m]; a row with NaN or +inf comes out NaN.
struct Rows {
  int n, m;
};

// lrn: y[n,c,i] = x[n,c,i] / (k + alpha / size * sum of squares of size channels around c)^beta,
// from channel c - (size - 1) / 2 to c + size / 2. x [n,c,area], y [n,c,area].
struct Lrn {
  int n, c, area, size;
  float alpha, beta, k;
};

// Functions of one number, y[i] = f(x[i]), and of two, y[i] = f(a[i], b[i]): count elements.
// alpha and beta are the function's numbers, 0 where it has none.
struct Elements {
  int count;
  float alpha, beta;
};
