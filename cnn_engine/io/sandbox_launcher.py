"""Confines itself, then runs a command: ``python -I -S sandbox_launcher.py SPEC COMMAND...``.

A script of its own that needs the standard library alone, so that it starts in milliseconds and a command
is confined before any of its code runs. :mod:`.sandbox` writes SPEC and says what each layer is for. A layer
that the system does not offer is left out; ``CNN_ENGINE_SANDBOX`` tells the command which there are.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip


def main() -> None:
    spec, command = json.loads(sys.argv[1]), sys.argv[2:]
    end_with_parent()
    if os.getppid() != spec["parent"]:
        os._exit(1)
    for name, most in spec["limits"].items():
        what = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    layers = ["limits"]
    below_launchers(spec, layers)  # returns in the process that becomes the command
    if spec["filtered"]:
        if "namespaces" not in layers:
            drop_capabilities()
        if landlock(spec["writable"]):
            layers.append("Landlock")
        if seccomp(spec["processes"], spec["network"]):
            layers.append("seccomp")
    os.environ["CNN_ENGINE_SANDBOX"] = ",".join(layers)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)


def end_with_parent() -> None:
    """The kernel kills this process where its parent ends, however that ends."""
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


# ---- processes that wait, and namespaces ----


def below_launchers(spec: dict, layers: list[str]) -> None:
    """Returns in a process of new user and PID namespaces; this one waits, and ends as that one does.

    Four processes: this one; a child in the new user namespace, which forks the PID namespace's first
    process; that one reaps, and when it ends the kernel kills all others; and the command. A first process
    ignores signals such as SIGABRT, so it cannot be the command itself. Without namespaces the child is what
    reaps, as a subreaper, and kills what the command left.
    """
    ready, mapped, status = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child:
        wait_only(spec, ready[1], mapped[0], status[1])
        if os.read(ready[0], 1) == b"1":
            write_maps(child)
        os.write(mapped[1], b"1")
        code = os.read(status[0], 4)
        _, found = os.waitpid(child, 0)
        end_as(struct.unpack("i", code)[0] if len(code) == 4 else found)
    flags = CLONE_NEWUSER | CLONE_NEWPID | (0 if spec["network"] else CLONE_NEWNET | CLONE_NEWIPC)
    isolated = spec["filtered"] and libc.unshare(flags) == 0
    end_with_parent()  # after what changes credentials
    os.write(ready[1], b"1" if isolated else b"0")
    os.read(mapped[0], 1)
    if isolated:
        layers.append("namespaces")
        first = os.fork()
        if first:
            wait_only(spec, status[1])
            os.waitpid(first, 0)
            os._exit(1)  # the status is in the pipe
        end_with_parent()
    else:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = os.fork()
    if command:
        wait_only(spec)
        while True:
            pid, code = os.wait()
            if pid == command:
                if not isolated:
                    end_children(command)
                os.write(status[1], struct.pack("i", code))
                os._exit(1)
    end_with_parent()
    os.setpgid(0, 0)  # a group without those that wait
    for descriptor in (*ready, *mapped, *status):
        os.close(descriptor)


def end_children(group: int) -> None:
    """Kills and reaps this process' children, and those that become its own by that.

    A group is killed at once: processes that only start the next one and end are gone before they are found.
    Once is enough, and later another group may have its number.
    """
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    while True:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            os.wait()
            while os.waitpid(-1, os.WNOHANG)[0]:  # there may be thousands
                continue
        except ChildProcessError:
            return


def wait_only(spec: dict, *descriptors: int) -> None:
    """Closes the command's ends of pipes, so that an end of file means that the command closed them."""
    for descriptor in (*spec["inherited"], *descriptors):
        os.close(descriptor)
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)


def write_maps(child: int) -> None:
    """Gives the child's user namespace the same numbers: all of them for root, else this user's."""
    user, group = os.geteuid(), os.getegid()
    everyone = "0 0 4294967295"
    lines = [
        ("setgroups", "deny"),
        ("uid_map", everyone if user == 0 else f"{user} {user} 1"),
        ("gid_map", everyone if user == 0 else f"{group} {group} 1"),
    ]
    for name, line in lines:
        try:
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(line)
        except OSError:
            if line == everyone:  # root of a container has fewer
                with contextlib.suppress(OSError), open(f"/proc/{child}/{name}", "w") as file:
                    file.write("0 0 1")


