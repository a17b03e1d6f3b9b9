"""Ensembles on GPUs: members that share one buffer, augmentation on the device, broadcasts by NCCL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ensemble_faults as faults
from cnn_engine import cli
from cnn_engine.ensemble import augment, command
from cnn_engine.ensemble.order import Order
from cnn_engine.io.preprocess import Preprocess

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def test_members_of_one_gpu_share_a_buffer(tmp_path):
    words = [
        "--data",
        "synthetic",
        "--images",
        "300",
        "--members",
        "3",
        "--augment",
        "full",
        "--digest",
    ]
    digests = []
    for device in ("cpu", "cuda"):
        path = tmp_path / f"{device}.json"
        code = command.main([*words, "--device", device, "--quiet", "--json", str(path)])
        assert code == cli.DONE
        digests.append(json.loads(path.read_text())["rank_reports"][0]["digests"])
    assert digests[0] == digests[1]
    assert len({*digests[0].values()}) == 1


def test_augmentation_on_the_device_is_that_of_the_host():
    import cupy

    images = np.random.default_rng(0).integers(0, 256, (50, 3, 32, 32), np.uint8)
    batch = Order(50, 50, shuffle=True)[0]
    for kind in ("fast", "full"):
        wanted = augment.augmented(images, batch, kind, 3)
        assert (augment.augmented(cupy.asarray(images), batch, kind, 3).get() == wanted).all()


def test_pixels_are_normalised_on_the_device_as_on_the_host():
    import cupy

    images = np.arange(2 * 3 * 32 * 32, dtype=np.int64).astype(np.uint8).reshape(2, 3, 32, 32)
    for text in ("imagenet", "std=0.3/0.4/0.5"):
        preprocess = Preprocess.parse(text)
        wanted = preprocess.normalised(images)
        found = augment.normalised(cupy.asarray(images), preprocess)
        assert found.get().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("design", ["all-shared", "single-bcast", "multi-bcast"])
def test_nccl_gives_the_bits_of_none(design, tmp_path):
    import cupy

    pytest.importorskip("mpi4py", exc_type=ImportError)
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("expected two GPUs")
    words = ["--data", "jpeg:40x30", "--images", "150", "--batch", "16", "--augment", "full", "--members",
             "2", "--digest", "--quiet", "--no-ceilings", "--stall", "30"]  # fmt: skip
    found = []
    for number, more in enumerate((["--design", design, "--nccl", "--device", "rank"],
                                   ["--design", "none", "--device", "cpu"])):  # fmt: skip
        path = tmp_path / f"{number}.json"
        start = [faults.mpirun(), "-n", "2", sys.executable, "-m", "cnn_engine.ensemble"]
        subprocess.run(
            [*start, *words, *more, "--json", str(path)],
            check=True, cwd=ROOT, env=faults.environment(), timeout=200,
        )  # fmt: skip
        digests = {}
        for rank in json.loads(path.read_text())["rank_reports"]:
            digests |= rank["digests"]
        found.append(digests)
    assert found[0] == found[1]
