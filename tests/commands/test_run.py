"""The command line, as a user meets it: in a process of its own, or called where that is slow."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cnn_engine.workloads.cifar10 import WORKLOAD

import cnn_engine
from cnn_engine import __main__, interrupts, run
from cnn_engine.graph import reference
from cnn_engine.operators import softmax

JSON_KEYS = {
    "schema", "command", "environment", "network", "weights", "dataset", "device", "variant",
    "reduction", "dtype", "data_mode", "batch", "threads", "accuracy", "check", "phases", "layers",
    "copies", "latency_ms", "throughput_images_per_s",
}  # fmt: skip
PHASES = {
    "load_data_s", "create_network_s", "load_parameters_s", "create_outputs_s", "forward_s",
    "accuracy_s", "free_memory_s", "total_s",
}  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--weights", "random", "--data", "synthetic", "--images", "6"]


@pytest.fixture(autouse=True)
def no_data_of_the_users_own(monkeypatch, tmp_path):
    monkeypatch.delenv("CNN_ENGINE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def start(*arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "cnn_engine.run", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def test_with_no_options_on_a_machine_without_data():
    process = start("--device", "cpu", "--images", "20")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    for line in (
        "fused, chosen by auto", "CNN for 20 images", "Load Data time", "Create Network time",
        "Load Network Parameters time", "Create Outputs time", "Net Forward total time",
        "Time for network", "Conv:", "ReLU:", "Pool:", "FC:", "Softmax:",
        "Net Accuracy", "Free memory time", "Total time",
        "synthetic", "cnn-engine download cifar10",
    ):  # fmt: skip
        assert line in out


def test_real_data_from_the_command_line(capsys, test_data):
    code = run.main(
        ["--weights", str(test_data("convnetjs-cifar10")), "--data", str(test_data("cifar-10-batches-bin")),
         "--images", "1102", "--variant", "pad", "--reduction", "--device", "cpu", "--batch", "100"]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    assert "Net Accuracy: 78.49 %" in out
    assert "865" in out


def test_json_on_standard_output_is_the_document_alone(capsys):
    assert run.main([*SMALL, "--json", "-", "--batch", "2", "--variant", "if"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) >= JSON_KEYS
    assert set(document["phases"]) == PHASES
    assert document["schema"] == 1
    assert document["accuracy"] is None
    assert document["dataset"]["images"] == 6
    assert document["variant"] == "if"
    assert document["copies"] == []
    assert all(
        phase is not None for name, phase in document["phases"].items() if name != "accuracy_s"
    )
    assert set(document["environment"]) >= {"host", "cpu", "gpu", "driver", "versions", "commit"}
    assert set(document["check"]) >= {"reference", "images", "max_abs_diff", "top1_agreement"}
    layers = {layer["name"]: layer for layer in document["layers"]}
    assert set(layers["conv1"]) >= {"name", "kind", "calls", "host_s", "device_s", "flops", "bytes"}
    assert layers["conv1"]["calls"] == 3
    assert layers["conv1"]["device_s"] is None
    assert sum(layer["host_s"] for layer in layers.values()) < 5 * document["phases"]["forward_s"]
    latency = document["latency_ms"]
    assert (
        0 < latency["min"] <= latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
    )


def test_every_output(tmp_path, capsys):
    paths = {name: tmp_path / f"result.{name}" for name in ("json", "csv", "trace", "html", "npy")}
    options = [f"--{name}={path}" for name, path in paths.items() if name != "npy"]
    options += ["--variant", "if"]
    assert run.main([*SMALL, *options, f"--save-probabilities={paths['npy']}"]) == 0
    assert "CNN for 6 images" in capsys.readouterr().out
    document = json.loads(paths["json"].read_text())
    assert document["command"].startswith("cnn-engine run --device cpu")
    rows = list(csv.reader(io.StringIO(paths["csv"].read_text())))
    assert any("conv1" in row for row in rows)
    assert json.loads(paths["trace"].read_text())["traceEvents"]
    assert "<html" in paths["html"].read_text()
    probabilities = np.load(paths["npy"])
    dataset = WORKLOAD.load_data("synthetic", 6)
    wanted = reference.forward(WORKLOAD.network, WORKLOAD.network.random_weights(), dataset.images)
    assert np.abs(probabilities - wanted).max() < 1e-5
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == sorted(
        p.name for p in paths.values()
    )


def test_quiet_prints_nothing(capsys):
    assert run.main([*SMALL, "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


ERRORS = [
    (["--batch", "0"], "--batch: expected a whole number from 1 to"),
    (["--batch", "-3"], "--batch: expected a whole number from 1 to"),
    (["--batch", "99999999999999999999999"], "--batch: expected a whole number"),
    (["--batch", "two"], "--batch: expected a whole number from 1 to 100000000, found 'two'"),
    (["--images", "0"], "--images: expected a whole number from 1 to"),
    (["--images", "99999999"], "--images: expected 1 to 1000000 synthetic images"),
    (["--threads", "0"], "--threads: expected a whole number from 1 to 1024"),
    (["--threads", "100000"], "--threads: expected a whole number from 1 to 1024"),
    (["--warmup", "-1"], "--warmup: expected a whole number from 0"),
    (["--iterations", "0"], "--iterations: expected a whole number from 1"),
    (["--duration", "nan"], "--duration: expected a number above 0"),
    (["--duration", "0"], "--duration: expected a number above 0"),
    (["--percentiles", "50,x"], "--percentiles: expected numbers from 0 to 100"),
    (["--percentiles", "101"], "--percentiles: expected numbers from 0 to 100"),
    (["--network", "lenet"], "network: expected one of"),
    (["--variant", "fast"], "--variant: expected one of auto, if, pad, blocked, tiled, fused"),
    (["--dtype", "int3"], "--dtype: expected one of float32"),
    (["--device", "tpu"], "--device: expected auto, cpu, cuda, cuda:N, openacc or openacc:host"),
    (
        ["--data-mode", "transfer"],
        "--data-mode: expected resident on the device cpu, found transfer",
    ),
    (["--data", "/nonexistent"], "/nonexistent"),
    (
        ["--weights", "/nonexistent"],
        "--weights: expected a file or folder, found none at /nonexistent",
    ),
    (["--json", "/nonexistent/x.json"], "--json: expected an existing folder, found none"),
    (["--json", "/tmp"], "--json: expected a file to write, found a folder at /tmp"),
    (["--json", "/dev/null"], "--json: expected a file to write, found a special file"),
    (["--html", "/proc/x.html"], "--html: "),
    (["--csv", "-", "--json", "-"], "standard output: expected one option with -, found several"),
    (
        ["--csv", "x", "--json", "./x"],
        "--csv: expected a path of its own, found x, which is --json",
    ),
    (["--save-probabilities", "p.txt"], "--save-probabilities: expected a path that ends in .npy"),
    (["--speed", "11"], "unrecognized arguments: --speed 11"),
    (["--batc", "1"], "unrecognized arguments: --batc 1"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=lambda value: " ".join(value)[:40])
def test_errors_are_one_line_and_exit_with_2(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    # The last of an option given twice counts, so each case replaces what SMALL says.
    assert run.main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert list(tmp_path.iterdir()) == []


def test_cuda_without_a_gpu(capsys):
    from conftest import gpu_missing

    if gpu_missing() is None:
        pytest.skip("there is a GPU here")
    assert run.main([*SMALL, "--device", "cuda"]) == 2
    assert "error: --device cuda: expected" in capsys.readouterr().err


def test_a_failed_check_exits_with_1_and_times_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(softmax.Softmax, "reference", lambda self, x: np.full(x.shape, 0.1))
    assert run.main([*SMALL, "--json", str(tmp_path / "r.json")]) == 1
    captured = capsys.readouterr()
    assert "error: check: expected outputs within " in captured.err
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["layers"] == []
    assert document["latency_ms"] is None
    assert document["check"]["max_abs_diff"] > 1e-5


def test_no_check(capsys):
    assert run.main([*SMALL, "--no-check", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["check"] is None


#: The command, interrupted after three timed passes.
INTERRUPTED = """
import signal, sys
from cnn_engine import run
from cnn_engine.measure import timing

