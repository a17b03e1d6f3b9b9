"""The benchmark that ``auto``'s rule for convolutions on CUDA rests on, with a device that is the host."""

from __future__ import annotations

import ctypes

import fake_cuda
import numpy as np
import pytest

from benchmarks import conv2d_variants as bench

TASKS = [
    bench.Task(2, (3, 12, 12, 8, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1)),
    bench.Task(1, (16, 7, 7, 24, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1)),
    bench.Task(2, (5, 11, 9, 70, 5, 3, 2, 1, 2, 1, 2, 1, 1, 2)),
]


@pytest.fixture
def device(monkeypatch):
    def copy_d2h(self, to, source, nbytes):
        ctypes.memmove(to, source, nbytes)

    def times(device, calls):
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 1e-6)

    monkeypatch.setattr(fake_cuda.FakeCuda, "copy_d2h", copy_d2h)
    monkeypatch.setattr(bench, "times", times)
    return fake_cuda.FakeCuda()


def test_both_kernels_compute_the_same_before_they_are_compared(device):
    measured = bench.Bench(device, TASKS)
    for task in TASKS:
        assert measured.measure(task) == {"tiled": 1e-6, "blocked": 1e-6}


def test_a_kernel_that_computes_something_else_ends_the_run(device, monkeypatch):
    measured = bench.Bench(device, TASKS)

    def wrong(device, calls):
        calls["tiled"]()
        calls["blocked"]()
        outputs = measured._outputs["blocked"].address
        ctypes.memmove(outputs, np.ones(4, np.float32).ctypes.data, 16)
        return dict.fromkeys(calls, 1e-6)

    monkeypatch.setattr(bench, "times", wrong)
    with pytest.raises(RuntimeError, match="expected equal outputs"):
        measured.measure(TASKS[0])


def test_the_summary_counts_by_batch_filters_and_kernel():
    rows = [
        {"shape": list(task.sizes), "batch": task.batch, "tiled_s": tiled, "blocked_s": 2e-6}
        for task, tiled in zip(TASKS * 2, (1e-6, 4e-6, 1e-6, 3e-6, 1e-6, 1e-6), strict=True)
    ]
    lines = [line.split(" | ") for line in bench.summary(rows)][2:]
    assert [line[1:] for line in lines] == [
        ["17 to 24", "1x1", "2", "1", "1.25", "1.25 |"],
        ["1 to 8", "larger", "2", "1", "1.00", "1.00 |"],
        ["65 to 96", "larger", "2", "2", "0.50", "0.50 |"],
    ]


def test_shapes_are_those_of_the_network(torchvision):
    found = list(bench.shapes_of("squeezenet1_1"))
    assert len(found) == 26
    assert found[0] == (3, 224, 224, 64, 3, 3, 2, 2, 0, 0, 0, 0, 1, 1)
