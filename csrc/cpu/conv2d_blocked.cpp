// conv2d_blocked on the CPU. y[k, p] = sum over t of w[k, t] * x[t, p] for the outputs p of an
// image and the kernel offsets t of a filter: a tile of columns of x is written out where it stays
// in the first-level cache (x itself never is), then all filters pass over it.
#include "ops/conv2d_blocked.h"

#include "cpu/blocked.h"
#include "cpu/conv2d_depthwise.h"
#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// With fewer outputs a map than half a vector, filters are on the lanes instead.
constexpr int kFewOutputs = kWide / 2;
constexpr int kFewAtOnce = 4 * kColumnsTogether;  // columns

bool few_outputs(const Conv2dShape& p) { return p.out_h() * p.out_w() <= kFewOutputs; }

constexpr std::int64_t kTileFloats = std::int64_t{kTileDepth} * kTileColumns + 2 * kWide;

// Tiles that share a pass over the filters: where those are too large for the second-level cache,
// reading them costs more than that tiles do not stay in the first.
int tiles_together(const Conv2dShape& p) {
  constexpr std::int64_t kSecondLevel = 1 << 18;  // floats
  const int tiles = ColumnTiles(p.out_h() * p.out_w()).count;
  if (p.panels().size() <= kSecondLevel) return 1;
  return tiles < 4 ? tiles : 4;
}

std::int64_t scratch_floats(const Conv2dShape& p) {
  if (p.depthwise()) return depthwise_scratch(p);
  if (few_outputs(p)) return std::int64_t{kFewAtOnce} * p.filter_size();
  // Tiles, room for a vector that runs over an end, and which outputs of a row a kernel offset
  // column has.
  return tiles_together(p) * kTileFloats + 2 * p.s;
}

// Outputs side by side in one row of the output map.
struct Run {
  int first, count;  // in the tile
  int y, x;          // of the input, for the first kernel offset
};

// Writes kernel offsets [begin, end) of the columns from output `first` on, a row per kernel
// offset.
class Columns {
 public:
  Columns(const Conv2dShape& p, const float* group, const float* input_end, int first, int count,
          int* inside)
      : p_(p), group_(group), end_(input_end), inside_(inside) {
    const int out_w = p.out_w();
    width_ = (count + kWide - 1) / kWide * kWide;
    for (int at = 0; at < count;) {
      const int i = (first + at) / out_w, j = (first + at) % out_w;
      const int length = out_w - j < count - at ? out_w - j : count - at;
      runs_[size_++] = {at, length, i * p.stride_h - p.pad_top, j};
      at += length;
    }
    // Outputs [begin, end) of a row read inside the image for kernel offset column s.
    for (int s = 0; s < p.s; ++s) {
      const int start = s * p.dilation_w - p.pad_left;
      const int before = start >= 0 ? 0 : (-start + p.stride_w - 1) / p.stride_w;
      const int after = start >= p.w ? 0 : (p.w - start + p.stride_w - 1) / p.stride_w;
      inside_[2 * s] = before;
      inside_[2 * s + 1] = after < before ? before : after;
    }
    contiguous_ = p.r == 1 && p.s == 1 && p.stride_h == 1 && p.stride_w == 1 && p.pad_top == 0 &&
                  p.pad_left == 0 && p.pad_bottom == 0 && p.pad_right == 0;
    if (contiguous_) {
      size_ = 1;
      runs_[0] = {0, count, 0, first};
    }
    count_ = count;
  }

  void write(int begin, int end, float* to) const {
    const int area = p_.r * p_.s;
    int c = begin / area, r = begin % area / p_.s, s = begin % p_.s;
    for (int t = begin; t < end; ++t, to += width_) {
      write_kernel_offset(c, r, s, to);
      if (++s == p_.s) {
        s = 0;
        if (++r == p_.r) r = 0, ++c;
      }
    }
  }

 private:
  void write_kernel_offset(int c, int r, int s, float* to) const {
    const float* plane = group_ + std::int64_t{c} * p_.h * p_.w;
    if (contiguous_) return copy_run(to, plane + runs_[0].x, count_, 1, end_);
    const int column = s * p_.dilation_w - p_.pad_left;
    for (int i = 0; i < size_; ++i) {
      const Run& run = runs_[i];
      const int y = run.y + r * p_.dilation_h;
      const int j_end = run.x + run.count;
      int begin = inside_[2 * s], end = inside_[2 * s + 1];
      begin = begin < run.x ? run.x : begin > j_end ? j_end : begin;
      end = end > j_end ? j_end : end;
      if (y < 0 || y >= p_.h || end <= begin) {
        fill_zero(to + run.first, run.count);
        continue;
      }
      float* first = to + run.first - run.x;
      fill_zero(to + run.first, begin - run.x);
      copy_run(first + begin, plane + std::int64_t{y} * p_.w + column + begin * p_.stride_w,
               end - begin, p_.stride_w, end_);
      fill_zero(first + end, j_end - end);
    }
  }