passes, timed = [], timing.time_passes

def interrupted(*arguments, progress, **options):
    def done(count):
        progress(count)
        passes.append(count)
        if len(passes) == 3:
            signal.raise_signal({number})
    return timed(*arguments, progress=done, **options)

timing.time_passes = interrupted
sys.exit(run.main())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_what_was_measured(tmp_path, number, code):
    path = tmp_path / "result.json"
    options = (*SMALL, "--duration", "600", "--no-check", "--json", str(path))
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(number=int(number)), *options],
        capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == code, process.stderr
    assert "Traceback" not in process.stderr
    assert "CNN for 6 images" in process.stdout
    document = json.loads(path.read_text())
    assert document["interrupted"] is True
    assert document["images_done"] == 6
    assert document["latency_ms"]["samples"] == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_leaves_signals_as_they_were(number):
    before = signal.getsignal(number)
    try:
        with interrupts.raised():
            signal.signal(number, signal.SIG_IGN)  # as an ensemble does that was interrupted
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("catches", "said"), [(False, "interrupted\n"), (True, "")], ids=["left to run", "caught"]
)
def test_ctrl_c_inside_of_an_exec_ends_with_the_code(tmp_path, catches, said):
    """Where dataclasses are made: Python would end by the signal once more."""
    caught = (
        "except KeyboardInterrupt:\n        return cli.INTERRUPTED" if catches else "finally: pass"
    )
    (tmp_path / "command.py").write_text(
        "import sys\nfrom cnn_engine import cli\ndef main(words):\n"
        f"    try:\n        exec('raise KeyboardInterrupt')\n    {caught}\n"
        "sys.exit(cli.run(main, []))\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "command"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (130, said)


def test_ctrl_c_during_imports_is_one_line():
    # A NumPy that sends the signal while it is imported.
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "numpy.py").write_text(code)
        found = subprocess.run(
            [sys.executable, "-m", "cnn_engine.run"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])},
            capture_output=True,
            text=True,
            cwd=folder,
        )
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("command", "options", "buffered"),
    [
        (".run", " ".join(SMALL), True), (".run", " ".join(SMALL), False), (".doctor", "", True),
        (".transfer", "--help", False), ("", "--help", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("output", "reason"), [(">/dev/full", "No space left"), (">&-", "Bad file descriptor")]
)
def test_output_that_cannot_be_written_is_one_line(command, options, output, reason, buffered):
    found = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m cnn_engine{command} {options} {output}"],
        env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2
    lines = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: standard output: expected to write to it, found: ")
    assert reason in lines[0]
    assert "Traceback" not in found.stderr
    assert "Exception ignored" not in found.stderr


def test_a_closed_output_does_not_matter_where_nothing_is_printed(tmp_path):
    path = tmp_path / "result.json"
    words = " ".join([*SMALL, "--quiet", "--json", str(path)])
    found = subprocess.run(["sh", "-c", f"{sys.executable} -m cnn_engine.run {words} >&-"])
    assert found.returncode == 0
    assert json.loads(path.read_text())["network"] == "cifar10"


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m cnn_engine.run {' '.join(SMALL)} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0


def test_cpu_work_does_not_import_cupy_or_the_cuda_module():
    code = (
        "import sys; from cnn_engine import run; assert run.main(sys.argv[1:]) == 0; "
        "assert 'cupy' not in sys.modules; assert 'cnn_engine._cuda' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *SMALL, "--quiet"], check=True)


def test_the_single_command(capsys):
    assert __main__.main(["run", *SMALL, "--quiet"]) == 0
    assert __main__.main([]) == 0
    assert "doctor" in capsys.readouterr().out
    assert __main__.main(["walk"]) == 2
    assert "error: expected a command (run, compare, " in capsys.readouterr().err


def test_progress_bar_on_a_terminal_only():
    """On a pseudo-terminal a long run shows a bar; the report stays on standard output."""
    import pty

    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cnn_engine.run", *SMALL, "--duration", "3", "--no-check"],
        stdout=subprocess.PIPE, stderr=slave, text=True, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)
    out, _ = process.communicate(timeout=60)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(master)
    assert b"timing passes" in shown
    assert "timing passes" not in out


@pytest.mark.gpu
@pytest.mark.parametrize("data_mode", ["resident", "transfer", "managed", "stream"])
def test_on_a_gpu(capsys, data_mode):
    arguments = ["--device", "cuda", "--data-mode", data_mode, "--json", "-", "--batch", "2"]
    arguments += ["--variant", "if"]
    assert run.main([*SMALL, *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"] == "cuda:0"
    assert document["environment"]["gpu"]
    conv = next(layer for layer in document["layers"] if layer["name"] == "conv1")
    assert 0 < conv["device_s"] < document["phases"]["forward_s"]
    assert bool(document["copies"]) == (data_mode != "managed")


@pytest.mark.parametrize("command", __main__.COMMANDS)
def test_every_command_says_its_version_and_lists_what_it_can_name(command, capsys):
    assert __main__.main([command, "--version"]) == 0
    assert capsys.readouterr().out == f"cnn_engine {cnn_engine.__version__}\n"
    if command in (
        "compare",
        "kernel",
        "inspect",
        "export",
        "download",
        "completion",
        "doctor",
        "quantize",
        "serve",
    ):
        assert __main__.main([command, "--list"]) == 2  # which takes no name of these
        return
    assert __main__.main([command, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in ("networks", "  cifar10", "  ece408", "variants", "devices"):
        assert line in lines
    assert any(line.startswith("  fused: ") for line in lines)
    assert any(line.startswith("  cpu: ") for line in lines)


@pytest.mark.parametrize(
    "command", ["run", "transfer.command", "characterize.command", "compare.command"]
)
def test_help_shows_every_default(command):
    parser = importlib.import_module(f"cnn_engine.{command}").parser()
    for action in parser._actions:
        if action.option_strings and action.nargs != 0 and action.default not in (None, [], False):
            assert "default" in action.help, action.option_strings


def test_options_that_exclude_each_other(capsys):
    assert run.main([*SMALL, "--iterations", "2", "--duration", "1"]) == 2
    assert "--duration: not allowed with argument --iterations" in capsys.readouterr().err
