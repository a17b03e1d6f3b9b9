// CUDA kernels on the host: a block's threads are fibers of one thread, which switch where CUDA's
// threads wait for each other (barriers, shuffles, matrix instructions).
//
// What is wrong on a GPU is wrong here, and is found: a barrier that not all threads reach, lanes
// of a warp at different instructions, addresses that are not aligned or not shared memory. Copies
// by cp.async are done at the wait that asks for them, with poison in their place before. Which
// thread runs first is a setting, so that a missing barrier shows in one of them. csrc/cuda is
// compiled as tests/helpers/emulated_cuda.py rewrites it; ptx.h has its instructions.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(from, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(from, bytes)
#endif

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// What the current thread sees.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace emulator {

constexpr int kWarp = 32, kPoison = 0xcd;
constexpr std::size_t kMostShared = 227 << 10, kStack = 256 << 10;

// Which of the threads that can run does: the first or the last one, or each in turn.
enum class Order { first, last, forwards, backwards };
inline Order order = Order::first;

alignas(1024) inline char shared_memory[kMostShared];

// A 32-bit address of shared memory, as instructions take it: its distance from shared_memory.
inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(static_cast<const char*>(pointer) - shared_memory);
}
inline char* shared_pointer(std::uint32_t address) {
  return shared_memory + static_cast<std::int32_t>(address);
}

struct Copy {
  char* to;
  const char* from;
  int bytes, read;  // the rest is zeros
};

struct Fiber {
  ucontext_t context;
  uint3 index;
  bool done, waits;
  std::string at;               // what it waits at
  std::function<bool()> ready;  // whether it need wait no longer; none: others say so
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
};

// Lanes that have come to an instruction of the whole warp, with their operands.
struct Warp {
  unsigned mask = 0, arrived = 0;
  const char* what = "";
  const void* in[kWarp];
  void* out[kWarp];
};

// An mbarrier: arrivals and bytes that its phase still waits for, and copies that are under way.
struct MemoryBarrier {
  int arrivals, pending;
  std::int64_t bytes;
  int phase;
  std::vector<std::function<void()>> copies;

  void expect(std::int64_t more) { bytes += more; }
  void arrive() {
    --pending;
    look();
  }
  // Copies are done once someone waits for them.
  void copy() {
    for (const auto& one : std::exchange(copies, {})) one();
    look();
  }

 private:
  void look() {
    if (pending > 0 || bytes != 0) return;
    pending = arrivals;
    ++phase;
  }
};

class Block {
 public:
  static inline Block* current = nullptr;

