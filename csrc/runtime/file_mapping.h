// A file mapped for reading which other processes may cut at any time.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>

namespace cnn_engine {

// A read of a mapped page that its file no longer has raises SIGBUS, which ends the process. Here
// such pages become zeros, and the mapping says that it was cut: what was read is to be discarded.
// SIGBUS of any other cause goes to whoever handled it before.
class FileMapping {
 public:
  // Maps `nbytes` from byte `offset` of an open file. Throws std::system_error where that cannot be
  // done, and std::length_error where kMost mappings are there.
  FileMapping(int descriptor, off_t offset, std::size_t nbytes);
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  static constexpr int kMost = 4096;

  const void* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }

  // Whether a read found a page that the file no longer had; it has read zeros since then.
  bool was_cut() const;

 private:
  void* begin_;  // of its first page
  std::size_t mapped_;
  const void* data_;
  std::size_t nbytes_;
  int place_;  // in the table that the signal's handler reads
};

}  // namespace cnn_engine
