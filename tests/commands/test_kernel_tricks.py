"""Published ways to fool a judge of kernels get a fault, or their work is counted in full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import honest_kernels, kernel_tricks
from cnn_engine.io import sandbox
from cnn_engine.kernel import cases, check, templates
from cnn_engine.kernel.expected import Series
from cnn_engine.kernel.sandbox import FEWEST, MOST_CALLS, ROTATED, WARM_CALLS, Trial
from cnn_engine.kernel.witness import OVERHEAD_S, PER_CALL_S, Account, Witness

#: Number -> a part of the fault, or "" where the work is counted in full, or None where the machine's
#: load says which. The benchmark runs all codings.
SOME = {
    0: "",
    10: "",  # a thread per call
    20: None,  # a detached thread works on
    41: "cheating: its process says that",  # the C library's clock overwritten
    71: "in a timed call on fresh inputs: wrong",  # caches by pointers
    110: "in a timed call on fresh inputs: wrong",  # works only when checked
    160: "out of bounds: it",  # a handler hides faults
    172: "",  # the first call of a request works for all
    181: None,  # a thread continues it while it is stopped
    191: "cheating: its process says that",  # a constructor changes the clock
    212: "out of bounds: it wrote",  # all buffers, by their descriptor
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("tricks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CNN_ENGINE_KERNEL_CACHE", str(found / "cache"))
        yield found


@pytest.mark.parametrize("number", SOME)
def test_a_trick_does_not_pay(number, folder):
    verdict = kernel_tricks.judged(kernel_tricks.submission(folder, number))
    assert not verdict.fooled
    if SOME[number] == "":
        assert verdict.fault is None
    elif SOME[number]:
        assert SOME[number] in (verdict.fault or "it passed")


def test_time_is_that_of_the_judge_where_it_is_more():
    account = Account(wall=0.1, cpu=0.3, main=0.1)
    spare = OVERHEAD_S + 10 * PER_CALL_S
    assert account.least(1, 10) == pytest.approx(0.3 - spare)  # three CPUs where one was granted
    assert account.least(4, 10) == pytest.approx(0.1 - spare)  # it slept, or another worked
    assert Account(OVERHEAD_S, 0, 0).least(1, 10) == 0
    ahead = Account(
        wall=0.1, cpu=0.1, main=0.1, unasked=0.05
    )  # a part was done while inputs were written
    assert ahead.least(4, 10) == pytest.approx(0.15 - spare)
    assert account.contradicts(0.04)
    assert not account.contradicts(0.06)


def test_no_inputs_are_used_twice_and_every_call_is_compared(folder, monkeypatch):
    """Counted where they are written to the kernel's memory, and where outputs are compared."""
    written, compared = [], []
    fill, judge = Trial.fill, Trial.judge

    def counted_fill(self, number, given, at_end):
        written.append((number, given.inputs["x"].tobytes()))
        fill(self, number, given, at_end)

    def counted_judge(self, number, given, at_end):
        compared.append(given.y.shape[0])
        assert given.allowed.shape == given.y.shape
        return judge(self, number, given, at_end)

    monkeypatch.setattr(Trial, "fill", counted_fill)
    monkeypatch.setattr(Trial, "judge", counted_judge)
    path = kernel_tricks.submission(folder, 0)
    text = path.read_text().replace(
        "case 0:\n      return work(c);", "case 0:\n      return right(c);"
    )
    path.write_text(text)
    case = kernel_tricks.CASE
    series = Series(case, 30).within("float32")
    with Trial(str(path), "cpu", 1, kernel_tricks.LIMITS) as trial:
        seconds = trial.time(series, 30)
    assert len({inputs for _, inputs in written}) == len(written) == len(compared)
    calls = len(written) - WARM_CALLS
    assert FEWEST <= len(seconds) <= 30
    assert calls % len(seconds) == 0
    assert calls // len(seconds) <= MOST_CALLS
    assert len({number for number, _ in written}) >= ROTATED
    assert compared.count(16) >= 2  # in full
    assert set(compared) == {1, 16}  # of the others one image


def test_a_kernel_is_stopped_while_nothing_is_asked(folder):
    """Also its threads: the system says so of each, once it was stopped."""
    path = kernel_tricks.submission(folder, 0)
    spins = (
        "std::thread([] { for (volatile int spin = 1; spin;) continue; }).detach(); return work(c);"
    )
    path.write_text(
        path.read_text().replace("case 0:\n      return work(c);", f"case 0:\n      {spins}")
    )
    assert spins in path.read_text()
    given = Series(kernel_tricks.CASE, 1).within("float32")[0]
    with Trial(str(path), "cpu", 1, kernel_tricks.LIMITS) as trial:
        trial.check(kernel_tricks.CASE, given)
        (process,) = sandbox.members(trial._process.process)
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        assert len(tasks) > 3
        while states := {_state(task) for task in tasks} - {"T"}:  # a signal takes its time
            assert states <= {"R", "S", "D"}


def test_what_runs_while_it_is_stopped_is_counted():
    """Whoever continues it: CPU time between two requests belongs to the next one."""
    spins = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    witness = Witness([spins.pid])
    try:
        witness.stop()
        with witness.running():
            pass
        before = witness._cpu()
        os.kill(spins.pid, signal.SIGCONT)
        while (spent := witness._cpu() - before) < 0.02:
            continue
        with witness.running() as found:
            pass
        (account,) = found
        assert account.unasked >= spent
        assert account.least(4, 1) >= spent - OVERHEAD_S - PER_CALL_S
    finally:
        witness.close()
        spins.kill()
        spins.wait()


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


#: In front of the first statement of a CUDA kernel that is right: what an earlier call left decides.
CUDA = {
    "a counter": "__device__ int calls;\n",
    "an output kept": "__device__ float kept[1 << 22];\n__device__ int have[1 << 22];\n",
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA)
def test_memory_of_a_cuda_file_does_not_pay(name, tmp_path):
    text = templates.text("relu", "cuda", "trick.cu")
    body = {
        "a counter": "if (i == 0) atomicAdd(&calls, 1);\n  if (calls > 20) return;\n",
        "an output kept": "if (have[i]) { y[i] = kept[i]; return; }\n  have[i] = 1;\n"
        "  kept[i] = x[i] < 0 ? 0.0f : x[i];\n",
    }[name]
    start = text.index('extern "C" __global__')
    store = text.index("const float", text.index("{", start))
    path = tmp_path / "trick.cu"
    path.write_text(f"{text[:start]}{CUDA[name]}{text[start:store]}{body}  {text[store:]}")
    found = check.check(str(path), cases=cases.grid("relu")[-1:])
    assert "in a timed call" in (found.fault or "it passed") or "the call before" in found.fault


@pytest.mark.parametrize("number", range(3))
def test_honest_kernels_are_accepted(number, folder):
    """Of styles that no two share; ``benchmarks.honest_kernels`` has hundreds."""
    made = honest_kernels.submissions(folder, 3, seed=0)
    assert len({style for style, _ in made}) == len(made)
    assert honest_kernels.fault(made[number][1]) is None