  template <typename Body>
  Block(int threads, std::size_t shared_bytes, const Body& body) : warps_((threads + 31) / 32) {
    if (shared_bytes > kMostShared) throw std::runtime_error("expected less shared memory");
    ASAN_UNPOISON_MEMORY_REGION(shared_memory, kMostShared);
    std::memset(shared_memory, kPoison, kMostShared);
    ASAN_POISON_MEMORY_REGION(shared_memory + shared_bytes, kMostShared - shared_bytes);
    static std::vector<std::unique_ptr<char[]>> stacks;
    while (static_cast<int>(stacks.size()) < threads) stacks.emplace_back(new char[kStack]);
    current = this;
    body_ = [](const void* of) {
      (*static_cast<const Body*>(of))();
    };
    of_ = &body;
    fibers_.resize(threads);
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = fibers_[i];
      const unsigned n = i;
      fiber.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks[i].get();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, +[] { current->start(); }, 0);
    }
  }

  // Throws what a thread was stopped for.
  void run() {
    own_ = next();
    swapcontext(&main_, &fibers_[own_].context);
    ASAN_UNPOISON_MEMORY_REGION(shared_memory, kMostShared);
    if (!failure_.empty()) throw std::runtime_error(failure_);
  }

  [[noreturn]] void fail(const std::string& why) {
    const auto text = [](const uint3& at) {
      return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
             std::to_string(at.z) + ")";
    };
    failure_ = "block " + text(blockIdx) + ", thread " + text(own().index) + ": " + why;
    setcontext(&main_);
    std::abort();
  }

  Fiber& own() { return fibers_[own_]; }
  int lane() const { return own_ % kWarp; }

  // Brings `in` of every lane of the warp together: make(ins, outs) runs once, for all of them.
  template <typename Out, typename In, typename Make>
  Out exchange(unsigned mask, const char* what, const In& in, const Make& make) {
    Warp& warp = warps_[own_ / kWarp];
    const unsigned bit = 1u << lane();
    if (!(mask & bit)) fail(std::string(what) + ": expected a mask with the lane itself");
    if (warp.arrived && (warp.mask != mask || std::strcmp(warp.what, what) != 0)) {
      fail(std::string(what) + ": other lanes of the warp wait at " + warp.what);
    }
    Out out{};
    warp.mask = mask;
    warp.what = what;
    warp.in[lane()] = &in;
    warp.out[lane()] = &out;
    warp.arrived |= bit;
    if (warp.arrived != mask) {
      wait(what);
      return out;
    }
    make(reinterpret_cast<const In* const*>(warp.in), reinterpret_cast<Out* const*>(warp.out));
    warp.arrived = 0;
    const int first = own_ / kWarp * kWarp, count = static_cast<int>(fibers_.size());
    for (int i = 0; i < kWarp && first + i < count; ++i) {
      if (mask >> i & 1) fibers_[first + i].waits = false;
    }
    return out;
  }

  void barrier(int id, int threads) {
    const std::string name = "barrier " + std::to_string(id);
    if (++arrived_[id] < threads) return wait(name);
    arrived_[id] = 0;
    for (Fiber& fiber : fibers_) {
      if (fiber.waits && fiber.at == name) fiber.waits = false;
    }
  }
  void barrier() { barrier(0, static_cast<int>(fibers_.size())); }

  // Waits until a condition holds, which others make true.
  void until(const std::string& what, const std::function<bool()>& ready) {
    while (!ready()) {
      own().ready = ready;
      wait(what);
      own().ready = nullptr;
      own().waits = false;
    }
  }

  // Barriers in shared memory, by their addresses.
  MemoryBarrier& memory_barrier(std::uint32_t address) {
    const auto found = memory_barriers_.find(address);
    if (found == memory_barriers_.end()) fail("mbarrier: expected one that is initialised");
    return found->second;
  }
  void init_memory_barrier(std::uint32_t address, int arrivals) {
    if (address % 8 != 0) fail("mbarrier: expected an address that is a multiple of 8");
    memory_barriers_[address] = {arrivals, arrivals, 0, 0, {}};
  }

  // Whether a shared variable of a function is met for the first time in this block.
  bool meets(const void* variable) { return met_.insert(variable).second; }

 private:
  void start() {
    threadIdx = own().index;
    body_(of_);
    own().done = true;
    const int to = next();
    if (to < 0) setcontext(&main_);
    own_ = to;
    setcontext(&fibers_[to].context);
  }

  void wait(const std::string& what) {
    const int self = own_;
    own().waits = true;
    own().at = what;
    const int to = next();
    own_ = to;
    if (to != self) swapcontext(&fibers_[self].context, &fibers_[to].context);
    threadIdx = own().index;
  }

  // The thread that runs next, or -1 where all are done.
  int next() {
    const int count = static_cast<int>(fibers_.size());
    const bool up = order == Order::first || order == Order::forwards;
    const bool again = order == Order::first || order == Order::last;
    int at = again ? (up ? 0 : count - 1) : (up ? own_ + 1 : own_ + count - 1);
    bool all_done = true;
    for (int i = 0; i < count; ++i, at += up ? 1 : count - 1) {
      const Fiber& fiber = fibers_[at % count];
      const bool goes_on = !fiber.waits || (fiber.ready && fiber.ready());
      if (!fiber.done && goes_on) return at % count;
      all_done &= fiber.done;
    }
    if (all_done) return -1;
    std::map<std::string, int> waiting;
    for (const Fiber& fiber : fibers_) ++waiting[fiber.done ? "the end" : fiber.at];
    std::string found;
    for (const auto& [at, threads] : waiting) {
      found += (found.empty() ? "" : ", ") + std::to_string(threads) + " at " + at;
    }
    fail("no thread can go on: " + found);
  }

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::map<int, int> arrived_;
  std::map<std::uint32_t, MemoryBarrier> memory_barriers_;
  std::set<const void*> met_;
  void (*body_)(const void*);
  const void* of_;
  int own_ = 0;
  std::string failure_;
  ucontext_t main_;
};

