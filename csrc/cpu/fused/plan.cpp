#include "cpu/fused/plan.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "cpu/fused/block.h"
#include "cpu/fused/operations.h"
#include "cpu/fused/pack.h"

namespace cnn_engine::cpu::fused {
namespace {

// The layout that an operation wants its input in, all but the pitch.
Layout input_layout(const std::vector<Operation>& operations, std::size_t index) {
  const Operation& op = operations[index];
  if (op.kind == StepKind::activate && index + 1 < operations.size())
    return input_layout(operations, index + 1);  // works in place
  Layout layout{op.c, op.h, op.w, 0, 0, 0, op.h, op.w};
  if (op.kind != StepKind::winograd && op.kind != StepKind::direct) return layout;
  const LayerDescription& layer = *op.layer;
  layout.top = layer.pad_h;
  layout.left = layer.pad_w;
  int rows, cols;  // that are read
  if (op.kind == StepKind::winograd) {
    rows = round_up(op.conv_h, op.tile_h) + layer.kernel_h - 1;
    cols = round_up(op.conv_w, op.tile_w) + layer.kernel_w - 1;
  } else {
    rows = (op.conv_h - 1) * layer.stride_h + layer.kernel_h;
    cols = (op.conv_w - 1) * layer.stride_w + layer.kernel_w;
  }
  layout.rows = std::max(rows, layer.pad_h + op.h);
  layout.cols = std::max(cols, layer.pad_w + op.w);
  return layout;
}

// Of what is measured of an input row: vectors of outputs read what is before and after them.
int sums_pitch(const Operation& op) {
  const int step = op.pool ? 2 : 1;
  const int columns = std::max(round_up(op.conv_w, op.tile_w), 2 * op.layer->pad_w + op.w);
  return round_up((columns + step - 1) / step, 16) + 16;
}

// Gives each step its position in a workspace: first what one image needs, then the tail of a group
// of images, then scratch.
class Builder {
 public:
  Builder(const NetworkDescription& description, bool bfloat16, const FusedKernels& kernels)
      : description_(description),
        kernels_(kernels),
        bfloat16_(bfloat16),
        operations_(operations_of(description, bfloat16, kernels)),
        plan_(std::make_unique<Plan>()) {}

  std::unique_ptr<Plan> build() {
    Layout in = enter();
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      if (is_tail(operations_[i].kind) && !plan_->tail) plan_->tail = plan_->steps.size();
      in = add(i, in);
    }
    assign_parts();
    const Layout image{description_.c, description_.h, description_.w, 0, 0, 0, 0, 0};
    plan_->image_size = std::size_t(image.c) * image.h * image.w;
    plan_->outputs = operations_.back().out_c;
    plan_->output = at_;
    plan_->tail_offset = spatial_;
    plan_->tail_stride = tail_size_;
    plan_->scratch_offset = spatial_ + Plan::kGroup * tail_size_;
    plan_->workspace = plan_->scratch_offset + scratch_;
    return std::move(plan_);
  }

 private:
  // The image's own step is part of what reads it; a flatten, of its softmax or of what it follows.
  void assign_parts() {
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      if (!operations_[i].layers.empty()) plan_->parts.push_back(operations_[i].layers);
      plan_->steps[i + 1].part = static_cast<int>(plan_->parts.size()) - 1;
    }
  }

  // Whether what step `next` of the operations reads lies in the tail.
  bool read_by_tail(std::size_t next) const {
    while (next < operations_.size() && operations_[next].kind == StepKind::activate) ++next;
    return next >= operations_.size() || is_tail(operations_[next].kind);
  }

  // Sets the position of the step's output, which operation `next` reads.
  void allocate(Step& step, std::size_t size, std::size_t next) {
    step.in = at_;
    step.in_tail = in_tail_;
    in_tail_ = step.out_in_tail = read_by_tail(next);
    std::size_t& area = in_tail_ ? tail_size_ : spatial_;
    step.out = at_ = area;
    area += round_up(size, std::size_t{16}) + 32;  // vectors may be read past the end
  }

  bool planar() const {
    const Operation& first = operations_.front();
    return first.kind == StepKind::winograd && first.c < kernels_.channel_lanes &&
           first.tile_w == 4;
  }