def end_as(status: int) -> None:
    """Ends this process as another one ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def drop_capabilities() -> None:
    """Root without a user namespace: without these it may look into no process that is not dumpable."""
    CAP_SYS_PTRACE, CAP_KILL, CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 19, 5, 21, 24
    for capability in (CAP_SYS_PTRACE, CAP_KILL, CAP_SYS_ADMIN, CAP_SYS_RESOURCE):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


# ---- Landlock: where files may be written ----

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
#: Removing, making and moving of files of all kinds.
CHANGES = (
    1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 13
)


def landlock(writable: list[str]) -> bool:
    """Lets files be written below ``writable`` alone; nor may processes outside be traced or signalled."""
    abi = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return False
    access = WRITE_FILE | CHANGES
    if abi < 2:
        access &= ~(1 << 13)
    if abi >= 3:
        access |= TRUNCATE
    handled = struct.pack("QQQ", access, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    handled = handled[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = libc.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        return False
    for path in writable:
        try:
            where = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = access if os.path.isdir(path) else access & (WRITE_FILE | TRUNCATE)
        libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, where), 0)
        os.close(where)
    done = libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return done


# ---- seccomp: what may be asked of the kernel ----

#: Numbers of system calls, x86-64 and aarch64.
CALLS = {
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "clone3": (435, 435),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "setsid": (112, 157), "setpgid": (109, 154),
    "prlimit64": (302, 261), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "io_uring_setup": (425, 425), "userfaultfd": (323, 282),
    "bpf": (321, 280), "perf_event_open": (298, 241), "mount": (165, 40), "unshare": (272, 97),
    "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "timer_create": (222, 107), "sched_setaffinity": (203, 122),
    "fcntl": (72, 25), "setns": (308, 268), "socket": (41, 198), "keyctl": (250, 219), "add_key": (248, 217),
}  # fmt: skip

#: What even a command that starts processes, such as a compiler, may not ask.
ALWAYS = (
    "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "pidfd_send_signal", "kcmp", "setsid",
    "setpgid", "io_uring_setup", "userfaultfd", "bpf", "perf_event_open", "mount", "unshare", "setns",
    "keyctl", "add_key", "shmget", "rt_sigqueueinfo", "rt_tgsigqueueinfo",
)  # fmt: skip
#: What a kernel on trial may not ask either: it has threads, and no processes.
ALONE = (
    *ALWAYS, "fork", "vfork", "tkill", "pidfd_open", "process_madvise", "memfd_create",
    "memfd_secret", "setpriority", "sched_setscheduler", "sched_setattr", "ioprio_set",
    "timer_create", "sched_setaffinity",
)  # fmt: skip

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x10000
F_SETSIG, F_NOTIFY = 10, 1026
LOAD, JUMP_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
#: Offsets in struct seccomp_data; of the arguments, 8 bytes each, the low word.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16


def seccomp(processes: bool, network: bool) -> bool:
    """Refuses system calls; see :data:`ALWAYS` and :data:`ALONE`."""
    machines = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
    column, architecture = machines.get(platform.machine(), (0, 0))
    if not architecture or struct.calcsize("P") != 8:
        return False
    number = {name: numbers[column] for name, numbers in CALLS.items()}
    program: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),  # another architecture's numbers would mean other calls
        (LOAD, 0, 0, NUMBER),
    ]
    if column == 0:  # x32 calls, by a bit of the number
        program += [(JUMP_SET, 0, 1, 0x40000000), (RETURN, 0, 0, ERRNO | ENOSYS)]

    def refuse(name: str, error: int) -> None:
        if number[name] is not None:
            program.extend([(JUMP_EQUAL, 0, 1, number[name]), (RETURN, 0, 0, ERRNO | error)])

    def must(name: str, *tests: tuple[int, int, int, bool]) -> None:
        """Refuses a call unless each test (argument, jump, value) of it comes out as the fourth says."""
        body: list[tuple[int, int, int, int]] = []
        for argument, jump, value, passes in tests:
            skip = (1, 0) if passes else (0, 1)
            body += [
                (LOAD, 0, 0, ARGUMENTS + 8 * argument),
                (jump, *skip, value),
                (RETURN, 0, 0, ERRNO | EPERM),
            ]
        body.append((RETURN, 0, 0, ALLOW))
        program.extend([(JUMP_EQUAL, 0, len(body), number[name]), *body])

    for name in ALWAYS if processes else ALONE:
        refuse(name, EPERM)
    if (
        not network
    ):  # a socket that has a path is reached from any network namespace, such as D-Bus'
        refuse("socket", EPERM)
    if not processes:
        # Its arguments are in memory, where no filter sees them; libraries fall back to clone.
        refuse("clone3", ENOSYS)
        must("clone", (0, JUMP_SET, CLONE_THREAD, True))
        # It is stopped between requests: SIGCONT, from itself or a timer, would end that.
        for name, position in (("kill", 1), ("tgkill", 2)):
            own = (0, JUMP_EQUAL, os.getpid(), True)
            must(name, own, (position, JUMP_EQUAL, signal.SIGCONT, False))
        must("fcntl", *((1, JUMP_EQUAL, value, False) for value in (F_SETSIG, F_NOTIFY)))
        must("prlimit64", (0, JUMP_EQUAL, 0, True))
    program.append((RETURN, 0, 0, ALLOW))
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    pointer = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    # Without SPEC_ALLOW kernels before 5.16 slow a filtered process down, and its times are measured.
    call, set_filter, spec_allow = (317, 277)[column], 1, 4
    return libc.syscall(call, set_filter, spec_allow, pointer) == 0


if __name__ == "__main__":
    main()
