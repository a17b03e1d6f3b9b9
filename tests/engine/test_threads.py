"""Threads on the CPU: how many by default, that they come, and callers, children and exits beside them."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cifar10.network import NETWORK as CIFAR10
from cnn_engine import _cpu
from cnn_engine.devices import threads
from cnn_engine.lower import fused_network as fused_kernels

CPUS = len(os.sched_getaffinity(0))
several_cpus = pytest.mark.skipif(CPUS < 2, reason="this process has one CPU")


def build():
    parameters = CIFAR10.random_weights(0)
    return _cpu.FusedNetwork(*fused_kernels.description(CIFAR10, parameters), "float32")


def pixels(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


class Call:
    """One call of ``FusedNetwork.run``, with its memory."""

    def __init__(self, fused, count: int, workers: int) -> None:
        self.images = pixels(count)
        self.out = np.zeros((count, 10), np.float32)
        self.arguments = (self.images.ctypes.data, True, count, self.out.ctypes.data, workers)
        self.run = fused.run

    def __call__(self) -> np.ndarray:
        self.run(*self.arguments)
        return self.out


# ---- how many by default ----


def files(root: Path, contents: dict[str, str]) -> tuple[Path, Path]:
    """Writes fake cgroup files; returns the folder of the cgroups and the process's own list."""
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root / "cgroup", root / "self"