  // The image's own step: pixels into the layout that the first operation wants.
  Layout enter() {
    const Operation& first = operations_.front();
    Layout layout = input_layout(operations_, 0);
    Step step;
    step.units = first.h;
    if (planar()) {
      const LayerDescription& layer = *first.layer;
      planar_lanes_ = pick_lanes((first.conv_w + 3) / 4, kernels_);
      const int tiles = round_up((first.conv_w + 3) / 4, planar_lanes_);
      PlanarLayout& p = planar_layout_;
      p.c = first.c, p.h = first.h, p.w = first.w;
      p.top = layer.pad_h;
      p.margin = (layer.pad_w + 3) / 4;
      const int last = (4 + layer.kernel_w - 2 + 4 * p.margin - layer.pad_w) / 4;
      p.pitch = round_up(std::max(last + tiles, p.margin + (p.w + 3) / 4), kernels_.wide);
      p.rows = layout.rows;
      p.left = layer.pad_w;
      p.sums_step = first.pool ? 2 : 1;
      p.sums_pitch = sums_pitch(first);
      step.kind = StepKind::to_planar;
      step.conv.image = p;
      allocate(step, p.size(), 0);
    } else {
      std::size_t consumer = 0;
      while (consumer + 1 < operations_.size() &&
             operations_[consumer].kind == StepKind::activate) {
        ++consumer;
      }
      const StepKind kind = operations_[consumer].kind;
      const bool vectors = kind == StepKind::winograd || kind == StepKind::max_pool;
      layout.pitch = vectors ? round_up(first.c, kernels_.channel_lanes) : first.c;
      step.kind = StepKind::to_channels_last;
      step.layout = layout;
      allocate(step, layout.size(), 0);
    }
    plan_->steps.push_back(step);
    return layout;
  }

  Layout add(std::size_t index, const Layout& in) {
    const Operation& op = operations_[index];
    Layout out = index + 1 < operations_.size()
                     ? input_layout(operations_, index + 1)
                     : Layout{op.out_c, op.out_h, op.out_w, 0, 0, 0, op.out_h, op.out_w};
    out.pitch = in.pitch;
    Step step;
    step.kind = op.kind;
    step.activation = op.activation;
    switch (op.kind) {
      case StepKind::winograd:
      case StepKind::direct:
        convolution(op, index == 0, in, out, step.conv);
        step.units = op.kind == StepKind::winograd ? step.conv.tiles_y : op.conv_h;
        break;
      case StepKind::max_pool: {
        const LayerDescription& layer = *op.layer;
        step.pool = {layer.kernel_h,
                     layer.kernel_w,
                     layer.stride_h,
                     layer.stride_w,
                     layer.pad_h,
                     layer.pad_w,
                     in,
                     out,
                     op.activation};
        step.units = op.out_h;
        break;
      }
      case StepKind::linear:
        linear(op, in, step);
        out.pitch = step.linear.out_pitch;
        break;
      case StepKind::activate:
        step.in = step.out = at_;
        step.in_tail = step.out_in_tail = in_tail_;
        step.count = round_up(in.size(), std::size_t{16});
        plan_->steps.push_back(step);
        return in;
      case StepKind::flatten:
        step.layout = in;
        out.pitch = op.out_c;
        break;
      case StepKind::softmax:
        step.count = op.c;
        out.pitch = op.out_c;
        break;
      case StepKind::to_planar:
      case StepKind::to_channels_last:
        break;
    }
    allocate(step, out.size(), index + 1);
    plan_->steps.push_back(step);
    return out;
  }

  const float* keep(std::unique_ptr<Buffer> buffer) {
    plan_->weights.push_back(std::move(buffer));
    return plan_->weights.back()->data();
  }

  void need_scratch(std::size_t floats) {
    scratch_ = std::max(scratch_, round_up(floats, std::size_t{16}) + 32);
  }

