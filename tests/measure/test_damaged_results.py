"""Records that commands read back, damaged: one line and exit code 2, in bounded time and memory.

A record that still makes sense after a change may be read; nothing may raise, hang or print a traceback.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import comparisons
import numpy as np
import pytest
import transfers

from cnn_engine import compare, infer, report, transfer
from cnn_engine.ensemble import command as ensemble
from cnn_engine.io import files

#: Damaged records of each reader; CNN_ENGINE_FUZZ makes them more.
RECORDS = int(os.environ.get("CNN_ENGINE_FUZZ", "40"))

VALUES = [
    None, True, False, 0, -1, 1, 2, 3.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), 10**400, 2**63,
    -(2**63), "", "x" * 1000, "\x1b[31m", "\ud800", "1", [], {}, [None], [[]], [1e308, 1e308], {"a": 1},
    [0.0] * 20, ["a"] * 3, {"schema": 1},
]  # fmt: skip


def positions(value, path=()):
    """Yields the path to everything in a document."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from positions(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 3)):
            yield from positions(value[index], (*path, index))


def damaged(document, rng: random.Random) -> str:
    """Returns a document as text, with one to three changes."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        *front, last = rng.choice([path for path in positions(document) if path])
        place = document
        for key in front:
            place = place[key]
        if rng.random() < 0.25:
            del place[last]
        elif rng.random() < 0.1 and isinstance(place[last], list):
            place[last] = place[last] * 50
        else:
            place[last] = copy.deepcopy(rng.choice(VALUES))
        if not document:
            break
    return json.dumps(document)


#: Whole files: name -> content.
WHOLE = {
    "empty": b"", "a number": b"1", "NaN": b"NaN", "a list": b"[]", "an object": b"{}", "null": b"null",
    "not UTF-8": b"\xff\xfe", "nested lists": b"[" * 200_000, "nested objects": b'{"a":' * 100_000,
    "a long number": b'{"schema": ' + b"9" * 1_000_000 + b"}", "bytes of zero": bytes(1000),
    "repeated": b'{"schema": 1}' * 2, "a lone surrogate": b'{"\\ud800": "\\ud800"}',
}  # fmt: skip


class Reader:
    """A command and the record that it reads: ``call(path)`` returns its exit code."""

    document: ClassVar[dict] = {}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "record.json"


class Compare(Reader):
    """The result of ``run --json``, as either side, and as a gate's baseline."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.good = comparisons.written(folder / "good.json", comparisons.made())
        self.document = json.loads(report.json.dumps(comparisons.made(seed=1)))
        self.turn = 0

    def call(self) -> int:
        self.turn += 1
        both = [self.good, str(self.path)]
        words = both if self.turn % 2 else both[::-1]
        gate = ["--fail-on", "5%"] if self.turn % 3 == 0 else []
        outputs = [f"--{kind}={self.folder / 'out'}.{kind}" for kind in ("json", "csv", "html")]
        return compare.main([*words, *gate, *outputs])


class Plan(Reader):
    """The report of ``infer --json``."""

    document: ClassVar[dict] = {
        "schema": 1, "kind": "inference", "images": 1000, "errors": 0, "workers": 2, "input_bytes": 10**6,
        "output_bytes": 10**5, "images_per_s": 100.0, "working_s": 10.0, "command": "infer",
        "started": "2024-01-01T00:00:00+00:00", "device_name": "CPU", "hosts": ["here"],
        "environment": {"cpu": "a processor", "commit": None},
        "ceilings": {"read": {"images_per_s": 200.0}}, "bound_by": None, "busiest_stage": None,
    }  # fmt: skip

    def call(self) -> int:
        return infer.main(["--plan", "1e6", "--rate-from", str(self.path)])


class Predict(Reader):
    """``regression.json`` of ``transfer``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        batches = np.arange(1, 40)
        transfers.write_raw(folder / "raw", transfers.two_pieces, batches, noise=0.002)
        self.output = folder / "out"
        assert (
            transfer.main(
                [
                    "--organize",
                    str(folder / "raw"),
                    "--output",
                    str(self.output),
                    "--no-plot",
                    "--quiet",
                ]
            )
            == 0
        )
        (self.path,) = self.output.rglob("regression*.json")
        self.document = json.loads(self.path.read_text())

    def call(self) -> int:
        return transfer.main(["--output", str(self.output), "--predict", "10,60"])


class Machine(Reader):
    """``machine.json`` beside raw files of ``transfer``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.raw = folder / "raw"
        network = transfers.write_raw(self.raw, transfers.two_pieces, np.arange(1, 12), noise=0.002)
        self.path = network.parent / "machine.json"
        peak = {way: {"bytes": 1 << 28, "seconds": [0.01, 0.011, 0.012]} for way in ("h2d", "d2h")}
        self.document = {
            "schema": 1, "environment": {"gpu": "NVIDIA H200", "host": "here"}, "peak": peak, "machines": [],
        }  # fmt: skip

    def call(self) -> int:
        words = ["--organize", str(self.raw), "--output", str(self.folder / "out")]
        return transfer.main([*words, "--no-plot"])


