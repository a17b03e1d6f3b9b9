// The reader of files into a GPU's memory, without a GPU: for ThreadSanitizer.
// scripts/native_test.sh builds it, with cuda_stand_in in place of CUDA's headers.
#include "runtime/file_reader.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <random>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/check.h"

using cnn_engine::cuda::Error;
using cnn_engine::cuda::FileReader;

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  std::printf("%s: %s\n", holds ? "ok    " : "FAILED", what);
  failures += !holds;
}

// Reads all of a file by five callers at once; returns whether each had what it asked for.
bool read_by_parts(FileReader& reader, int file, std::vector<char>& to) {
  std::atomic<bool> whole{true};
  std::vector<std::thread> callers;
  const std::size_t part = to.size() / 5 + 1;
  for (std::size_t first = 0; first < to.size(); first += part) {
    callers.emplace_back([&, first] {
      const std::size_t size = std::min(part, to.size() - first);
      if (reader.read(file, static_cast<off_t>(first), size, &to[first]) != size) whole = false;
    });
  }
  for (std::thread& caller : callers) caller.join();
  return whole;
}

template <typename Exception>
bool throws(FileReader& reader, int file, std::vector<char>& to) {
  try {
    reader.read(file, 0, to.size(), to.data());
  } catch (const Exception&) {
    return true;
  }
  return false;
}

bool cannot_be_made() {
  try {
    FileReader(0, 3, 1 << 16);
  } catch (const Error&) {
    return true;
  }
  return false;
}

}  // namespace

int main() {
  std::vector<char> data(1000001);
  std::minstd_rand random(0);
  for (char& byte : data) byte = static_cast<char>(random());
  std::FILE* storage = std::tmpfile();
  std::fwrite(data.data(), 1, data.size(), storage);
  std::fflush(storage);
  const int file = fileno(storage);
  const auto size = static_cast<off_t>(data.size());

  for (const int threads : {1, 3, 8}) {
    for (const std::size_t piece :
         {std::size_t{4000}, std::size_t{1} << 16, std::size_t{1} << 20}) {
      std::printf("%d threads, pieces of %zu bytes\n", threads, piece);
      FileReader reader(0, threads, piece);
      std::vector<char> to(data.size());
      expect(read_by_parts(reader, file, to) && to == data, "five callers have each byte once");
      expect(reader.read(file, 0, 0, to.data()) == 0, "nothing is read of nothing");
      expect(reader.read(file, size, 10, to.data()) == 0, "nothing is read past the end");
      expect(reader.read(file, size - 10, 500000, to.data()) == 10, "the end is told");
      expect(reader.read(file, 0, 500000, nullptr) == 500000, "pieces alone are filled");
      expect(throws<std::system_error>(reader, -1, to), "a file that cannot be read is told");
      calls_until_failure = 0;
      expect(throws<Error>(reader, file, to), "a copy that fails is told");
      calls_until_failure = -1;
      to.assign(data.size(), 0);
      expect(read_by_parts(reader, file, to) && to == data, "and what comes after is read");
    }
  }
  for (int calls = 0; calls < 8; ++calls) {  // memory, a stream, two events a thread
    calls_until_failure = calls;
    expect(cannot_be_made(), "a reader that cannot be made leaves nothing");
  }
  calls_until_failure = -1;
  std::fclose(storage);
  return failures != 0;
}