  void convolution(const Operation& op, bool first, const Layout& in, Layout& out, ConvStep& s) {
    const LayerDescription& layer = *op.layer;
    s.c = op.c, s.k = op.out_c;
    s.r = layer.kernel_h, s.s = layer.kernel_w;
    s.stride_h = layer.stride_h, s.stride_w = layer.stride_w;
    s.conv_h = op.conv_h, s.conv_w = op.conv_w;
    s.activation = op.activation;
    s.pool = op.pool;
    s.lanes = pick_lanes(s.k, kernels_);
    s.k_pitch = out.pitch = round_up(s.k, s.lanes);
    s.in = in;
    s.out = out;
    s.bias = keep(pack_bias(layer.bias, s.k, s.k_pitch));
    plan_->multiply_adds += double(op.conv_h) * op.conv_w * s.k * s.c * s.r * s.s;
    if (op.kind == StepKind::direct) {
      s.pair_pitch = round_up(in.pitch, 2);
      if (bfloat16_) {
        s.weight = keep(pack_direct_bfloat16(s, layer.weight));
        need_scratch(std::size_t(in.rows) * in.cols * s.pair_pitch / 2 + 1);
      } else {
        s.weight = keep(pack_direct(s, layer.weight));
      }
      return;
    }
    s.tile_h = op.tile_h, s.tile_w = op.tile_w;
    s.tiles_y = (op.conv_h + s.tile_h - 1) / s.tile_h;
    s.tiles_x = (op.conv_w + s.tile_w - 1) / s.tile_w;
    s.planar = first && planar();
    // Vectors of 16 and of 8.
    s.ends_in_20 = !s.planar && kernels_.wide == 2 * kernels_.narrow &&
                   s.lanes == kernels_.narrow && s.k_pitch % (3 * s.lanes) == 0 &&
                   s.k_pitch - s.k >= 4 && s.c % 4 == 0;
    s.image = planar_layout_;
    s.tile_lanes = planar_lanes_;
    s.tiles_pitch = s.planar ? round_up(s.tiles_x, planar_lanes_) : s.tiles_x;
    s.v_channels = s.planar ? s.c : in.pitch;
    constexpr int enough = 32;  // tiles that share a reading of the weights
    s.group_rows = s.planar ? 1 : std::min(s.tiles_y, std::max(1, enough / s.tiles_x));
    // A cache line more than needed, so that frequencies do not fall on the same sets of the cache.
    const std::size_t tiles = std::size_t(s.group_rows) * s.tiles_pitch;
    s.v_pitch = s.planar ? tiles * s.c : round_up(tiles * s.v_channels, std::size_t{16}) + 16;
    s.m_pitch = s.planar ? 0 : round_up(tiles * s.k_pitch, std::size_t{16}) + 16;
    const int height = s.tile_h + s.r - 1, width = s.tile_w + s.s - 1;
    const std::size_t frequencies = std::size_t(height) * width;
    const std::size_t part =
        s.planar ? std::size_t{4} * planar_layout_.pitch * height
                 : (std::size_t(s.tiles_x) * s.tile_w + s.s - 1) * height * in.pitch;
    s.v_offset = 0;
    // Rows of the input that tiles of rows share are transformed once.
    const std::size_t rows = s.along_rows() ? kRowsTogether * s.tile_h + s.r - 1 : height;
    s.m_offset = rows * width * s.v_pitch;
    s.p_offset = s.m_offset + frequencies * s.m_pitch;
    s.bound = op.bound;
    s.sums_pitch = sums_pitch(op);
    s.b_offset = round_up(s.p_offset + part, std::size_t{16});
    need_scratch(s.b_offset + s.measured());
    s.weight = keep(pack_winograd(s, layer.weight));
    s.direct = keep(pack_direct(s, layer.weight));
  }

  void linear(const Operation& op, const Layout& in, Step& step) {
    const LayerDescription& layer = *op.layer;
    LinearStep& s = step.linear;
    s.in_pitch = static_cast<int>(round_up(in.size(), std::size_t{8}));  // four sums, of pairs
    s.out_features = op.out_c;
    s.lanes = pick_lanes(s.out_features, kernels_);
    s.out_pitch = round_up(s.out_features, s.lanes);
    s.activation = op.activation;
    s.bias = keep(pack_bias(layer.bias, s.out_features, s.out_pitch));
    if (bfloat16_) {
      s.rounded_pitch = round_up(s.in_pitch, 32);
      s.weight = keep(pack_linear_bfloat16(s, in, layer.weight));
      need_scratch(std::size_t(s.rounded_pitch) / 2 * Plan::kGroup);
    } else {
      s.weight = keep(pack_linear(s, in, layer.weight));
    }
    step.units = 0;
    for (int left = s.out_pitch / s.lanes; left > 0; left -= block_size(left)) ++step.units;
    plan_->multiply_adds += double(op.c) * op.h * op.w * op.out_c;
  }

  const NetworkDescription& description_;
  const FusedKernels& kernels_;
  const bool bfloat16_;
  std::vector<Operation> operations_;
  std::unique_ptr<Plan> plan_;
  PlanarLayout planar_layout_;
  int planar_lanes_ = 0;
  std::size_t spatial_ = 0, tail_size_ = 0, scratch_ = 0;
  std::size_t at_ = 0;    // where the last step wrote
  bool in_tail_ = false;  // and in which area
};

}  // namespace

Buffer::Buffer(std::size_t floats) {
  const std::size_t bytes = round_up(floats * sizeof(float), std::size_t{64}) + 64;
  data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
  if (!data_) throw std::bad_alloc();
  std::fill_n(data_, bytes / sizeof(float), 0.0f);
}

Buffer::~Buffer() { std::free(data_); }

std::unique_ptr<Plan> make_plan(const NetworkDescription& description, bool bfloat16,
                                const FusedKernels& kernels) {
  return Builder(description, bfloat16, kernels).build();
}

}  // namespace cnn_engine::cpu::fused
