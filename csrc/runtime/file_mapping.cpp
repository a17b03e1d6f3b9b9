#include "runtime/file_mapping.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <system_error>

namespace cnn_engine {
namespace {

// What the handler reads, without a lock: `end` is written last, and 0 where a place is free.
struct Mapped {
  std::atomic<std::uintptr_t> begin{0}, end{0};
  std::atomic<bool> cut{false};
};

Mapped mapped[FileMapping::kMost];
std::mutex changing;  // of the table and of the handler
struct sigaction previous;
std::uintptr_t page_bytes;

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (Mapped& one : mapped) {
    const std::uintptr_t end = one.end.load();
    if (address < one.begin.load() || address >= end) continue;
    const std::uintptr_t page = address & ~(page_bytes - 1);
    one.cut.store(true);
    // The rest of the mapping: pages behind a missing one are missing, too.
    if (mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
      break;
    }
    errno = error;
    return;
  }
  errno = error;
  if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(number, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(number);
  } else {
    sigaction(number, &previous, nullptr);  // the read is tried again, and ends the process
  }
}

// Takes SIGBUS over from whoever has it now.
void handle_bus_errors() {
  struct sigaction now;
  sigaction(SIGBUS, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_bus_error) return;
  previous = now;
  page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  struct sigaction ours{};
  ours.sa_sigaction = &on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

FileMapping::FileMapping(int descriptor, off_t offset, std::size_t nbytes) : nbytes_(nbytes) {
  const std::lock_guard<std::mutex> lock(changing);
  handle_bus_errors();
  place_ = 0;
  while (place_ < kMost && mapped[place_].end.load() != 0) ++place_;
  if (place_ == kMost) throw std::length_error("too many mapped files");
  const std::size_t inside = static_cast<std::uintptr_t>(offset) & (page_bytes - 1);
  mapped_ = (inside + nbytes + page_bytes - 1) & ~(page_bytes - 1);
  begin_ = mmap(nullptr, mapped_, PROT_READ, MAP_SHARED, descriptor,
                offset - static_cast<off_t>(inside));
  if (begin_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  data_ = static_cast<const char*>(begin_) + inside;
  Mapped& own = mapped[place_];
  const auto first = reinterpret_cast<std::uintptr_t>(begin_);
  own.cut.store(false);
  own.begin.store(first);
  own.end.store(first + mapped_);
}

FileMapping::~FileMapping() {
  const std::lock_guard<std::mutex> lock(changing);
  mapped[place_].end.store(0);
  munmap(begin_, mapped_);
}

bool FileMapping::was_cut() const { return mapped[place_].cut.load(); }

}  // namespace cnn_engine
