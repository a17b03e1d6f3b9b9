"""C++ kernels that attack what judges them, and files that attack the compiler."""

from __future__ import annotations

from cnn_engine.kernel import templates

#: Attacks that must fail in silence: name -> statements that are true where the attack succeeded. ``judge``
#: is the process that judges, ``secret`` an address in its memory, ``victim`` a file of the user's.
PROBES = {
    "kills the judge": "judge != getpid() && kill(judge, SIGKILL) == 0",
    "stops the judge": "judge != getpid() && kill(judge, SIGSTOP) == 0",
    "kills what started it": "getppid() > 1 && kill(getppid(), SIGKILL) == 0",
    "kills everything": "kill(-1, SIGKILL) == 0",
    "kills by thread": "syscall(SYS_tkill, judge, SIGKILL) == 0",
    "kills by descriptor": "syscall(SYS_pidfd_send_signal, syscall(SYS_pidfd_open, judge, 0), SIGKILL, 0, 0) "
    "== 0",
    "queues a signal": "sigqueue(judge, SIGKILL, sigval()) == 0",
    "traces the judge": "ptrace(PTRACE_SEIZE, judge, 0, 0) == 0",
    "reads the judge's memory": "reads(judge, secret)",
    "opens the judge's memory": "opens(judge, \"mem\")",
    "reads the judge's environment": "opens(judge, \"environ\")",
    "opens the judge's files": "opens(judge, \"fd/0\")",
    "takes the judge's files": "syscall(SYS_pidfd_getfd, syscall(SYS_pidfd_open, judge, 0), 0, 0) >= 0",
    "limits the judge": "limits(judge)",
    "renices the user's processes": "setpriority(PRIO_USER, getuid(), 19) == 0",
    "starts a process": "forks()",
    "continues itself": "kill(getpid(), SIGCONT) == 0",
    "continues its thread": "raise(SIGCONT) == 0",
    "has a timer continue it": "has_timer()",
    "has a pipe continue it": "fcntl(0, F_SETSIG, SIGCONT) == 0",
    "pins its threads": "syscall(SYS_sched_setaffinity, 0, 128, std::string(128, '\\1').data()) == 0",
    "leaves its session": "setsid() >= 0",
    "writes a file": "opens_to_write(victim)",
    "makes a file": "opens_to_write(victim + \".new\")",
    "removes a file": "unlink(victim.c_str()) == 0",
    "opens a socket of files": "syscall(SYS_socket, 1, 1, 0) >= 0",
    "opens a socket of networks": "syscall(SYS_socket, 2, 1, 0) >= 0",
    "keeps memory in a file": "syscall(SYS_memfd_create, \"m\", 0) >= 0",
    "keeps memory of System V": "shmget(IPC_PRIVATE, 1 << 30, IPC_CREAT) >= 0",
}  # fmt: skip

#: What ends a trial with a line: name -> (statements, a part of the line).
ENDS = {
    "closes all files": ("for (int f = 0; f < 256; ++f) close(f);", "it ended the process"),
    "ends early": ("_exit(0);", "exit(0) was called"),
    "stops itself": ("raise(SIGSTOP);", "time: expected an end within"),
    "cuts the shared memory off": (
        "bool cut = false;\n  for (int f = 3; f < 256; ++f) cut |= ftruncate(f, 0) == 0;\n  return;",
        "found nothing written",
    ),
    "starts threads without end": (
        "for (;;) std::thread([] { pause(); }).detach();",
        "crash: ",
    ),
    "answers in the judge's words": ("answers(\"seconds='soon'\");", "cheating: "),
    "answers with a fault that there is not": (
        "answers(\"fault=99, address=0, place=None\");",
        "cheating: ",
    ),
    "answers with a place that there is not": (
        "answers(\"fault=11, address=0, place=['no', 1e400, 3]\");",
        "cheating: ",
    ),
    "answers without end": ("says(std::string(1 << 19, '['));", "cheating: "),
    "answers with a list": ('says("[1]");', "cheating: "),
    "answers with bytes": ('says("\\xff\\xfe");', "cheating: "),
}  # fmt: skip

