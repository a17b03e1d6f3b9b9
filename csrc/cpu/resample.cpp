// resample on the CPU: the columns of a row when the first output row wants it, into a ring of rows
// that stays in the nearest cache; then the rows.
#include "ops/resample.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

// Zeros. Not a vector: its functions are the program's, so that those compiled here for a wide
// instruction set could be taken by what runs on a CPU without it.
template <typename T>
class Array {
 public:
  explicit Array(std::size_t size) : data_(new T[size]()) {}
  ~Array() { delete[] data_; }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* data() const { return data_; }

 private:
  T* data_;
};

constexpr int kBits = 22;
constexpr std::int32_t kHalf = 1 << (kBits - 1);

using Bytes = std::uint8_t __attribute__((vector_size(4)));
using Sums = std::int32_t __attribute__((vector_size(16)));

// Four bytes as numbers; the compiler's own conversion of so few goes one by one.
inline __attribute__((always_inline)) Sums widened(const std::uint8_t* from) {
#if defined(__AVX2__)
  std::int32_t four;
  std::memcpy(&four, from, sizeof four);
  return reinterpret_cast<Sums>(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four)));
#else
  Bytes four;
  std::memcpy(&four, from, sizeof four);
  return __builtin_convertvector(four, Sums);
#endif
}

// Each pixel with the byte behind it, which is read and written, and counts for nothing. kTaps: 0
// for any number.
template <int kTaps>
void columns_of_colour(const std::uint8_t* input, const std::int32_t* first,
                       const std::int32_t* weight, std::uint8_t* output, const ResampleShape& p) {
  const int taps = kTaps ? kTaps : p.column_taps;
  for (int i = 0; i < p.out_columns; ++i, weight += taps) {
    Sums sum = {kHalf, kHalf, kHalf, kHalf};
    const std::uint8_t* from = input + 3 * first[i];
    for (int t = 0; t < taps; ++t, from += 3) sum += widened(from) * weight[t];
    sum >>= kBits;
    sum = sum < 0 ? Sums{} : sum;
    sum = sum > 255 ? Sums{} + 255 : sum;
    const Bytes pixel = __builtin_convertvector(sum, Bytes);
    std::memcpy(output + 3 * i, &pixel, sizeof pixel);
  }
}

void columns_of_grey(const std::uint8_t* input, const std::int32_t* first,
                     const std::int32_t* weight, std::uint8_t* output, const ResampleShape& p) {
  for (int i = 0; i < p.out_columns; ++i, weight += p.column_taps) {
    std::int32_t sum = kHalf;
    for (int t = 0; t < p.column_taps; ++t) sum += input[first[i] + t] * weight[t];
    output[i] = static_cast<std::uint8_t>(std::clamp(sum >> kBits, 0, 255));
  }
}

using Columns = void (*)(const std::uint8_t*, const std::int32_t*, const std::int32_t*,
                         std::uint8_t*, const ResampleShape&);

Columns columns_of(const ResampleShape& p) {
  if (p.channels == 1) return columns_of_grey;
  constexpr Columns kOf[] = {columns_of_colour<0>, columns_of_colour<1>, columns_of_colour<2>,
                             columns_of_colour<3>, columns_of_colour<4>, columns_of_colour<5>,
                             columns_of_colour<6>, columns_of_colour<7>, columns_of_colour<8>};
  return kOf[p.column_taps <= 8 ? p.column_taps : 0];
}

}  // namespace

void resample(const std::uint8_t* input, const std::int32_t* row_first,
              const std::int32_t* row_weight, const std::int32_t* column_first,
              const std::int32_t* column_weight, std::uint8_t* output, const ResampleShape& shape) {
  const ResampleShape p = shape;
  const int width = p.out_columns * p.channels;
  const std::size_t pitch = static_cast<std::size_t>(width) + 1;
  const std::size_t stride = static_cast<std::size_t>(p.columns) * p.channels;
  const Array<std::uint8_t> ring(p.row_taps * pitch);
  const Array<std::uint8_t> last(stride + 1);  // input row, behind which there may be nothing
  const Array<std::int32_t> sums(width);
  const Columns columns = columns_of(p);
  int done = 0;  // the input's rows that are, or were, in the ring
  for (int y = 0; y < p.out_rows; ++y, row_weight += p.row_taps) {
    for (done = std::max(done, row_first[y]); done < row_first[y] + p.row_taps; ++done) {
      const std::uint8_t* row = input + done * stride;
      if (done == p.rows - 1) {
        row = static_cast<const std::uint8_t*>(std::memcpy(last.data(), row, stride));
      }
      columns(row, column_first, column_weight, ring.data() + done % p.row_taps * pitch, p);
    }
    std::int32_t* const sum = sums.data();
    std::fill_n(sum, width, kHalf);
    for (int t = 0; t < p.row_taps; ++t) {
      const std::uint8_t* row = ring.data() + (row_first[y] + t) % p.row_taps * pitch;
      const std::int32_t weight = row_weight[t];
#pragma omp simd
      for (int i = 0; i < width; ++i) sum[i] += row[i] * weight;
    }
    for (int c = 0; c < p.channels; ++c) {
      std::uint8_t* to = output + (static_cast<std::size_t>(c) * p.out_rows + y) * p.out_columns;
      for (int x = 0; x < p.out_columns; ++x) {
        to[x] = static_cast<std::uint8_t>(std::clamp(sum[x * p.channels + c] >> kBits, 0, 255));
      }
    }
  }
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
