// expand_depthwise on the CPU: a block of channels at a time, some rows of what the depthwise
// convolution reads are made in the second-level cache, and are read at once.
//
// Work is shared out in chunks of an image's output rows, one per thread, and in blocks of
// channels: a thread finds the rows that it wrote before, and makes again what the chunk before its
// own reads too. Where that would be much, one convolution follows the other.
#include "ops/expand_depthwise.h"

#include "cpu/conv2d_nhwc_depthwise.h"
#include "cpu/conv2d_nhwc_direct.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// What the rows that an output row reads take of a block's channels: they stay in the first-level
// cache. And groups of filters of a block at least: a tile of products takes so many.
constexpr int kRowFloats = 8 << 10;
constexpr int kLeastGroups = 4;
// Of a block's rows that are there at a time.
constexpr std::int64_t kExpandedFloats = 96 << 10;
// Output rows of a chunk at least.
constexpr int kLeastChunkRows = 4;
// Of the expanded rows one in so many may be made again.
constexpr int kMadeAgain = 8;

struct ExpandSplit {
  int groups, blocks, chunks;
  int reach;     // rows that an output row reads
  int together;  // output rows whose rows are there at a time
  int held;      // those rows, at most
  bool apart;    // one convolution after the other: chunks would make too many rows again

  ExpandSplit(const Conv2dShape& p, int threads) : groups(filter_groups(p.k)) {
    reach = p.dilation_h * (p.r - 1) + 1;
    const int parts = (threads + p.n - 1) / p.n, most = p.out_h() / kLeastChunkRows;
    chunks = by_channels(p) || most < 1 ? 1 : parts < most ? parts : most;
    const std::int64_t wanted = kRowFloats / (std::int64_t{reach} * p.w * kFilterGroup);
    const std::int64_t size =
        wanted > kLeastGroups ? wanted / kLeastGroups * kLeastGroups : kLeastGroups;
    blocks = static_cast<int>((groups + size / 2) / size);
    // Two for each thread where there are no more chunks.
    const int least = chunks * p.n < threads ? 2 * threads : 1;
    if (blocks < least) blocks = least < groups / kLeastGroups ? least : groups / kLeastGroups;
    if (blocks < 1) blocks = 1;
    const std::int64_t rows = kExpandedFloats / (std::int64_t{p.w} * pitch());
    together = rows > reach ? static_cast<int>((rows - reach) / p.stride_h) + 1 : 1;
    if (together > p.out_h()) together = p.out_h();
    held = (together - 1) * p.stride_h + reach;
    if (held > p.h) held = p.h;
    apart = chunks > 1 && std::int64_t{reach - p.stride_h} * chunks * kMadeAgain > p.h;
  }
  // The first channel of a block, or of the one past the last.
  int channel(int block, int channels) const {
    const int first = static_cast<int>(std::int64_t{groups} * block / blocks) * kFilterGroup;
    return first < channels ? first : channels;
  }
  int pitch() const { return (groups + blocks - 1) / blocks * kFilterGroup; }
  // Of a thread.
  std::int64_t floats(const Conv2dShape& p) const {
    return depthwise_scratch(p) + (apart ? 0 : std::int64_t{held} * p.w * pitch());
  }
  // Of all expanded rows, where they are there at once.
  std::int64_t whole(const Conv2dShape& p) const { return apart ? p.input_size() : 0; }
  // Of the sums of rows, for means.
  static std::int64_t sums(const Conv2dShape& p) { return std::int64_t{p.n} * p.out_h() * p.k; }
};

struct Expand {
  const float* input;
  const float* first;
  const float* second;
  const float* first_bias;
  const float* second_bias;
  float* output;
  double* sums;  // [N, OH, K], or null
  int channels;
  Conv2dPitches pitches;
  Activation inner, outer;
};

// Rows [top, bottom) of the channels [from, to) of an image, from `y` on.
void expand_rows(const Expand& call, const Conv2dShape& p, int n, int top, int bottom, int from,
                 int to, float* y) {
  const std::int64_t zero = 0, positions = std::int64_t{bottom - top} * p.w;
  const float* x = call.input + (std::int64_t{n} * p.h + top) * p.w * call.pitches.x;
  const int filters = to - from;
  Gemm gemm{&zero, 1, ChannelParts(call.channels, 1), call.pitches.x, nullptr, filters, filters, 0};
  gemm.weights = call.first + from / kFilterGroup * gemm.group_size();
  const Epilogue epilogue = call.inner.epilogue(call.first_bias ? call.first_bias + from : nullptr);
  const std::int64_t runs = (positions + Float32::kRunRows - 1) / Float32::kRunRows;
  for (std::int64_t run = 0; run < runs; ++run) {
    const std::int64_t first = positions * run / runs;
    const int count = static_cast<int>(positions * (run + 1) / runs - first);
    float* to_position = y + first * filters;
    multiply_runs(gemm, 0, filters, epilogue, nullptr, [&](const auto& body) {
      body(x + first * call.pitches.x, to_position, nullptr, count);
    });
    call.inner.apply(to_position, filters, count, filters);
  }
}

