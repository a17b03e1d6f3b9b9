"""A workload from outside the package: declared by an entry point, or registered by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import cnn_engine
from cnn_engine import run, workload
from cnn_engine.errors import InputError

ROOT = Path(__file__).resolve().parents[2]

#: A whole workload, as the package of somebody else would have it.
MODULE = '''
"""Which half of a small image is brighter."""

from pathlib import Path

import numpy as np

from cnn_engine import Conv2d, Dataset, Linear, MaxPool2d, Network, Relu, Softmax, Workload

NETWORK = Network(
    "halves",
    (2, 6, 8),
    (
        Conv2d("conv1", 3, kernel=3, padding=1), Relu("relu1"), MaxPool2d("pool1", 2),
        Linear("fc", 2), Softmax("softmax"),
    ),
)


def load_data(spec, images):
    count = 10 if images is None else images
    pixels = np.random.default_rng(0).integers(0, 256, (count, 2, 6, 8), dtype=np.uint8)
    halves = pixels.reshape(count, 12, 2, 4).sum(axis=(1, 3), dtype=int)
    return Dataset("halves", spec, pixels, halves.argmax(axis=1).astype(np.uint8))


def report_lines(result):
    return [f"Half-time: {result.accuracy.correct} of {result.accuracy.total}"]


WORKLOAD = Workload(NETWORK, load_data, Path(__file__).with_name("halves.safetensors"), report_lines)
'''

METADATA = "Metadata-Version: 2.1\nName: halves\nVersion: 1.0\n"
ENTRY_POINTS = "[cnn_engine.workloads]\nhalves = halves:WORKLOAD\n"


@pytest.fixture
def package(tmp_path):
    """A folder as pip would leave it: a module, its weights, and its metadata."""
    (tmp_path / "halves.py").write_text(MODULE)
    info = tmp_path / "halves-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    network = cnn_engine.Network(
        "halves",
        (2, 6, 8),
        (
            cnn_engine.Conv2d("conv1", 3, kernel=3, padding=1),
            cnn_engine.MaxPool2d("pool1", 2),
            cnn_engine.Linear("fc", 2),
        ),
    )
    save_file(network.random_weights(1), tmp_path / "halves.safetensors")
    return tmp_path


@pytest.mark.parametrize("variant", ["if", "pad"])
def test_by_entry_point_in_a_process_of_its_own(package, variant):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])}
    arguments = ["--network", "halves", "--device", "cpu", "--images", "7", "--variant", variant]
    process = subprocess.run(
        [sys.executable, "-m", "cnn_engine.run", *arguments, "--json", str(package / "out.json")],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    result = json.loads((package / "out.json").read_text())
    assert result["network"] == "halves"
    assert result["weights"] == "default"
    assert result["dataset"] == {"name": "halves", "source": "auto", "images": 7}
    assert result["check"]["passed"]
    correct = result["accuracy"]["correct"]
    assert f"Half-time: {correct} of 7" in process.stdout.splitlines()
    names = [layer["name"] for layer in result["layers"]]
    assert [name for name in names if name not in ("normalize", "pad1")] == [
        "conv1", "relu1", "pool1", "fc", "softmax",
    ]  # fmt: skip


def test_help_lists_it(package, monkeypatch, capsys):
    monkeypatch.syspath_prepend(package)
    assert "halves" in workload.names()
    assert run.main(["--help"]) == 0
    assert "halves" in capsys.readouterr().out


def test_by_registration(monkeypatch, capsys):
    monkeypatch.setattr(workload, "_registered", {})
    network = cnn_engine.Network(
        "specks", (1, 2, 2), (cnn_engine.Linear("fc", 3), cnn_engine.Softmax("softmax"))
    )

    def load_data(spec: str, images: int | None) -> cnn_engine.Dataset:
        return cnn_engine.Dataset("specks", spec, np.zeros((images or 4, 1, 2, 2), np.uint8))

    specks = cnn_engine.Workload(network, load_data)
    cnn_engine.register(specks)
    cnn_engine.register(specks)  # again: no harm
    arguments = ["--network", "specks", "--device", "cpu", "--weights", "random"]
    assert run.main([*arguments, "--images", "3"]) == 0
    assert "CNN for 3 images" in capsys.readouterr().out
    assert run.main(["--network", "specks", "--device", "cpu"]) == 0
    assert "specks comes without any, and runs on random ones" in capsys.readouterr().err
    with pytest.raises(InputError, match="expected a new name, found 'specks' registered already"):
        cnn_engine.register(cnn_engine.Workload(network, load_data))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        InputError, match="network: expected one of .*cifar10.*ece408.*, found 'none'"
    ):
        workload.get("none")


def test_engine_runner_and_reports_know_no_workload_by_name():
    """But for the registry, and the default of the command line and of ``Engine``."""
    allowed = {
        ("workload.py", 'WORKLOAD",'),
        ("shared_options.py", "cifar10"),
        ("interrupts.py", "_OURS"),
    }
    allowed |= {("engine.py", '= "cifar10",')}
    allowed |= {("workload.py", f'"{name}": "') for name in workload.OTHER_NAMES}
    allowed |= {("download.py", '"cnn_engine.workloads.'), ("download.py", "OTHER_NAMES")}
    package = ROOT / "cnn_engine"
    folders = ("devices", "engine", "graph", "measure", "operators", "report")
    for path in (*package.glob("*.py"), *(p for f in folders for p in (package / f).rglob("*.*"))):
        if path.suffix not in (".py", ".html"):
            continue
        for line in path.read_text().splitlines():
            if any(name in line.lower() for name in ("cifar10", "ece408", "fashion_mnist")):
                assert any(path.name == file and text in line for file, text in allowed), (
                    path,
                    line,
                )