_HELPERS = r"""
#include <csignal>
#include <ctime>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace {

const pid_t judge = @JUDGE@;
void* const secret = reinterpret_cast<void*>(@SECRET@);
const std::string victim = "@VICTIM@";

[[maybe_unused]] bool reads(pid_t process, void* address) {
  char buffer[8];
  iovec here{buffer, 8}, there{address, 8};
  return process_vm_readv(process, &here, 1, &there, 1, 0) == 8;
}

[[maybe_unused]] bool opens(pid_t process, const char* name) {
  const int file = open(("/proc/" + std::to_string(process) + "/" + name).c_str(), O_RDONLY);
  char byte;
  const off_t place = std::strcmp(name, "mem") == 0 ? (off_t)secret : 0;
  return file >= 0 && pread(file, &byte, 1, place) > 0;  // to open it is not yet to read it
}

[[maybe_unused]] bool opens_to_write(const std::string& path) {
  return open(path.c_str(), O_WRONLY | O_CREAT, 0600) >= 0;
}

[[maybe_unused]] bool limits(pid_t process) {
  rlimit most{3, 3};
  return prlimit(process, RLIMIT_NOFILE, &most, nullptr) == 0;
}

[[maybe_unused]] bool has_timer() {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGCONT;
  timer_t timer;
  return timer_create(CLOCK_MONOTONIC, &event, &timer) == 0;
}

[[maybe_unused]] bool forks() {
  const pid_t child = fork();
  if (child == 0) {
    setsid();
    sleep(600);
    _exit(0);
  }
  return child > 0;
}

// Runs Python in this process: what sends the answers is its own.
[[maybe_unused]] void answers(const char* answer) {
  const auto state = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  const auto run = (int (*)(const char*))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
  state();
  const std::string text = std::string("import gc\n"
      "job = [o for o in gc.get_objects() if type(o).__name__ == 'Job'][0]\n"
      "job.reply(") + answer + ")";
  run(text.c_str());
  sleep(600);
}

[[maybe_unused]] void says(const std::string& line) {
  const std::string whole = line + "\n";
  for (int f = 3; f < 4096; ++f) {
    char place[64], link[64] = {};
    std::snprintf(place, sizeof place, "/proc/self/fd/%d", f);
    if (readlink(place, link, sizeof link - 1) > 0 && std::strncmp(link, "pipe:", 5) == 0) {
      if (write(f, whole.data(), whole.size()) > 0) sleep(600);
    }
  }
}

}  // namespace
"""


def cpp(statements: str, judge: int = 0, secret: int = 0, victim: str = "") -> str:
    """Returns a kernel that is right, but for ``statements`` at its beginning."""
    text = templates.text("relu", "cpu", "hostile.cpp")
    function = text.index('extern "C" void')
    start = text.index(" {\n", function)
    head, brace, body = text[:function], text[function:start] + " {\n", text[start + 3 :]
    helpers = _HELPERS.replace("@JUDGE@", str(judge)).replace("@SECRET@", f"{secret}ull")
    helpers = helpers.replace("@VICTIM@", victim)
    include = "#include <cmath>\n"
    assert include in head
    return head.replace(include, include + helpers, 1) + brace + f"  {statements}\n" + body


def probing(names: list[str], **positions: object) -> str:
    """Returns a kernel that tries :data:`PROBES`, and calls exit(100 + n) where the nth succeeds."""
    tests = [f"if ({PROBES[name]}) _exit({100 + index});" for index, name in enumerate(names)]
    return cpp("\n  ".join(tests), **positions)


#: Text in front of a kernel that is right: name -> (text, a part of the line that it must get).
COMPILERS = {
    "includes a device": ('#include "/dev/zero"\n', ""),
    "includes the input": ('#include "/dev/stdin"\nint here = missing;\n', "missing"),
    "assembles a device": ('asm(".incbin \\"/dev/zero\\"");\n', ""),
    "assembles much": ('asm(".zero 30000000000");\n', ""),
    "has much data": ("char much[30000000000] = {1};\n", ""),
    "expands without end": (
        "#define A0(x) x x x x x x x x x x\n"
        + "".join(f"#define A{i + 1}(x) A{i}(x x x x x x x x x x)\n" for i in range(8))
        + 'const char* text = A8("0123456789");\n',
        "",
    ),
    "instantiates without end": (
        "template <class A, class B> struct Two {};\n"
        "template <int N, class T> struct Grow { using type = typename Grow<N - 1, Two<T, "
        "typename Grow<N - 1, Two<T, int>>::type>>::type; };\n"
        "template <class T> struct Grow<0, T> { using type = T; };\n"
        "using Grown = Grow<40, int>::type;\n",
        "",
    ),
    "computes without end": (
        "using Long = unsigned long;\n"
        "constexpr Long count(Long n) { Long s = 0; for (Long i = 0; i < n; ++i) s += i ^ s; return s; }\n"
        "template <Long N> struct Each { static constexpr Long sum = count(200000 + N) + "
        "Each<N - 1>::sum; };\n"
        "template <> struct Each<0> { static constexpr Long sum = 0; };\n"
        "Long sum = Each<400>::sum;\n",
        "",
    ),
    "says much": (
        f'#define A0 _Pragma("GCC warning \\"{"much" * 500}\\"")\n'
        + "".join(f"#define A{i + 1} " + f"A{i} " * 10 + "\n" for i in range(5))
        + "A5\n",
        "MiB of the compiler's output",
    ),
}
