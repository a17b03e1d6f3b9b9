"""Submissions and files that attack what judges and compiles them: nothing happens, or one line."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import hostile_kernels
import pytest
from process_trees import gone

from cnn_engine import InputError
from cnn_engine.io import sandbox
from cnn_engine.kernel import cases, check
from cnn_engine.kernel.process import Limits
from cnn_engine.kernels.user import cpp

HERE = Path(__file__).resolve().parent
FOLDERS = os.pathsep.join([str(HERE), str(HERE.parent / "helpers")])
LIMITS = Limits(seconds=3.0, memory=2 << 30, compile_s=60.0)

#: A program that says what confines it.
SAYS = [sys.executable, "-c", f"import os; print(os.environ[{sandbox.LAYERS!r}])"]


def layers() -> set[str]:
    found = sandbox.run(SAYS, sandbox.Confinement(), 30, 1000)
    return set(found.stdout.decode().strip().split(","))


@pytest.fixture(scope="module", autouse=True)
def _all_layers():
    """An attack that succeeds would end more than the test."""
    if missing := {"limits", "namespaces", "Landlock", "seccomp"} - layers():
        pytest.skip(f"this system does not offer {', '.join(sorted(missing))}")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CNN_ENGINE_KERNEL_CACHE", str(tmp_path / "cache"))


def finding(path, limits=LIMITS):
    few = [case for case in cases.grid("relu") if case.label != "large"][:2]
    try:
        return check.check(str(path), threads=1, limits=limits, cases=few, time=False).fault
    except InputError as error:
        return str(error)


def children(marker: str) -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                words = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace")
                if marker in words:
                    found.append(words)
    return found


#: Of a process that judges, so that one which an attack ends is not the tests' own.
JUDGE = """
import ctypes, os, sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(os.pathsep)
import hostile_kernels, test_kernel_sandbox
secret = ctypes.create_string_buffer(b"secret")
text = hostile_kernels.probing(
    list(hostile_kernels.PROBES), judge=os.getpid(), secret=ctypes.addressof(secret), victim=sys.argv[3]
)
Path(sys.argv[2]).write_text(text)
print("found:", test_kernel_sandbox.finding(sys.argv[2]))
"""


def test_a_kernel_that_attacks_its_judge_does_nothing(tmp_path):
    """It is right, so it passes; exit(100 + n) says that the nth attack succeeded."""
    path, victim = tmp_path / "hostile.cpp", tmp_path / "victim"
    victim.write_text("mine")
    done = subprocess.run(
        [sys.executable, "-c", JUDGE, FOLDERS, str(path), str(victim)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "found: None"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == [
        "hostile.cpp",
        "victim",
    ]
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", hostile_kernels.ENDS)
def test_a_kernel_that_ends_its_trial_gets_a_line(name, tmp_path):
    statements, says = hostile_kernels.ENDS[name]
    path = tmp_path / "hostile.cpp"
    path.write_text(hostile_kernels.cpp(statements))
    line = finding(path)
    assert line, "it passed"
    assert says in line
    assert "\n" not in line
    assert not children(str(path))


@pytest.mark.parametrize("name", hostile_kernels.COMPILERS)
def test_a_file_that_attacks_the_compiler_gets_a_line(name, tmp_path, monkeypatch):
    monkeypatch.setattr(cpp, "MOST_MEMORY", 1 << 30)
    text, says = hostile_kernels.COMPILERS[name]
    path = tmp_path / "hostile.cpp"
    path.write_text(text + hostile_kernels.templates.text("relu", "cpu", path.name))
    begin = time.monotonic()
    # What ends by what it says must not end by the time that a busy machine takes.
    line = finding(path, Limits(seconds=3.0, compile_s=60.0 if says else 6.0))
    assert time.monotonic() - begin < 90
    assert line, "it compiled"
    assert says in line
    assert "\n" not in line
    assert not children(str(path))


def test_a_board_keeps_what_it_has(tmp_path):
    """Ended in the midst of it, the board so far is there, and what was started has ended too."""
    files = []
    for name in ("first.cpp", "second.cpp"):
        files.append(tmp_path / name)
        files[-1].write_text(hostile_kernels.templates.text("conv2d", "cpu", name))
    board = tmp_path / "board.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "cnn_engine.kernel", "rank", *map(str, files), "--network", "ece408",
         "--batch", "1", "--calls", "500", "--rounds", "100", "--json", str(board), "--quiet"],
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not board.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        found = json.loads(board.read_text())
        started = sandbox._tree(process.pid)[1:]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert found["complete"] is False
    assert {entry["name"] for entry in found["entries"]} == {"first.cpp", "second.cpp"}
    assert any(entry["processes"] for entry in found["entries"])
    assert gone(started)


# ---- the sandbox itself ----


def run(code: str, seconds: float = 30, most_output: int = 1000, **may) -> sandbox.Completed:
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return sandbox.run(words, sandbox.Confinement(**may), seconds, most_output)


@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise SystemExit(7)", 7),
                                              ("import os; os.abort()", -signal.SIGABRT)])  # fmt: skip
def test_a_program_ends_as_it_would_without(code, status):
    assert run(code).returncode == status


def test_memory_and_files_are_limited(tmp_path):
    assert b"MemoryError" in run("bytearray(1 << 30)", memory=1 << 29).stderr
    file = tmp_path / "file"
    code = f"open({str(file)!r}, 'wb').write(bytes(3 << 20))"
    assert run(code).returncode != 0
    assert not file.exists()
    assert run(code, writable=(str(tmp_path),), file_bytes=1 << 20).returncode != 0
    assert file.stat().st_size == 1 << 20
    assert run(code, writable=(str(tmp_path),)).returncode == 0


def test_time_and_output_are_limited_and_nothing_is_left():
    marker = f"cnn-engine-test-{os.getpid()}"
    code = f"""
        import subprocess, sys
        for _ in range(5):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "{marker}"])
    """
    with pytest.raises(sandbox.TooLong):
        run(code + "    \n        while True: pass", seconds=2, processes=True)
    assert not children(marker)
    with pytest.raises(sandbox.TooMuch):
        run("while True: print('more')")
    run(code, processes=True)  # it ends, and those that it left with it
    assert not children(marker)


def leaving(marker: str, end: str) -> list[str]:
    """Returns a command that starts three processes which leave its session and lose their parents."""
    code = f"""
        import os, sys, time
        words = [sys.executable, "-c", "import time; time.sleep(600)", "{marker}"]
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execv(words[0], words)
                time.sleep(600)
        {end}
    """
    return [sys.executable, "-c", textwrap.dedent(code)]


@pytest.mark.parametrize("started", [1, 3], ids=["while it starts them", "all started"])
def test_without_layers_a_tree_ends_whole(started):
    """By looking for descendants, also of those that left the session and lost their parent."""
    marker = f"cnn-engine-test-{os.getpid()}"
    with sandbox.guarded():
        words = leaving(marker, "time.sleep(600)")
        process = sandbox.start(words, sandbox.Confinement(filtered=False))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if sum("time.sleep(600)\0" in found for found in children(marker)) >= started:
                break
            time.sleep(0.005)
        else:
            pytest.fail(f"{started} processes expected, found {children(marker)}")
        sandbox.end(process)
    assert not children(marker)


def test_without_layers_a_command_that_ends_leaves_nothing():
    marker = f"cnn-engine-test-{os.getpid()}"
    with sandbox.guarded():
        words = leaving(marker, "sys.exit(3)")
        process = sandbox.start(words, sandbox.Confinement(filtered=False))
        assert process.wait(60) == 3
        assert not children(marker)
        sandbox.end(process)


#: Chains of processes: each starts the next one and ends, sooner than anyone finds it. Four, so that they do
#: not use up the machine's process numbers.
CHAINS = r"""
#include <ctime>
#include <unistd.h>