// ---- copies of cp.async ----

inline void copy_async(std::uint32_t to, const void* from, int bytes, int read) {
  char* const there = shared_pointer(to);
  const auto misaligned = [bytes](const void* at) {
    return reinterpret_cast<std::uintptr_t>(at) % bytes != 0;
  };
  if (misaligned(there) || misaligned(from)) {
    Block::current->fail("cp.async: expected addresses that are multiples of " +
                         std::to_string(bytes));
  }
  std::memset(there, kPoison, bytes);
  Block::current->own().open.push_back({there, static_cast<const char*>(from), bytes, read});
}
inline void commit_copies() {
  Fiber& own = Block::current->own();
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}
inline void wait_for_copies(std::size_t pending) {
  auto& groups = Block::current->own().groups;
  while (groups.size() > pending) {
    for (const Copy& copy : groups.front()) {
      std::memcpy(copy.to, copy.from, copy.read);
      std::memset(copy.to + copy.read, 0, copy.bytes - copy.read);
    }
    groups.erase(groups.begin());
  }
}

// ---- copies that an mbarrier waits for ----

// Where TMA has byte `address` of rows of so many bytes, in the swizzle of as many.
inline std::uint32_t swizzled(std::uint32_t address, int row_bytes) {
  return address ^ ((address >> 7 & static_cast<std::uint32_t>(row_bytes / 16 - 1)) << 4);
}

// `from` may be null: zeros.
inline void copy_for_barrier(std::uint32_t to, const char* from, int bytes, std::uint32_t barrier,
                             int swizzle) {
  for (int i = 0; i < bytes; ++i) {
    *shared_pointer(swizzle ? swizzled(to + i, swizzle) : to + i) = static_cast<char>(kPoison);
  }
  MemoryBarrier& at = Block::current->memory_barrier(barrier);
  at.copies.push_back([=, &at] {
    for (int i = 0; i < bytes; ++i) {
      *shared_pointer(swizzle ? swizzled(to + i, swizzle) : to + i) = from ? from[i] : 0;
    }
    at.expect(-bytes);
  });
}

// ---- shared variables of functions, which a block finds as poison ----

template <typename T>
void poison_once(T& variable) {
  if (Block::current->meets(&variable))
    std::memset(static_cast<void*>(&variable), kPoison, sizeof(T));
}

// ---- launches ----

struct Shape {
  dim3 grid, block;
  std::size_t shared_bytes = 0;
  const void* stream = nullptr;
};

template <typename... Parameters, typename... Arguments>
void run(const Shape& shape, void (*kernel)(Parameters...), Arguments&&... arguments) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const std::tuple<Parameters...> given(static_cast<Parameters>(arguments)...);
  const auto body = [&] {
    std::apply(kernel, given);
  };
  gridDim = shape.grid;
  blockDim = shape.block;
  const int threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  for (unsigned z = 0; z < gridDim.z; ++z) {
    for (unsigned y = 0; y < gridDim.y; ++y) {
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = {x, y, z};
        Block(threads, shape.shared_bytes, body).run();
      }
    }
  }
}

}  // namespace emulator
