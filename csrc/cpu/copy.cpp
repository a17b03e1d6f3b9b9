// copy on the CPU: a part a thread, each by memcpy, which knows the machine's best instructions.
#include "ops/copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstring>

#include "runtime/parallel.h"

namespace cnn_engine::cpu::CNN_ENGINE_ISA {
namespace {

constexpr std::int64_t kLine = 64;  // bytes

// Whole lines, to one's beginning.
void stream_lines(const char* from, char* to, std::int64_t lines) {
#if defined(__x86_64__)
  for (const char* const end = from + lines * kLine; from < end; from += kLine, to += kLine) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#else
    for (int i = 0; i < kLine; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
#endif
  }
  _mm_sfence();
#else
  std::memcpy(to, from, static_cast<std::size_t>(lines * kLine));
#endif
}

}  // namespace

void copy(const void* input, void* output, std::int64_t nbytes, int threads) {
  parallel_for(nbytes, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(static_cast<char*>(output) + begin, static_cast<const char*>(input) + begin,
                static_cast<std::size_t>(end - begin));
  });
}

void stage(const void* input, void* output, std::int64_t nbytes, int threads) {
  const char* const from = static_cast<const char*>(input);
  char* const to = static_cast<char*>(output);
  const std::int64_t lines = reinterpret_cast<std::uintptr_t>(to) % kLine ? 0 : nbytes / kLine;
  parallel_for(lines, kLine, threads, [&](std::int64_t begin, std::int64_t end) {
    stream_lines(from + begin * kLine, to + begin * kLine, end - begin);
  });
  copy(from + lines * kLine, to + lines * kLine, nbytes - lines * kLine, threads);
}

}  // namespace cnn_engine::cpu::CNN_ENGINE_ISA