int main() {
  const time_t end = time(nullptr) + 120;
  for (int i = 0; i < 4; ++i)
    if (fork() == 0)
      for (;;)
        if (fork() > 0 || time(nullptr) > end) _exit(0);
}
"""


def test_without_layers_chains_of_processes_end_too(tmp_path):
    source, program = tmp_path / "chains.cpp", tmp_path / "chains"
    source.write_text(CHAINS)
    subprocess.run([cpp.compiler(), "-O1", "-o", str(program), str(source)], check=True)
    free = sandbox.Confinement(filtered=False, processes=True)
    with sandbox.guarded():
        assert sandbox.run([str(program)], free, 100, 1000).returncode == 0
        assert not children(str(program))


def test_what_judges_is_out_of_reach_while_it_judges():
    libc = ctypes.CDLL(None)
    before = libc.prctl(3, 0, 0, 0, 0)
    with sandbox.guarded(), sandbox.guarded():
        assert libc.prctl(3, 0, 0, 0, 0) == 0
    assert libc.prctl(3, 0, 0, 0, 0) == before


def test_a_report_says_what_confined_the_kernel(tmp_path):
    path = tmp_path / "right.cpp"
    path.write_text(hostile_kernels.templates.text("relu", "cpu", path.name))
    found = check.check(str(path), threads=1, cases=cases.grid("relu")[:1], time=False)
    assert set(found.to_dict()["sandbox"]) == layers()
