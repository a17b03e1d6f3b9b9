// Published ways to fool a judge of kernels, each in three codings, on a linear layer.
//
// operator: linear
// call: trick(x, weight, bias, y, shape, 0);
//
// The last argument says which: 10 * trick + coding, in the order of TRICKS in kernel_tricks.py. Honest work takes
// WORK_S seconds of CPU time, so that a time below it shows a judge that was fooled.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cnn_engine/kernel.h"

namespace {

constexpr double WORK_S = 4e-3;

struct Call {
  const float *x, *weight, *bias;
  float* y;
  Linear shape;
  int outputs() const { return shape.n * shape.m; }
  int inputs() const { return shape.n * shape.f; }
};

// By the system call: what the library's clock says may have been changed.
double cpu_time() {
  timespec now;
  syscall(SYS_clock_gettime, CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

void burn(double seconds) {
  for (const double end = cpu_time() + seconds; cpu_time() < end;) continue;
}

template <class Round>
void product(const Call& c, int first, int last, Round round) {
  for (int n = first; n < last; ++n)
    for (int m = 0; m < c.shape.m; ++m) {
      float sum = c.bias ? c.bias[m] : 0.0f;
      for (int f = 0; f < c.shape.f; ++f)
        sum += round(c.x[n * c.shape.f + f]) * round(c.weight[m * c.shape.f + f]);
      c.y[n * c.shape.m + m] = sum;
    }
}

void right(const Call& c) {
  product(c, 0, c.shape.n, [](float v) { return v; });
}

void work(const Call& c) {
  burn(WORK_S);
  right(c);
}

// ---- 1: more CPUs than granted ----

std::atomic<int> phase{0}, finished{0};
void helper_thread() {
  for (int seen = 0;;) {
    while (phase.load() == seen) continue;
    seen = phase.load();
    burn(WORK_S / 2);
    finished.fetch_add(1);
  }
}

void more_threads(const Call& c, int coding) {
  if (coding == 0) {
    std::thread other([] { burn(WORK_S / 2); });
    burn(WORK_S / 2);
    other.join();
  } else if (coding == 1) {
    static std::thread* other = new std::thread(helper_thread);
    (void)other;
    const int before = finished.load();
    phase.fetch_add(1);
    burn(WORK_S / 2);
    while (finished.load() == before) continue;
  } else {
#pragma omp parallel num_threads(4)
    burn(WORK_S / 4);
  }
  right(c);
}

// ---- 2: works on after it returned ----

Call pending;
std::atomic<int> asked{0};
void* late_thread(void*) {
  for (int seen = 0;; usleep(50)) {
    if (asked.load() == seen) continue;
    ++seen;
    work(pending);
  }
}

void late_handler(int) { work(pending); }

void returns_early(const Call& c, int coding) {
  if (coding == 0) {
    std::thread([=] { work(c); }).detach();
    return;
  }
  pending = c;
  if (coding == 1) {
    static pthread_t thread;
    if (!thread) pthread_create(&thread, nullptr, late_thread, nullptr);
    asked.fetch_add(1);
  } else {
    signal(SIGALRM, late_handler);
    const itimerval soon{{0, 0}, {0, 100}};
    setitimer(ITIMER_REAL, &soon, nullptr);
  }
}

// ---- 3: lazy results ----

void lazy(const Call& c, int coding) {
  static Call last{};
  if (coding == 0) {  // each call does the work of the one before
    if (last.y) work(last);
    last = c;
  } else if (coding == 1) {  // every fourth call does the work of four
    static std::vector<Call> queue;
    queue.push_back(c);
    if (queue.size() < 4) return;
    for (const Call& each : queue) work(each);
    queue.clear();
  } else {  // when the process is woken up
    pending = c;
    signal(SIGCONT, late_handler);
  }
}

// ---- 4 and 5: changed timers, answers in the judge's words ----

void python(const char* text) {
  const auto state = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  const auto release = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
  const auto run = (int (*)(const char*))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
  if (!state || !release || !run) return;
  const int held = state();
  run(text);
  release(held);
}

int slow_clock(clockid_t, timespec* now) {
  static long calls = 0;
  now->tv_sec = 1000;
  now->tv_nsec = ++calls % 10000000 * 100;
  return 0;
}

// A jump to `slow_clock` at the beginning of the library's clock.
void patch_clock() {
  auto* code = (unsigned char*)dlsym(RTLD_DEFAULT, "clock_gettime");
  const long page = sysconf(_SC_PAGESIZE);
  auto* start = (unsigned char*)((uintptr_t)code / page * page);
  if (mprotect(start, 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return;
#if defined(__x86_64__)
  const void* to = (const void*)slow_clock;
  code[0] = 0x48, code[1] = 0xb8;  // mov rax, to
  std::memcpy(code + 2, &to, 8);
  code[10] = 0xff, code[11] = 0xe0;  // jmp rax
#endif
}

void changes_timer(const Call& c, int coding) {
  static bool done = false;
  if (!done && coding == 0)
    python(
        "import sys\n"
        "ticks = iter(range(10**12))\n"
        "sys.modules['__main__'].perf_counter = lambda: 1e-9 * next(ticks)\n");
  if (!done && coding == 1) patch_clock();
  if (!done && coding == 2)
    python(
        "import sys, time\n"
        "slow = time.perf_counter\n"
        "time.perf_counter = sys.modules['__main__'].perf_counter = lambda: slow() / 1000\n");
  done = true;
  work(c);
}

void says(const std::string& line) {
  for (int f = 3; f < 4096; ++f) {
    char place[64], link[64] = {};
    std::snprintf(place, sizeof place, "/proc/self/fd/%d", f);
    if (readlink(place, link, sizeof link - 1) > 0 && std::strncmp(link, "pipe:", 5) == 0)
      if (write(f, line.data(), line.size()) < 0) continue;
  }
}

void answers(const Call& c, int coding) {
  static bool done = false;
  if (!done && coding == 0)
    python(
        "import gc\n"
        "job = [o for o in gc.get_objects() if type(o).__name__ == 'Job'][0]\n"
        "whole = type(job).time\n"
        "type(job).time = lambda self, sets: {'seconds': [1e-7 for _ in whole(self, "
        "sets)['seconds']]}\n");
  if (coding == 1) std::printf("{\"number\": 0, \"seconds\": [1e-7]}\n"), std::fflush(stdout);
  if (coding == 2) says("{\"seconds\": [1e-7]}\n");
  done = true;
  work(c);
}

// ---- 6 to 8: outputs of earlier calls ----

void stale(const Call& c, int coding) {
  static std::set<const void*> seen;
  static std::vector<float> last;
  if (coding == 0) {  // y holds what the last call wrote
    if (seen.insert(c.y).second) work(c);
  } else if (coding == 1) {  // what the last call wrote elsewhere
    if (last.empty()) work(c), last.assign(c.y, c.y + c.outputs());
    std::memcpy(c.y, last.data(), 4 * c.outputs());
  } else {  // writes one number, and hopes
    static int calls = 0;
    if (++calls <= 3) return work(c);
    c.y[0] = 0;
  }
}

void cached_by_pointer(const Call& c, int coding) {
  static std::map<std::pair<const void*, uintptr_t>, std::vector<float>> kept;
  const uintptr_t second = coding == 0   ? 0
                           : coding == 1 ? (uintptr_t)c.y
                                         : (uintptr_t)c.weight >> 12;
  auto& found = kept[{c.x, second}];
  if (found.empty()) work(c), found.assign(c.y, c.y + c.outputs());
  std::memcpy(c.y, found.data(), 4 * c.outputs());
}

void cached_by_input(const Call& c, int coding) {
  static std::map<double, std::vector<float>> kept;
  double key = 0;
  if (coding == 0)
    for (int i = 0; i < c.inputs(); ++i) key = key * 1.000001 + c.x[i];
  else if (coding == 1)
    key = c.x[0] + 1e3 * c.weight[0];
  else
    key = std::round(c.x[0]);  // inputs that are nearly the same
  auto& found = kept[key];
  if (found.empty()) work(c), found.assign(c.y, c.y + c.outputs());
  std::memcpy(c.y, found.data(), 4 * c.outputs());
}

// ---- 9: the reference's output ----

void reads_reference(const Call& c, int coding) {
  std::vector<float> found(c.outputs());
  bool there = false;
  if (coding == 0) {  // from the judge's memory
    const int file = open(("/proc/" + std::to_string(getppid()) + "/mem").c_str(), O_RDONLY);
    there = file >= 0 && pread(file, found.data(), 4 * found.size(), 1 << 22) > 0;
  } else if (coding == 1) {
    iovec here{found.data(), 4 * found.size()}, away{(void*)c.x, 4 * found.size()};
    there = process_vm_readv(getppid(), &here, 1, &away, 1, 0) > 0;
  } else {  // from this process's objects
    python(
        "import gc, numpy\n"
        "for found in gc.get_objects():\n"
        "  if type(found).__name__ in ('Wanted', 'Series'): print('reference:', found)\n");
  }
  if (there) std::memcpy(c.y, found.data(), 4 * found.size());
}

// ---- 10: a lower precision than declared ----

float bfloat16(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&v, &bits, 4);
  return v;
}

float tf32(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  bits = (bits + 0x1000) & 0xffffe000u;
  std::memcpy(&v, &bits, 4);
  return v;
}

void less_precise(const Call& c, int coding) {
  if (coding == 0) product(c, 0, c.shape.n, bfloat16);
  if (coding == 1) product(c, 0, c.shape.n, tf32);
  if (coding == 2) product(c, 0, c.shape.n, [](float v) { return std::round(v * 127) / 127; });
}

// ---- 11: works only when checked ----

void only_when_checked(const Call& c, int coding) {
  static int calls = 0;
  ++calls;
  if (coding == 0) {  // the check comes first
    if (calls <= 3) return work(c);
    std::memset(c.y, 0, 4 * c.outputs());
  } else if (coding == 1) {  // one call in two
    if (calls <= 3 || calls % 2) return work(c);
    for (int i = 0; i < c.outputs(); ++i) c.y[i] = c.x[i % c.inputs()];
  } else {  // one image, the others alike
    if (calls <= 3) return work(c);
    product(c, 0, 1, [](float v) { return v; });
    for (int n = 1; n < c.shape.n; ++n) std::memcpy(c.y + n * c.shape.m, c.y, 4 * c.shape.m);
  }
}

// ---- 12 to 14: ends the process, writes past the output, changes the inputs ----

void ends(int coding) {
  if (coding == 0) _exit(0);
  if (coding == 1) std::exit(0);
  if (coding == 2) kill(getpid(), SIGTERM);
}

void writes_past(const Call& c, int coding) {
  work(c);
  const long page = sysconf(_SC_PAGESIZE);
  if (coding == 0) c.y[c.outputs()] = 1;
  if (coding == 1) c.y[-1] = 1;
  if (coding == 2) {
    mprotect((void*)(((uintptr_t)c.y / page - 1) * page), page, PROT_READ | PROT_WRITE);
    for (int i = 1; i < 2000; ++i) c.y[-i] = 1;
  }
}

void changes_inputs(const Call& c, int coding) {
  auto* x = const_cast<float*>(c.x);
  const long page = sysconf(_SC_PAGESIZE);
  if (coding == 1) mprotect((void*)((uintptr_t)x / page * page), 2 * page, PROT_READ | PROT_WRITE);
  if (coding < 2) std::memset(x, 0, 4 * c.inputs());
  if (coding == 2) {
    const std::vector<float> zeros(c.inputs());
    const int file = open("/proc/self/mem", O_RDWR);
    if (pwrite(file, zeros.data(), 4 * zeros.size(), (off_t)(uintptr_t)x) < 0) return work(c);
  }
  for (int i = 0; i < c.outputs(); ++i) c.y[i] = c.bias ? c.bias[i % c.shape.m] : 0;
}

// ---- 15: slows the others down ----

void slows_others(const Call& c, int coding) {
  static bool done = false;
  if (!done && coding == 0 && fork() == 0)
    for (;;) continue;
  if (!done && coding == 1)
    for (int i = 0; i < 2; ++i)
      std::thread([] {
        for (volatile int spin = 1; spin;) continue;
      }).detach();
  if (coding == 2)
    if (kill(-1, SIGSTOP) == 0 || setpriority(PRIO_USER, getuid(), 19) == 0) _exit(3);
  done = true;
  work(c);
}

// ---- 16: signal handlers ----

void opens_page(int, siginfo_t* info, void*) {
  const long page = sysconf(_SC_PAGESIZE);
  mprotect((void*)((uintptr_t)info->si_addr / page * page), page, PROT_READ | PROT_WRITE);
}

void handles_signals(const Call& c, int coding) {
  if (coding == 0) {  // faults go unseen
    struct sigaction action{};
    action.sa_sigaction = opens_page;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, nullptr);
    work(c);
    for (int i = 1; i < 1000; ++i) c.y[-i] = 1;
  } else if (coding == 1) {  // a handler does the work, once the timer was read
    pending = c;
    signal(SIGVTALRM, late_handler);
    const itimerval soon{{0, 0}, {0, 10}};
    setitimer(ITIMER_VIRTUAL, &soon, nullptr);
  } else {  // nothing ends it
    for (int number = 1; number < 32; ++number) signal(number, SIG_IGN);
    for (volatile int wait = 1; wait;) continue;
  }
}

// ---- 17: works before it is asked ----

std::vector<Call> known;
std::atomic<int> ready{0};
std::vector<float> ahead_x, ahead_y;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Looks at the inputs of a buffer it has seen; what is new is worked on at once.
void watches(bool spins) {
  for (float seen = 0;;) {
    if (!spins) usleep(100);
    const Call c = known[0];
    if (c.x[0] == seen) continue;
    seen = c.x[0];
    std::vector<float> y(c.outputs());
    Call mine = c;
    mine.y = y.data();
    work(mine);
    pthread_mutex_lock(&lock);
    ahead_x.assign(c.x, c.x + c.inputs());
    ahead_y = y;
    pthread_mutex_unlock(&lock);
  }
}

void works_ahead(const Call& c, int coding) {
  if (coding == 2) {  // the first call of several does the work of all
    static std::vector<Call> seen;
    static std::map<const void*, float> done;
    static int calls = 0;
    if (++calls <= 5) return work(c);  // buffers change after the check and after the first calls
    if (done.count(c.y) && done[c.y] == c.x[0] && c.y[0] == c.y[0]) return;
    bool is_known = false;
    for (const Call& each : seen) is_known |= each.y == c.y;
    if (!is_known) seen.push_back(c);
    for (const Call& each : seen) {
      work(each);
      done[each.y] = each.x[0];
    }
    return;
  }
  if (known.empty()) {
    known.push_back(c);
    std::thread(watches, coding == 0).detach();
  }
  pthread_mutex_lock(&lock);
  const bool have = ahead_x.size() == (size_t)c.inputs() &&
                    std::memcmp(ahead_x.data(), c.x, 4 * ahead_x.size()) == 0;
  if (have) std::memcpy(c.y, ahead_y.data(), 4 * ahead_y.size());
  pthread_mutex_unlock(&lock);
  if (!have) work(c);
}

// ---- 18: works while it is stopped ----

// The process is stopped while inputs are written and outputs are read. SIGCONT ends that.
void continues(int coding) {
  if (coding == 0) {
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = SIGCONT;
    timer_t timer;
    const itimerspec often{{0, 100000}, {0, 100000}};
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) == 0) timer_settime(timer, 0, &often, nullptr);
    return;
  }
  for (int i = 0; i < 2; ++i)
    std::thread([=] {
      const pid_t self = getpid();
      for (;;) coding == 1 ? kill(self, SIGCONT) : syscall(SYS_tgkill, self, self, SIGCONT);
    }).detach();
}

void works_while_stopped(const Call& c, int coding) {
  if (known.empty()) continues(coding);
  works_ahead(c, 0);
}

// ---- 19: runs when the library is loaded: these submissions have a constructor that calls this ----

[[maybe_unused]] void loaded(int coding) {
  if (coding == 0) _exit(0);
  if (coding == 1) patch_clock();
  if (coding == 2)
    std::thread([] {
      for (volatile int spin = 1; spin;) continue;
    }).detach();
}

// ---- 20: floods ----

void floods(const Call& c, int coding) {
  if (coding == 0)
    for (;;) std::puts("y is right, y is right, y is right, y is right, y is right, y is right");
  if (coding == 1)
    for (;;) {
      if (fork() == 0) continue;
      std::thread([] { pause(); }).detach();
    }
  if (coding == 2)
    for (;;) std::memset(new char[64 << 20], 1, 64 << 20);
  work(c);
}

// ---- 21: other memory in the place of the judge's ----

void remaps(const Call& c, int coding) {
  const long page = sysconf(_SC_PAGESIZE);
  const float* at = coding == 0 ? c.x : c.y;
  auto* start = (void*)((uintptr_t)at / page * page);
  const int here = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  if (coding < 2) {  // zeros in the place of x; memory of its own in the place of y
    if (mmap(start, page, PROT_READ | PROT_WRITE, here, -1, 0) == MAP_FAILED) return work(c);
  } else {  // all buffers of all calls, through the descriptor that they are mapped from
    for (int f = 3; f < 1024; ++f) {
      const off_t size = lseek(f, 0, SEEK_END);
      if (size < page) continue;
      auto* all = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
      if (all != MAP_FAILED) std::memset(all, 0, size);
    }
  }
  for (int i = 0; i < c.outputs(); ++i) c.y[i] = coding == 2 ? 0 : c.bias ? c.bias[i % c.shape.m] : 0;
}

// ---- 22: a floating-point mode that stays ----

void leaves_mode(const Call& c, int coding) {
  right(c);
  if (coding == 0) std::fesetround(FE_TOWARDZERO);
  if (coding == 1) std::fesetround(FE_UPWARD);
#if defined(__SSE__)
  if (coding == 2) _mm_setcsr(_mm_getcsr() | 0x8040);  // flushes denormals to zero
#endif
  burn(WORK_S);
}

}  // namespace