@pytest.mark.parametrize(
    ("contents", "cpus"),
    [
        ({}, None),
        ({"self": "0::/\n"}, None),
        ({"self": "0::/\n", "cgroup/cpu.max": "max 100000\n"}, None),
        ({"self": "0::/\n", "cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"self": "0::/a/b\n", "cgroup/a/cpu.max": "200000 100000\n",
          "cgroup/a/b/cpu.max": "max 100000\n"}, 2.0),
        ({"self": "0::/a/b\n", "cgroup/a/cpu.max": "800000 100000\n",
          "cgroup/a/b/cpu.max": "300000 100000\n"}, 3.0),
        ({"self": "0::/../host\n", "cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({"self": "0::/a\n", "cgroup/a/cpu.max": "nonsense\n"}, None),
        ({"self": "4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n",
          "cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "400000\n",
          "cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"self": "4:cpuacct,cpu:/docker/x\n", "cgroup/cpu/cpu.cfs_quota_us": "250000\n",
          "cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
        ({"self": "4:cpu:/x\n", "cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
          "cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, None),
        ({"self": "9:memory:/x\n", "cgroup/memory/x/cpu.max": "100000 100000\n"}, None),
        ({"self": "4:cpu:/x\n0::/y\n", "cgroup/cpu/x/cpu.cfs_quota_us": "200000\n",
          "cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"self": "no cgroups at all\n"}, None),
    ],
    ids=["no file", "no limit file", "max", "a share", "above", "the least", "outside the namespace",
         "nonsense", "v1", "v1 in a container", "v1 unlimited", "another controller", "hybrid", "garbage"],
)  # fmt: skip
def test_quota(tmp_path, contents, cpus):
    assert threads.quota(*files(tmp_path, contents)) == cpus


@pytest.mark.parametrize(
    ("granted", "wanted"), [(None, CPUS), (0.5, 1), (1.9, 1), (1e6, CPUS), (float(CPUS), CPUS)]
)
def test_default_is_what_affinity_and_quota_leave(monkeypatch, granted, wanted):
    monkeypatch.setattr(threads, "quota", lambda: granted)
    assert threads.default() == wanted == threads.check(None)


def test_default_respects_affinity():
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); " + (
        "from cnn_engine.devices import threads; print(threads.default())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "1\n"


# ---- that they come ----

#: Runs one pass, waits until its threads are asleep, runs another: prints how many threads the first one
#: started, and whether those were given a CPU once more, sooner or later.
COMING = """
import os, time
import numpy as np
from test_threads import Call, build
from cnn_engine import _cpu

def tasks():
    return {int(name) for name in os.listdir("/proc/self/task")}

def slices():
    return sum(int(open(f"/proc/self/task/{i}/schedstat").read().split()[2]) for i in workers)

def asleep():
    return all(open(f"/proc/self/task/{i}/stat").read().split()[2] == "S" for i in workers)

def becomes(true):
    end = time.monotonic() + 20
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.02)
    return found

def fused():
    return Call(build(), 64, 2)

def layered():
    shape = _cpu.Conv2dShape(64, 3, 32, 32, 16, 5, 5, 1, 1, 2, 2)
    x, w, y = (np.zeros(n, np.float32) for n in (64 * 3072, 1200, 64 * 16384))
    arguments = x.ctypes.data, w.ctypes.data, 0, y.ctypes.data, shape, _cpu.Conv2dVariant.direct, True
    return lambda: (_cpu.conv2d(*arguments, 2), x, w, y)  # which live as long as the call

call = {kind}()
before = tasks()
call()
workers = tasks() - before
time.sleep(0.1)
assert becomes(asleep)
before = slices()
call()
print(len(workers), becomes(lambda: slices() > before))
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@several_cpus
@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="no schedstat here")
@pytest.mark.parametrize("kind", ["fused", "layered"])
def test_two_threads_are_two_and_wake_up(kind):
    result = python(COMING.replace("{kind}", kind))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "1 True\n"


def test_python_goes_on_while_a_pass_runs():
    """The interpreter's lock is given back: another thread counts on in the middle of a pass."""
    call = Call(build(), 400, 1)
    stop = threading.Event()
    count = 0

    def counting() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1
            time.sleep(0)  # what it counts are its turns

    switch = sys.getswitchinterval()
    sys.setswitchinterval(100)  # nobody is made to give the lock back
    counter = threading.Thread(target=counting)
    counter.start()
    gained = 0
    try:
        for _ in range(1000):  # a pass that keeps the lock never gives a turn; one that does, soon
            before = count
            call()
            gained = max(gained, count - before)
            if gained > 10:
                break
    finally:
        stop.set()
        sys.setswitchinterval(switch)
        counter.join()
    assert gained > 10


# ---- callers at once, children, exits ----


def test_several_callers_at_once():
    fused = build()
    calls = [Call(fused, count, workers) for count in (1, 9, 3) for workers in (1, 2)]
    wanted = [call().copy() for call in calls]
    failures = []

    def work() -> None:
        own = [Call(fused, len(call.images), call.arguments[-1]) for call in calls]
        for _ in range(20):
            for call, right in zip(own, wanted, strict=True):
                call.out.fill(-1)
                if not (call() == right).all():
                    failures.append(call.arguments)

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def test_a_busy_pool_drops_no_work():
    """Layered operators, whose loops share a pool that a long pass of another thread has taken."""
    long = Call(build(), 2000, max(CPUS, 2))
    size = 200_000
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    shape = _cpu.ElementwiseShape(size, 4)
    busy = threading.Thread(target=lambda: [long() for _ in range(3)])
    busy.start()
    checks = 0
    while busy.is_alive() or not checks:
        y = np.full(size, np.nan, np.float32)
        _cpu.relu(x.ctypes.data, y.ctypes.data, shape, max(CPUS, 2))
        np.testing.assert_array_equal(y, np.maximum(x, 0))
        checks += 1
    busy.join()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_its_own_threads():
    call = Call(build(), 3, 2)
    wanted = call().copy()
    child = os.fork()
    if child == 0:
        call.out.fill(-1)
        right = (call() == wanted).all()
        came, until = set(), time.monotonic() + 10
        while 1 not in came and time.monotonic() < until:
            _cpu.on_threads(2, lambda index: (came.add(index), time.sleep(0.01)))
        os._exit(0 if right and 1 in came else 1)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(call(), wanted)


#: Forks again and again while other threads are in the middle of passes; a child that hangs is killed.
FORKING = """
import os, signal, sys, threading, warnings
from test_threads import Call, build
warnings.simplefilter("ignore")
fused = build()
wanted = Call(fused, 5, 2)().copy()
stop = False

def work():
    call = Call(fused, 5, 2)
    while not stop:
        call()

callers = [threading.Thread(target=work) for _ in range(2)]
for caller in callers:
    caller.start()
bad = 0
for _ in range(40):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if all((Call(fused, 5, 2)() == wanted).all() for _ in range(3)) else 1)
    bad += os.waitpid(child, 0)[1] != 0
stop = True
for caller in callers:
    caller.join()
print(bad)
"""


def test_a_child_forked_in_the_middle_of_passes():
    result = python(FORKING)
    assert result.stdout == "0\n", result.stderr


LEAVING = """
import sys, threading, time
import cnn_engine
from test_threads import pixels
engine = cnn_engine.Engine("cifar10", weights="random", device="cpu", variant=sys.argv[1], threads=2)
images = pixels(int(sys.argv[2]))
engine.predict(images)

def work():
    engine = cnn_engine.Engine("cifar10", weights="random", device="cpu", variant=sys.argv[1], threads=2)
    started.release()
    while True:
        engine.predict(images)

started = threading.Semaphore(0)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
    started.acquire()
time.sleep(0.05)
"""


@pytest.mark.parametrize("variant", ["fused", "pad"])
@pytest.mark.parametrize("count", [1, 50])
def test_an_interpreter_ends_while_daemon_threads_predict(variant, count):
    result = python(LEAVING, variant, str(count))
    assert (result.returncode, result.stderr) == (0, "")


#: As above, with images taken apart over two threads: the bodies of those are Python, where threads lose the
#: interpreter's lock again and again.
LEAVING_APART = """
import sys, threading, time
import numpy as np
from cnn_engine import Engine
from graphs import Builder

def network():
    b = Builder((1, 3, 20, 20))
    x = b.relu(b.conv("images", 16, stride=2))
    x = b.relu(b.conv(b.relu(b.conv(x, 16)), 48, stride=4))
    return b.graph(b.head(b.relu(b.conv(x, 160)), 10))

images = np.random.default_rng(0).normal(size=(8, 3, 20, 20)).astype(np.float32)
sys.setswitchinterval(1e-5)

def work():
    engine = Engine(network(), device="cpu", threads=2)
    engine.predict(images)
    started.release()
    while True:
        engine.predict(images)

started = threading.Semaphore(0)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
    started.acquire()
time.sleep(0.02)
"""


def test_an_interpreter_ends_while_daemon_threads_take_images_apart():
    result = python(LEAVING_APART)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_interpreter_ends_while_a_daemon_thread_calls_python_from_a_kernels_loop():
    code = (
        "import threading, time\n"
        "from cnn_engine import _cpu\n"
        "def body(index):\n"
        "    while index == 0:\n"
        "        time.sleep(0.001)\n"
        "threading.Thread(target=_cpu.on_threads, args=(2, body), daemon=True).start()\n"
        "time.sleep(0.1)\n"
    )
    result = python(code)
    assert (result.returncode, result.stderr) == (0, "")


# ---- what a thread brings along ----

#: FTZ, DAZ and rounding towards zero: what a thread of another library may compute in.
MXCSR = 0x1F80 | 0x8040 | 0x6000


class Mode:
    """Reads and writes the calling thread's MXCSR, by five bytes of machine code each."""

    def __init__(self) -> None:
        code = b"\x0f\xae\x1f\xc3\x0f\xae\x17\xc3"  # stmxcsr [rdi]; ret; ldmxcsr [rdi]; ret
        self._memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._memory.write(code)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._store, self._load = kind(start), kind(start + 4)

    def get(self) -> int:
        word = ctypes.c_uint32()
        self._store(ctypes.addressof(word))
        return word.value & ~0x3F  # without what has happened

    def set(self, value: int) -> None:
        word = ctypes.c_uint32(value)
        self._load(ctypes.addressof(word))


x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="MXCSR is x86's")


@x86
def test_results_do_not_depend_on_a_threads_floating_point_mode():
    """A kernel, a whole network, and a body that the pool's threads run; the caller's mode is kept."""
    mode, call = Mode(), Call(build(), 7, 2)
    x = np.geomspace(1e-42, 3e-38, 64, dtype=np.float32)

    def results() -> list[bytes]:
        y = np.empty_like(x)
        _cpu.unary(x.ctypes.data, y.ctypes.data, 64, _cpu.UnaryFunction.gelu_tanh, 1.0, 0.0, 1)
        lanes = np.empty((2, 64), np.float32)
        modes: dict[int, int] = {}

        def body(index: int) -> None:
            modes[index] = mode.get()
            at = lanes[index].ctypes.data
            _cpu.unary(x.ctypes.data, at, 64, _cpu.UnaryFunction.gelu_tanh, 1.0, 0.0, 1)
            until = time.monotonic() + 10
            while len(modes) < 2 and time.monotonic() < until:
                time.sleep(0.001)

        _cpu.on_threads(2, body)
        assert modes == {0: 0x1F80, 1: 0x1F80}
        return [y.tobytes(), lanes.tobytes(), call().tobytes()]

    usual = results()
    mode.set(MXCSR)
    try:
        found, after = results(), mode.get()
    finally:
        mode.set(0x1F80)
    assert found == usual
    assert after == MXCSR


@x86
def test_what_numpy_computes_beside_kernels_is_in_the_usual_mode():
    """Constants that are folded as a file is read, and a node that NumPy runs in the place of a kernel."""
    from onnx import TensorProto, helper, numpy_helper

    from cnn_engine import Engine

    small = {"a": np.full(4, 1e-30, np.float32), "b": np.full(4, 1e-9, np.float32)}
    nodes = [
        helper.make_node("Mul", ["a", "b"], ["c"]),
        helper.make_node("Add", ["x", "c"], ["folded"]),
        helper.make_node("Mod", ["x", "b"], ["left"], fmod=1),
    ]
    names = ("folded", "left")
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in names],
        [numpy_helper.from_array(array, name) for name, array in small.items()],
    )  # fmt: skip
    file = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    x = {"x": np.array([0, 1e-40, 3e-39, 1e-38], np.float32)}
    mode = Mode()
    usual = Engine(file, device="cpu", threads=1).run(x)
    mode.set(MXCSR)
    try:
        found = Engine(file, device="cpu", threads=1).run(x)
        after = mode.get()
    finally:
        mode.set(0x1F80)
    assert after == MXCSR
    assert usual["folded"][0] > 0
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in usual.items()
    }


@x86
def test_a_pool_made_in_another_mode_is_as_any():
    result = python(
        "from test_threads import *; Mode().set(MXCSR)\n"
        "test_results_do_not_depend_on_a_threads_floating_point_mode()"
    )
    assert result.returncode == 0, result.stderr


#: A thread that is pinned to one CPU makes the pool; then the process is pinned, and let free again.
PINNED = """
import os, threading, time
from cnn_engine import _cpu

def where():
    seen = {}
    def body(index):
        seen[index] = sorted(os.sched_getaffinity(0))
        until = time.monotonic() + 10
        while len(seen) < 2 and time.monotonic() < until:
            time.sleep(0.001)
    _cpu.on_threads(2, body)
    return seen

def pinned():
    os.sched_setaffinity(0, one)
    assert where() == {0: sorted(one), 1: sorted(all_of_them)}

all_of_them = os.sched_getaffinity(0)
one = {max(all_of_them)}
failed = []
threading.excepthook = failed.append
thread = threading.Thread(target=pinned)
thread.start()
thread.join()
assert not failed, failed
for cpus in (one, all_of_them):
    os.sched_setaffinity(0, cpus)
    time.sleep(0.15)
    where()
    assert where() == dict.fromkeys(range(2), sorted(cpus)), cpus
"""


@several_cpus
def test_threads_run_wherever_the_process_may():
    result = python(PINNED)
    assert result.returncode == 0, result.stderr


# ---- memory ----


class Mallinfo(ctypes.Structure):
    """C's ``struct mallinfo2``: ten sizes."""

    _fields_ = tuple((f"size{index}", ctypes.c_size_t) for index in range(10))


def allocated() -> int:
    """Bytes that the C library has given out and not got back."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("no mallinfo2 here")
    library.mallinfo2.restype = Mallinfo
    found = library.mallinfo2()
    return found.size4 + found.size7  # mapped, and in the heap


def test_memory_does_not_grow_with_the_batches_seen():
    fused = build()
    images, out = pixels(300), np.empty((300, 10), np.float32)

    def pass_over(count: int, workers: int) -> None:
        fused.run(images.ctypes.data, True, count, out.ctypes.data, workers)

    for count in (1, 2, 3, 300):
        pass_over(count, 2)
    before = allocated()
    for count in range(1, 301):
        for workers in (1, 2):
            pass_over(count, workers)
    assert allocated() - before < 100_000  # a pass's own memory is 338 KB