  const Conv2dShape& p_;
  const float* group_;  // [C / groups, H, W]
  const float* end_;    // of the input
  int* inside_;
  Run runs_[kTileColumns];
  int size_ = 0, width_, count_;
  bool contiguous_;
};

void blocked(const float* input, const float* packed, const Epilogue& epilogue, float* output,
             const Scratch& scratch, const Conv2dShape& p, int threads) {
  const int area = p.out_h() * p.out_w(), filters = p.group_filters();
  const Panels panels = p.panels();
  const ColumnTiles tiles(area);
  const DepthParts parts(panels.depth);
  const float* input_end = input + p.input_size();
  const int together = tiles_together(p), bundles = (tiles.count + together - 1) / together;
  // Where there are few tiles, threads share their filters out; each then writes out their columns.
  const std::int64_t whole = std::int64_t{p.n} * p.groups * bundles;
  std::int64_t shares = (4 * threads + whole - 1) / whole;
  if (shares > panels.panels / 8) shares = panels.panels / 8;
  if (threads == 1 || shares < 1) shares = 1;
  const std::int64_t cost = std::int64_t{kTileColumns} * together * filters * panels.depth / shares;
  parallel_for(whole * shares, cost, threads, [&](std::int64_t begin, std::int64_t end) {
    const Scratch::Part part(scratch);
    float* columns = part.data();
    int* inside = reinterpret_cast<int*>(columns + together * kTileFloats);
    for (std::int64_t index = begin; index < end; ++index) {
      const int share = static_cast<int>(index % shares);
      const int first_tile = static_cast<int>(index / shares % bundles) * together;
      const int tile_end =
          first_tile + together < tiles.count ? first_tile + together : tiles.count;
      const std::int64_t group = index / shares / bundles;  // of all images
      const int g = static_cast<int>(group % p.groups);
      const int first_panel = static_cast<int>(panels.panels * share / shares);
      const int end_panel = static_cast<int>(panels.panels * (share + 1) / shares);
      for (int depth = 0; depth < parts.count; ++depth) {
        const int from = parts.first(depth), to = parts.first(depth + 1);
        for (int tile = first_tile; tile < tile_end; ++tile) {
          const int first = tiles.first(tile), count = tiles.first(tile + 1) - first;
          const Columns x(p, input + group * p.group_channels() * p.h * p.w, input_end, first,
                          count, inside);
          x.write(from, to, columns + (tile - first_tile) * kTileFloats);
        }
        for (int panel = first_panel; panel < end_panel; ++panel) {
          const int row = panel * panels.rows;
          const int rows = filters - row < panels.rows ? filters - row : panels.rows;
          const float* a =
              packed + g * panels.size() + panel * panels.panel_size() + from * panels.rows;
          for (int tile = first_tile; tile < tile_end; ++tile) {
            const int first = tiles.first(tile), count = tiles.first(tile + 1) - first;
            const std::int64_t at = (group * filters + row) * area + first;
            Epilogue last = epilogue;
            if (last.bias) last.bias += g * filters + row;
            if (last.residual) last.residual += at;
            multiply_panel(a, panels.rows, columns + (tile - first_tile) * kTileFloats, to - from,
                           output + at, area, depth == 0,
                           depth + 1 == parts.count ? &last : nullptr, rows, count);
          }
        }
      }
    }
  });
}

// Outputs [first, first + count) of all images' maps of one group, a column each.
void write_columns(const Conv2dShape& p, const float* input, int g, std::int64_t first, int count,
                   float* to) {
  const int out_w = p.out_w(), area = p.out_h() * out_w, channels = p.group_channels();
  for (int t = 0; t < count; ++t) {
    const std::int64_t n = (first + t) / area;
    const int output = static_cast<int>((first + t) % area);
    const int top = output / out_w * p.stride_h - p.pad_top;
    const int left = output % out_w * p.stride_w - p.pad_left;
    const float* image = input + (n * p.c + std::int64_t{g} * channels) * p.h * p.w;
    for (int c = 0; c < channels; ++c, image += p.h * p.w) {
      for (int r = 0; r < p.r; ++r) {
        const int y = top + r * p.dilation_h;
        for (int s = 0; s < p.s; ++s) {
          const int x = left + s * p.dilation_w;
          const bool is_inside = y >= 0 && y < p.h && x >= 0 && x < p.w;
          *to++ = is_inside ? image[y * p.w + x] : 0.0f;
        }
      }
    }
  }
}