class Network(Machine):
    """``network.json`` of one network's raw files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = self.path.parent / "cifar10" / "network.json"
        self.document = {"schema": 1, "shape": [3, 32, 32], "image_bytes": 12288, "weight_bytes": 1000,
                         "network": "cifar10"}  # fmt: skip


class Collect(Reader):
    """The reports that ``ensemble --collect`` puts into a table."""

    document: ClassVar[dict] = {
        "kind": "ensemble", "work": "run", "design": "all-shared", "ranks": 1, "members": ["a"],
        "preprocessors": 1, "batch": 10, "data": {"name": "synthetic"}, "images": 100,
        "throughput_images_per_s": 10.0, "seconds": 10.0, "start_up_s": 1.0, "bound_by": "members",
        "core_s": {"preprocessing": 1.0, "processes": 2.0, "machines": 3.0}, "environment": {"commit": "a"},
        "rank_reports": [{"usage": {"cores": [[1.0, 2.0]]}}], "interrupted": False,
    }  # fmt: skip

    def call(self) -> int:
        return ensemble.main(["--collect", str(self.folder), "--output", str(self.folder)])


READERS = [Compare, Plan, Predict, Machine, Network, Collect]


@pytest.fixture(params=READERS, ids=lambda kind: kind.__name__)
def reader(request, tmp_path):
    return request.param(tmp_path)


def expect(reader, capsys, codes=(0, 1, 2)) -> None:
    capsys.readouterr()
    code = reader.call()
    error = capsys.readouterr().err
    assert code in codes
    if code == 2:
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert error.strip().isprintable()
        assert len(error) < 4000


def test_a_record_that_is_whole_is_read(reader, capsys):
    reader.path.write_text(json.dumps(reader.document))
    expect(reader, capsys, [0, 1])


def test_any_value_may_be_another(reader, capsys):
    rng = random.Random(f"{type(reader).__name__} 1")
    for _ in range(RECORDS):
        text = damaged(reader.document, rng)
        reader.path.write_text(text)
        try:
            expect(reader, capsys)
        except BaseException as error:
            raise AssertionError(f"of {text[:3000]}") from error


def test_a_record_may_be_cut_off(reader, capsys):
    text = json.dumps(reader.document).encode()
    rng = random.Random(2)
    for _ in range(8):
        reader.path.write_bytes(text[: rng.randrange(1, len(text) - 1)])
        expect(reader, capsys, [2])


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_a_record_may_be_something_else(reader, capsys, content):
    reader.path.write_bytes(content)
    expect(reader, capsys, [2])


@pytest.mark.parametrize(
    "kind", ["a folder", "a fifo", "a link to zeros", "a link to itself", "too long"]
)
def test_a_record_may_be_no_file(reader, capsys, kind, monkeypatch):
    def late(*_):
        raise TimeoutError("it does not end")

    reader.path.unlink(missing_ok=True)
    if kind == "a folder":
        reader.path.mkdir()
        if isinstance(reader, Collect):
            pytest.skip("a folder is looked into")
    elif kind == "a fifo":
        os.mkfifo(reader.path)
    elif kind == "too long":
        reader.path.write_text(json.dumps(reader.document) + " " * 1000)
        monkeypatch.setattr(files, "MOST_JSON_BYTES", 1000)
        for module in (report.json, transfer.files, sys.modules["cnn_engine.ensemble.collect"]):
            monkeypatch.setattr(module, "MOST_JSON_BYTES", 1000)
    else:
        reader.path.symlink_to("/dev/zero" if kind == "a link to zeros" else reader.path.name)
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 30)
    try:
        expect(reader, capsys, [2])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_standard_input_is_bounded(tmp_path):
    good = comparisons.written(tmp_path / "good.json", comparisons.made())
    with open("/dev/zero", "rb") as zeros:
        done = subprocess.run(
            [sys.executable, "-m", "cnn_engine.compare", good, "-"], stdin=zeros, capture_output=True,
            text=True, timeout=60, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard input: expected at most ")
