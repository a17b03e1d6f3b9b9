"""What the tests share: real data where it is, a CUDA device where there is one, and guard bands."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import browser as browsers
import fake_cuda
import hypothesis
import numpy as np
import pytest
from machine_lock import turn

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.measure import step_times, timing

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# A shell's background job ignores Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("CNN_ENGINE_TEST_DATA", ROOT.parent / "shared" / "data"))


#: Seconds of runs of no given length, and of looks into their steps: most tests look at reports, not times.
SHORT_RUNS = ((timing, "LEAST_S", 0.02), (timing, "CAP_S", 0.3), (step_times, "CAP_S", 0.05))
#: Folders and files whose tests look at times.
OF_TIMES = {"measure", "test_compare.py", "test_tables.py"}


def gpu_missing() -> str | None:
    """Why the tests marked ``gpu`` cannot run here, or None."""
    reason = cuda_module.unavailable()
    if reason is None:
        try:
            import cupy  # noqa: F401
        except ImportError as error:
            reason = f"CuPy: {error}"
    return reason


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests marked ``gpu`` where there is no GPU: thousands of skips would take half a minute."""
    if gpu_missing():
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if reason := gpu_missing():
        terminalreporter.write_line(f"tests marked gpu were left out: needs a GPU: {reason}")


@pytest.hookimpl(
    wrapper=True, tryfirst=True
)  # around the test's timeout, which does not count waiting
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    marks = {mark.name for mark in item.iter_markers()}
    with turn(alone="alone" in marks and "skip" not in marks):
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def short_runs(request) -> Iterator[None]:
    """Ends runs of no given length soon, where times are not what a module tests."""
    with pytest.MonkeyPatch.context() as patch:
        if not OF_TIMES & {request.path.parent.name, request.path.name}:
            for module, name, seconds in SHORT_RUNS:
                patch.setattr(module, name, seconds)
        yield


@pytest.fixture(scope="session")
def test_data():
    """Returns a function from a name under the test data to its path; skips where it is absent."""

    def find(name: str) -> Path:
        path = DATA / name
        if not path.exists():
            pytest.skip(f"needs {name} in {DATA} (set CNN_ENGINE_TEST_DATA)")
        return path

    return find


@pytest.fixture(params=_cpu.instruction_sets())
def instruction_set(request):
    """Every instruction set of this CPU in turn."""
    selected = _cpu.selected_instruction_set()
    _cpu.select_instruction_set(request.param)
    yield request.param
    _cpu.select_instruction_set(selected)


@pytest.fixture
def torchvision():
    """Returns torchvision, also where its wheel lacks its compiled operators; skips where it is absent."""
    pytest.importorskip("torch")
    from benchmarks.models_worker import ignore_compiled_operators

    ignore_compiled_operators()
    return pytest.importorskip("torchvision")


@pytest.fixture(scope="session")
def browser() -> Iterator[browsers.Browser]:
    """A headless Chromium; skips where there is none."""
    with browsers.start() as started:
        yield started


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory) -> Path:
    """Where screenshots are kept."""
    folder = os.environ.get(browsers.ARTIFACTS)
    if folder is None:
        return tmp_path_factory.mktemp("artifacts")
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> Device:
    """Every device in turn: how a test makes arrays there and gets them back."""
    return Device(request.param)


class Device:
    """Puts NumPy arrays on a device, inside guard bands, and brings them back."""

    GUARD = 64  # elements before and after
    POISON = np.float32(-7.25e22)  # what nothing computes

    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "cuda":
            import cupy

            self.library = cupy
        else:
            self.library = np

    def put(self, array: np.ndarray | None, dtype=np.float32):
        """Returns ``array`` on the device; None stays None."""
        return None if array is None else self.library.asarray(np.ascontiguousarray(array, dtype))

    def get(self, array) -> np.ndarray:
        """Returns ``array`` in host memory, when it is complete."""
        return array if self.kind == "cpu" else self.library.asnumpy(array)

    def guarded(self, shape: tuple[int, ...]):
        """Returns an array to write into, poisoned, and the memory around it."""
        size = int(np.prod(shape))
        memory = self.library.full(size + 2 * self.GUARD, self.POISON, dtype=np.float32)
        return memory[self.GUARD : self.GUARD + size].reshape(shape), memory

    def check_guards(self, memory) -> None:
        """Asserts that nothing was written around the array and that all of it was written."""
        values = self.get(memory)
        assert (values[: self.GUARD] == self.POISON).all(), "written before the output"
        assert (values[-self.GUARD :] == self.POISON).all(), "written after the output"
        assert not (values[self.GUARD : -self.GUARD] == self.POISON).any(), "output left unwritten"


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the test's file and name, not its folder: the same numbers on every run."""
    name = f"tests/{request.node.path.name}::{request.node.nodeid.partition('::')[2]}"
    return np.random.default_rng(list(name.encode()))


@pytest.fixture
def hopper_engines(monkeypatch):
    """A GPU that is not there, whose wgmma takes all that it can, pools too."""
    fake_cuda.install_hopper(monkeypatch, pool_takes=lambda *how: True)