// Output rows [begin, end) of the channels [from, to) of an image; `expanded` is where the rows
// that they read are made.
void expand_and_convolve(const Expand& call, const Conv2dShape& p, const ExpandSplit& split,
                         DepthwiseRow d, const float** table, float* expanded, int n, int begin,
                         int end, int from, int to) {
  const auto run_row = depthwise_row_of(p);
  const int out_h = p.out_h(), out_w = p.out_w();
  d.channels = to - from;
  d.position = d.channels;
  d.row = std::int64_t{p.w} * d.position * p.dilation_h;
  d.bias = call.second_bias ? call.second_bias + from : nullptr;
  const std::int64_t row = std::int64_t{p.w} * d.position;
  int base = 0, made = 0;  // rows [base, made) are there
  for (int i = begin; i < end;) {
    const int next = i + split.together < end ? i + split.together : end;
    int top = i * p.stride_h - p.pad_top,
        bottom = (next - 1) * p.stride_h - p.pad_top + split.reach;
    if (top < 0) top = 0;
    if (bottom > p.h) bottom = p.h;
    if (made > top) {
      __builtin_memmove(expanded, expanded + (top - base) * row,
                        sizeof(float) * (made - top) * row);
    } else {
      made = top;
    }
    base = top;
    if (bottom > made) {
      expand_rows(call, p, n, made, bottom, from, to, expanded + (made - base) * row);
      made = bottom;
    }
    for (; i < next; ++i) {
      depthwise_at(d, p, i, expanded, base, call.second + from);
      const std::int64_t at = std::int64_t{n} * out_h + i;
      d.output = call.output + at * out_w * call.pitches.y + from;
      run_row(d, out_w, table);
      call.outer.apply(d.output, call.pitches.y, out_w, d.channels);
      if (call.sums) {
        sum_row(d.output, call.pitches.y, out_w, d.channels, call.sums + at * p.k + from);
      }
    }
  }
}

// All chunks and blocks.
void share_blocks(const Expand& call, const Scratch& scratch, const Conv2dShape& p,
                  const ExpandSplit& split, int threads) {
  const int out_h = p.out_h(), blocks = split.blocks;
  const std::int64_t tasks = std::int64_t{p.n} * split.chunks * blocks;
  const std::int64_t macs = std::int64_t{p.n} * p.h * p.w * p.k * call.channels;
  parallel_for(tasks, macs / tasks, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    const float** table = depthwise_table(part.data(), p);
    const DepthwiseRow d = depthwise_rows(part.data(), p, call.pitches, call.outer);
    float* expanded = part.data() + depthwise_scratch(p);
    for (std::int64_t index = begin; index < end; ++index) {
      const int block = static_cast<int>(index % blocks);
      const int chunk = static_cast<int>(index / blocks % split.chunks);
      const int n = static_cast<int>(index / blocks / split.chunks);
      const auto row = [&](int i) {
        return static_cast<int>(std::int64_t{out_h} * i / split.chunks);
      };
      expand_and_convolve(call, p, split, d, table, expanded, n, row(chunk), row(chunk + 1),
                          split.channel(block, p.k), split.channel(block + 1, p.k));
    }
  });
}

// Of the sums of rows, in the rows' order.
void write_means(const double* sums, float* mean, int mean_pitch, const Conv2dShape& p) {
  const int out_h = p.out_h();
  const double positions = static_cast<double>(out_h) * p.out_w();
  for (int n = 0; n < p.n; ++n) {
    const double* row = sums + std::int64_t{n} * out_h * p.k;
    for (int k = 0; k < p.k; ++k) {
      double sum = 0;
      for (int i = 0; i < out_h; ++i) sum += row[std::int64_t{i} * p.k + k];
      mean[std::int64_t{n} * mean_pitch + k] = static_cast<float>(sum / positions);
    }
  }
}

}  // namespace

std::int64_t expand_depthwise_workspace(const Conv2dShape& shape, int threads) {
  const Conv2dShape p = shape;
  if (p.n == 0) return 0;
  const ExpandSplit split(p, threads);
  return 8 * split.sums(p) + 4 * split.whole(p) + Scratch::bytes(threads, split.floats(p));
}

void expand_depthwise(const float* input, const float* first, const float* second,
                      const float* first_bias, const float* second_bias, float* output, float* mean,
                      void* workspace, const Conv2dShape& shape, int channels,
                      const Conv2dPitches& pitches, int mean_pitch, UnaryFunction inner,
                      float inner_alpha, float inner_beta, UnaryFunction outer, float outer_alpha,
                      float outer_beta, int threads) {
  if (shape.n == 0) return;
  const Conv2dShape p = shape;
  const ExpandSplit split(p, threads);
  double* sums = static_cast<double*>(workspace);
  float* whole = reinterpret_cast<float*>(sums + split.sums(p));
  const Scratch scratch(whole + split.whole(p), threads, split.floats(p));
  const Expand call{input,
                    first,
                    second,
                    first_bias,
                    second_bias,
                    output,
                    mean ? sums : nullptr,
                    channels,
                    pitches,
                    {inner, inner_alpha, inner_beta},
                    {outer, outer_alpha, outer_beta}};
  if (split.apart) {
    const Conv2dShape expand{p.n, channels, p.h, p.w, p.k, 1, 1, 1, 1, 0, 0};
    const Prologue none{nullptr, nullptr, false, Prologue::kNone};
    pointwise(Direct{input,
                     first,
                     nullptr,
                     none,
                     whole,
                     {pitches.x, p.k},
                     call.inner.epilogue(first_bias),
                     call.inner},
              scratch, expand, threads);
    depthwise(whole, second, second_bias, nullptr, output, scratch, p, {p.k, pitches.y}, call.outer,
              threads, call.sums);
  } else {
    share_blocks(call, scratch, p, split, threads);
  }
  if (mean) write_means(sums, mean, mean_pitch, p);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
