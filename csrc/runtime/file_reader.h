// Reads files into a device's memory past the interpreter: threads of its own copy from the
// system's cache into page-locked pieces, from where the device takes them.
//
// The pieces are so small that they stay in the processor's caches: the images cross the machine's
// memory once, where a chunk that is read as a whole and then copied crosses it three times (read,
// written, and read by the device).
#pragma once

#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace cnn_engine::cuda {

class FileReader {
 public:
  // Makes `threads` threads for a device, each with two pieces of `piece` bytes, page-locked.
  FileReader(int device, int threads, std::size_t piece);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // Reads `nbytes` from byte `offset` of an open file on to device memory at `to`, where all of it
  // lies on return; null: into the pieces and no further. Any number of threads may call it: they
  // are served one after the other, each by all threads, without a gap.
  //
  // Returns the bytes that there were: fewer than asked for where the file ends. Throws
  // std::system_error where it cannot be read, and Error where the device fails.
  std::size_t read(int descriptor, off_t offset, std::size_t nbytes, void* to);

 private:
  struct Read;
  struct Piece;

  void release();
  void serve(Piece* pieces);  // what a thread does
  void fill(Read& read, std::size_t begin, std::size_t size, Piece& piece);
  void settle(Piece& piece);  // waits until the device has taken what is in a piece
  void end(Read& read);

  int device_;
  std::size_t piece_;
  char* memory_ = nullptr;
  // One for all threads: from one stream to another the copying engine loses 14 us, most of the
  // time that a megabyte takes.
  cudaStream_t stream_ = nullptr;
  std::mutex mutex_;
  std::condition_variable begun_;
  std::deque<Read*> reads_;  // of which pieces are left to be begun
  bool stopping_ = false;
  std::vector<Piece> pieces_;
  std::vector<std::thread> threads_;
};

}  // namespace cnn_engine::cuda