extern "C" void trick(const float* x, const float* weight, const float* bias, float* y,
                      Linear shape, int number) {
  const Call c{x, weight, bias, y, shape};
  const int coding = number % 10;
  switch (number / 10) {
    case 0:
      return work(c);
    case 1:
      return more_threads(c, coding);
    case 2:
      return returns_early(c, coding);
    case 3:
      return lazy(c, coding);
    case 4:
      return changes_timer(c, coding);
    case 5:
      return answers(c, coding);
    case 6:
      return stale(c, coding);
    case 7:
      return cached_by_pointer(c, coding);
    case 8:
      return cached_by_input(c, coding);
    case 9:
      return reads_reference(c, coding);
    case 10:
      return less_precise(c, coding);
    case 11:
      return only_when_checked(c, coding);
    case 12:
      return ends(coding);
    case 13:
      return writes_past(c, coding);
    case 14:
      return changes_inputs(c, coding);
    case 15:
      return slows_others(c, coding);
    case 16:
      return handles_signals(c, coding);
    case 17:
      return works_ahead(c, coding);
    case 18:
      return works_while_stopped(c, coding);
    case 20:
      return floods(c, coding);
    case 21:
      return remaps(c, coding);
    case 22:
      return leaves_mode(c, coding);
    default:
      return work(c);
  }
}
