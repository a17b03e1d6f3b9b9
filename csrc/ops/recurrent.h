// recurrent: the steps of an RNN, GRU or LSTM layer over time, as ONNX defines them, after the
// products of its input: x[t,n] has W x + b of every gate.
//
//   rnn   h' = f(x + R h)
//   gru   z = f(x_z + R_z h), r = f(x_r + R_r h), n = g(x_n + R_n (r * h)), or with `reset_after`
//         n = g(x_n + r * (R_n h + b)); h' = (1 - z) * n + z * h
//   lstm  i = f(x_i + R_i h + p_i * c), s = f(x_f + R_f h + p_f * c) or with `coupled` 1 - i,
//         c' = s * c + i * g(x_c + R_c h), o = f(x_o + R_o h + p_o * c'), h' = o * h(c')
//
// f, g and h are functions of ops/unary.h; what they are applied to, but for h, is first held
// within the clip. With `rounds_states` h is rounded to 8 bits where R multiplies it: to 256 whole
// steps of the range of a step's states of all rows and 0. Gates stand in ONNX's order: gru z r n,
// lstm i o f c; G is 1, 3 or 4.
//
// Layouts: gates [T,N,D,G*H]; R [D,G*H,H], as recurrent_pack makes it for a device; bias b [D,H];
// peepholes p [D,3*H], in the order i o f; states [D,N,H]; outputs y [T,D,N,H]; float32,
// C-contiguous. Direction 1, and 0 where it is `reversed`, begins at a sequence's end. Past a
// sequence's length y is 0 and the states stay.
#pragma once

#include "ops/unary.h"

namespace cnn_engine {

enum class RecurrentCell { rnn, gru, lstm };

// As Python names it; null for what is no cell.
inline const char* name_of(RecurrentCell cell) {
  constexpr const char* kNames[] = {"rnn", "gru", "lstm"};
  return static_cast<int>(cell) < 3 ? kNames[static_cast<int>(cell)] : nullptr;
}

struct RecurrentShape {
  RecurrentCell cell;
  int steps, batch, directions, hidden;  // T, N, D, H
  bool reversed, reset_after, coupled;
  float clip;                  // infinity: none
  UnaryFunction functions[6];  // f, g and h of each direction, and their numbers
  float alphas[6], betas[6];
  bool rounds_states = false;  // on the CPU, of an LSTM
  static constexpr int kOptionalMembers = 1;

  CNN_ENGINE_INLINE int gates() const {
    return cell == RecurrentCell::lstm ? 4 : cell == RecurrentCell::gru ? 3 : 1;
  }
  CNN_ENGINE_INLINE bool begins_at_end(int direction) const { return reversed || direction == 1; }
  CNN_ENGINE_INLINE std::int64_t gate_size() const { return std::int64_t{gates()} * hidden; }
  CNN_ENGINE_INLINE std::int64_t output_size() const {
    return std::int64_t{steps} * directions * batch * hidden;
  }
  // On the CPU: rows of the transposed R in panels of so many columns, the missing ones zero; a
  // GRU's last gate in panels of its own.
  static constexpr int kPanel = 64;
  CNN_ENGINE_INLINE std::int64_t panels_size(int gates) const {
    return (std::int64_t{gates} * hidden + kPanel - 1) / kPanel * kPanel * hidden;
  }
  CNN_ENGINE_INLINE int first_gates() const { return cell == RecurrentCell::gru ? 2 : gates(); }
  CNN_ENGINE_INLINE std::int64_t packed_size() const {
    const int last = gates() - first_gates();
    return directions * (panels_size(first_gates()) + (last ? panels_size(last) : 0));
  }
  CNN_ENGINE_INLINE std::int64_t flops() const { return 2 * output_size() * gates() * hidden; }

  void validate() const {
    require_at_least("steps", steps, 0);
    require_at_least("batch", batch, 0);
    require_at_least("directions", directions, 1);
    require_at_least("hidden", hidden, 1);
    if (directions > 2 || (directions == 2 && reversed)) {
      throw std::invalid_argument(
          "directions: expected 1, or 2 of which the first is not reversed");
    }
    require_indexable("weights", gates(), hidden, hidden);
    require_indexable("gates", directions, batch, gate_size());
  }
};

namespace cpu {
void recurrent_pack(const float* weights,  // [D, G*H, H]
                    float* packed,         // [packed_size]
                    const RecurrentShape& shape, int threads);
std::int64_t recurrent_workspace(const RecurrentShape& shape, int threads);  // bytes
void recurrent(const float* gates,                                           // [T, N, D, G*H]
               const float* packed,                                          // [packed_size]
               const float* bias,            // [D, H], a GRU's with reset_after; or null
               const std::int32_t* lengths,  // [N], from 0 to T; null: T
               const float* hidden,          // [D, N, H]; null: 0
               const float* cell,            // [D, N, H], an LSTM's; null: 0
               const float* peepholes,       // [D, 3*H], an LSTM's; null: 0
               float* output,                // [T, D, N, H]
               float* last_hidden,           // [D, N, H]
               float* last_cell,             // [D, N, H], an LSTM's
               float* workspace, const RecurrentShape& shape, int threads);
}  // namespace cpu
namespace cuda {
void recurrent_pack(const float* weights,  // [D, G*H, H]
                    float* packed,         // [packed_size], of which it takes as many as there are
                    const RecurrentShape& shape, Stream stream);
std::int64_t recurrent_workspace(const RecurrentShape& shape, Stream stream);
void recurrent(const float* gates,           // [T, N, D, G*H]
               const float* packed,          // [packed_size]
               const float* bias,            // [D, H], a GRU's with reset_after; or null
               const std::int32_t* lengths,  // [N]; null: T
               const float* hidden,          // [D, N, H]; null: 0
               const float* cell,            // [D, N, H], an LSTM's; null: 0
               const float* peepholes,       // [D, 3*H], an LSTM's; null: 0
               float* output,                // [T, D, N, H]
               float* last_hidden,           // [D, N, H]
               float* last_cell,             // [D, N, H], an LSTM's
               float* workspace, const RecurrentShape& shape, Stream stream);
}  // namespace cuda
}  // namespace cnn_engine
