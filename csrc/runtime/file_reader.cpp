#include "runtime/file_reader.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "runtime/device.h"

namespace cnn_engine::cuda {

// One call of read(), on its caller's stack; all but the first four is guarded by the mutex.
struct FileReader::Read {
  int descriptor;
  off_t offset;
  std::size_t nbytes;
  char* to;
  std::size_t begun = 0;  // bytes
  std::size_t left = 0;   // pieces
  std::size_t there = 0;  // bytes, up to where the file ended
  int error = 0;          // of the system
  std::string failure{};  // of the device
  std::condition_variable ended{};
};

// Page-locked memory, and the copy from it that is on its way.
struct FileReader::Piece {
  char* memory = nullptr;
  cudaEvent_t copied = nullptr;
  Read* read = nullptr;  // null: none
};

FileReader::FileReader(int device, int threads, std::size_t piece)
    : device_(device), piece_(piece), pieces_(2 * static_cast<std::size_t>(threads)) {
  const DeviceGuard guard(device);
  try {
    CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&memory_), pieces_.size() * piece,
                             cudaHostAllocPortable));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      pieces_[i].memory = memory_ + i * piece;
      CUDA_CHECK(cudaEventCreateWithFlags(&pieces_[i].copied,
                                          cudaEventDisableTiming | cudaEventBlockingSync));
    }
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back(&FileReader::serve, this, &pieces_[2 * i]);
    }
  } catch (...) {
    release();
    throw;
  }
}

FileReader::~FileReader() { release(); }

void FileReader::release() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  begun_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  for (Piece& piece : pieces_) {
    if (piece.copied != nullptr) cudaEventDestroy(piece.copied);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  cudaFreeHost(memory_);
}

std::size_t FileReader::read(int descriptor, off_t offset, std::size_t nbytes, void* to) {
  Read read{descriptor, offset, nbytes, static_cast<char*>(to)};
  read.left = (nbytes + piece_ - 1) / piece_;
  read.there = nbytes;
  if (nbytes > 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    reads_.push_back(&read);
    begun_.notify_all();
    read.ended.wait(lock, [&] { return read.left == 0; });
  }
  if (read.error != 0) throw std::system_error(read.error, std::generic_category(), "pread");
  if (!read.failure.empty()) throw Error(read.failure);
  return read.there;
}

void FileReader::serve(Piece* pieces) {
  cudaSetDevice(device_);  // what fails here fails again below, where it is told
  int turn = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (reads_.empty()) {
      if (pieces[0].read != nullptr || pieces[1].read != nullptr) {
        lock.unlock();
        settle(pieces[turn]);
        settle(pieces[1 - turn]);
        lock.lock();
        continue;
      }
      if (stopping_) break;
      begun_.wait(lock);
      continue;
    }
    Read& read = *reads_.front();
    const std::size_t begin = read.begun, size = std::min(piece_, read.nbytes - begin);
    read.begun += size;
    if (read.begun == read.nbytes) reads_.pop_front();
    lock.unlock();
    Piece& piece = pieces[turn];
    turn = 1 - turn;
    settle(piece);
    fill(read, begin, size, piece);
    // What was copied meanwhile is told now, not when its memory is wanted again.
    Piece& other = pieces[turn];
    if (other.read != nullptr && cudaEventQuery(other.copied) == cudaSuccess) settle(other);
    lock.lock();
  }
}

void FileReader::fill(Read& read, std::size_t begin, std::size_t size, Piece& piece) {
  std::size_t done = 0;
  int error = 0;
  while (done < size) {
    const ssize_t count = pread(read.descriptor, piece.memory + done, size - done,
                                read.offset + static_cast<off_t>(begin + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) error = errno;
    if (count <= 0) break;
    done += static_cast<std::size_t>(count);
  }
  cudaError_t failed = cudaSuccess;
  if (read.to != nullptr && done > 0) {
    failed = cudaMemcpyAsync(read.to + begin, piece.memory, done, cudaMemcpyHostToDevice, stream_);
    if (failed == cudaSuccess) failed = cudaEventRecord(piece.copied, stream_);
    if (failed == cudaSuccess) piece.read = &read;
  }
  if (piece.read != nullptr && done == size) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error != 0 && read.error == 0) read.error = error;
  if (done < size) read.there = std::min(read.there, begin + done);
  if (failed != cudaSuccess && read.failure.empty()) {
    read.failure = std::string("cudaMemcpyAsync: ") + cudaGetErrorName(failed) + ": " +
                   cudaGetErrorString(failed);
  }
  if (piece.read == nullptr) end(read);
}

void FileReader::settle(Piece& piece) {
  if (piece.read == nullptr) return;
  const cudaError_t failed = cudaEventSynchronize(piece.copied);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed != cudaSuccess && piece.read->failure.empty()) {
    piece.read->failure = std::string("cudaEventSynchronize: ") + cudaGetErrorName(failed) + ": " +
                          cudaGetErrorString(failed);
  }
  end(*piece.read);
  piece.read = nullptr;
}

// With the mutex held: its caller may return, and the read be gone, as soon as that is given back.
void FileReader::end(Read& read) {
  if (--read.left == 0) read.ended.notify_one();
}

}  // namespace cnn_engine::cuda