template <int R>
void few(const float* input, const float* packed, const Epilogue& epilogue, float* output,
         const Scratch& scratch, const Conv2dShape& p, int threads) {
  const Panels panels = p.panels();
  const int area = p.out_h() * p.out_w(), filters = p.group_filters();
  const std::int64_t columns = std::int64_t{p.n} * area;
  const std::int64_t blocks = (columns + kFewAtOnce - 1) / kFewAtOnce;
  const int shares = (panels.panels + kPanelsTogether - 1) / kPanelsTogether;
  const std::int64_t cost = std::int64_t{kFewAtOnce} * kPanelsTogether * R * panels.depth;
  parallel_for(
      p.groups * blocks * shares, cost, threads, [&](std::int64_t begin, std::int64_t end) {
        const Scratch::Part part(scratch);
        std::int64_t written = -1;
        for (std::int64_t index = begin; index < end; ++index) {
          const std::int64_t block = index / shares;
          const int g = static_cast<int>(block / blocks);
          const std::int64_t first = block % blocks * kFewAtOnce;
          const std::int64_t left = columns - first;
          const int count = static_cast<int>(left < kFewAtOnce ? left : kFewAtOnce);
          if (block != written) {
            write_columns(p, input, g, first, count, part.data());
            written = block;
          }
          const int panel = static_cast<int>(index % shares) * kPanelsTogether;
          const int here =
              panels.panels - panel < kPanelsTogether ? panels.panels - panel : kPanelsTogether;
          multiply_all_columns<R>(
              packed + g * panels.size() + panel * panels.panel_size(), panels, here, part.data(),
              panels.depth, count, [&](int t, int row, const float* accumulators, int rows) {
                const std::int64_t n = (first + t) / area, position = (first + t) % area;
                row += panel * R;
                for (int i = 0; i < rows && row + i < filters; ++i) {
                  const int k = g * filters + row + i;
                  const std::int64_t at = (n * p.k + k) * area + position;
                  float value = accumulators[i];
                  if (epilogue.bias) value += epilogue.bias[k];
                  if (epilogue.residual) value += epilogue.residual[at];
                  output[at] = clamp_one(value, epilogue.lowest, epilogue.highest);
                }
              });
        }
      });
}

}  // namespace

void conv2d_pack(const float* weight, float* packed, const Conv2dShape& shape, int threads) {
  if (shape.depthwise()) {
    for (std::int64_t i = 0; i < shape.weight_size(); ++i) packed[i] = weight[i];
    return;
  }
  const Panels panels = shape.panels();
  const int filters = shape.group_filters();
  parallel_for(std::int64_t{shape.groups} * panels.panels, panels.panel_size(), threads,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t index = begin; index < end; ++index) {
                   const int first = static_cast<int>(index % panels.panels) * panels.rows;
                   const std::int64_t k = index / panels.panels * filters + first;
                   pack_panel(weight + k * panels.depth, panels.depth, 1, filters - first, panels,
                              packed + index * panels.panel_size());
                 }
               });
}

std::int64_t conv2d_blocked_workspace(const Conv2dShape& shape, int threads) {
  return Scratch::bytes(threads, scratch_floats(shape));
}

void conv2d_blocked(const float* input, const float* packed, const float* bias,
                    const float* residual, float* output, void* workspace, const Conv2dShape& shape,
                    float lowest, float highest, int threads) {
  if (shape.n == 0) return;
  const Epilogue epilogue{bias, residual, lowest, highest};
  const Scratch scratch(workspace, threads, scratch_floats(shape));
  if (shape.depthwise()) {
    depthwise(input, packed, epilogue, output, scratch, shape, threads);
  } else if (!few_outputs(shape)) {
    blocked(input, packed, epilogue, output, scratch, shape, threads);
  } else if (shape.panels().rows == 8) {
    few<8>(input, packed, epilogue, output, scratch, shape, threads);
  } else {
    few<4>(input, packed, epilogue, output, scratch, shape, threads);
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
