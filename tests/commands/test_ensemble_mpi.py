"""The ensemble over MPI: the designs' bits, and how it ends when a rank does. Needs mpi4py and mpirun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tolerances

from benchmarks import ensemble_faults as faults

pytest.importorskip("mpi4py", exc_type=ImportError)
if faults.mpirun() is None:
    pytest.skip("mpirun: none beside this Python, none in the path", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("--data", "jpeg:40x30", "--images", "150", "--batch", "16", "--augment", "full", "--shuffle",
         "--members", "4", "--digest", "--device", "cpu", "--threads", "1", "--weights", "random",
         "--ceilings", "0.1", "--stall", "30")  # fmt: skip


def mpirun(ranks, *words, timeout_s=250):
    return subprocess.run(
        [faults.mpirun(), "-n", str(ranks), sys.executable, "-m", "cnn_engine.ensemble", *words],
        capture_output=True, text=True, timeout=timeout_s, env=faults.environment(), cwd=ROOT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What members of one process that share nothing are given."""
    path = tmp_path_factory.mktemp("alone") / "report.json"
    words = [*WORDS, "--design", "none", "--quiet", "--json", str(path)]
    command = [sys.executable, "-m", "cnn_engine.ensemble", *words]
    subprocess.run(command, check=True, cwd=ROOT, timeout=100)
    return json.loads(path.read_text())["rank_reports"][0]["digests"]


@pytest.mark.parametrize(
    ("design", "ranks", "options"),
    [
        ("none", 2, ()),
        ("all-shared", 4, ()),
        ("single-bcast", 3, ("--preprocessors", "2")),
        ("multi-bcast", 4, ("--preprocessors", "2", "--dedicated")),
    ],
)
def test_members_of_several_processes_get_the_bits_of_none(design, ranks, options, alone, tmp_path):
    path = tmp_path / "report.json"
    words = [*WORDS, "--design", design, *options, "--quiet", "--json", str(path)]
    done = mpirun(ranks, *words)
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    digests = {}
    for rank in document["rank_reports"]:
        digests |= rank["digests"]
    assert digests == alone
    decoded = sum(rank["preprocessing"]["images"] for rank in document["rank_reports"])
    assert decoded == (4 * 150 if design == "none" else 150)
    if design != "none":
        sent = document["ceilings_images_per_s"]["communication"]
        assert sent > 0
        assert document["communication_share"] == document["throughput_images_per_s"] / sent


def test_replicas_share_the_batches_of_a_member(tmp_path):
    words = ["--data", "jpeg:32x32", "--images", "90", "--batch", "16", "--device", "cpu"]
    words += ["--threads", "1", "--no-ceilings", "--quiet", "--stall", "30"]
    done = mpirun(3, *words, "--members", "2", "--balance", "--output", str(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "a" / "report.json").read_text())
    assert sorted(len(member["ranks"]) for member in document["members"]) == [1, 2]
    command = [sys.executable, "-m", "cnn_engine.ensemble", *words, "--output", str(tmp_path / "b")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=100)
    for name in ("member-0.npy", "member-1.npy"):
        assert (tmp_path / "a" / name).read_bytes() == (
            tmp_path / "b" / "member-0.npy"
        ).read_bytes()


@pytest.mark.parametrize(
    ("fault", "rank", "design", "extra"),
    [
        ("kill", 1, "all-shared", ()),
        ("kill", 0, "multi-bcast", ("--dedicated", "--preprocessors", "1")),
        ("raise", 2, "single-bcast", ()),
        ("hang", 1, "single-bcast", ()),
        ("start", 1, "none", ()),
        ("interrupt", 0, "all-shared", ()),
    ],
)  # fmt: skip
def test_all_end_when_one_does(fault, rank, design, extra):
    found = faults.attempt(fault, rank, 3, design, extra)
    assert found.wrong is None, found.error


def test_what_is_at_fault_in_the_options_is_told_once():
    done = mpirun(2, "--design", "ring")
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "--design: expected one of" in errors[0]


def test_one_model_trains_in_two_processes(tmp_path):
    """Gradients are averaged, so that the first steps' losses are those of one process, within noise."""
    pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, 64).astype(np.uint8)
    images = generator.integers(0, 256, (64, 3, 32, 32), np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=labels)
    words = ["--work", "train", "--data", str(tmp_path / "images.npz"), "--batch", "32", "--epochs"]
    words += ["2", "--device", "cpu", "--threads", "1", "--no-ceilings", "--quiet"]
    words += ["--stall", "60", "--start-timeout", "200"]
    two, one = tmp_path / "two", tmp_path / "one"
    done = mpirun(2, *words, "--data-parallel", "--output", str(two))
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "cnn_engine.ensemble", *words, "--output", str(one)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=100)
    losses = [
        [json.loads(line)["loss"] for line in (path / "member-0.jsonl").read_text().splitlines()]
        for path in (two, one)
    ]
    assert len(losses[0]) == 2
    # Each process normalises by the statistics of its own half: the losses are near, not the same.
    assert losses[0] == pytest.approx(losses[1], rel=tolerances.DATA_PARALLEL_LOSS)
    report = json.loads((two / "report.json").read_text())
    assert [rank["steps"]["images"] for rank in report["rank_reports"]] == [64, 64]
