"""What the steps of a pass add up to in every variant and data mode, and what they compute."""

from __future__ import annotations

from collections.abc import Iterator

import fake_cuda
import numpy as np
import pytest
import tolerances

from cnn_engine import Engine, workload
from cnn_engine.graph import reference
from cnn_engine.kernels import select
from cnn_engine.plan.plan import Plan

BATCH, CHUNK = 3, 2
CLASSES = 10

#: Of one image: two for each multiplication of the convolutions and linear layers.
FLOPS = {
    "cifar10": 2 * (16 * 32 * 32 * 75 + 20 * 16 * 16 * 400 + 20 * 8 * 8 * 500 + 10 * 320),
    "ece408": 2 * (6 * 44 * 44 * 25 + 16 * 18 * 18 * 150 + 140 * 5184 + 10 * 140),
}
#: Of one image, per convolution: numbers that it reads, the same zero-padded, and those it writes.
CONVOLUTIONS = {
    "cifar10": [
        (3 * 32 * 32, 3 * 36 * 36, 16 * 32 * 32),
        (16 * 16 * 16, 16 * 20 * 20, 20 * 16 * 16),
        (20 * 8 * 8, 20 * 12 * 12, 20 * 8 * 8),
    ],
    "ece408": [(48 * 48, 48 * 48, 6 * 44 * 44), (6 * 22 * 22, 6 * 22 * 22, 16 * 18 * 18)],
}

CELLS = [
    (network, device, mode, row.name, reduction, pixels)
    for network in ("cifar10", "ece408")
    for device, modes in select.DATA_MODES.items()
    if device != "openacc"  # test_openacc.py has it
    for mode in modes
    for row in select.VARIANTS.values()
    if device in row.devices and mode in row.data_modes
    for reduction in ((False, True) if row.reduction else (False,))
    for pixels in (True, False)
]


def engine(network: str, device: str, mode: str, variant: str, reduction: bool) -> Engine:
    return Engine(
        network, weights="random", device=device, data_mode=mode, variant=variant, reduction=reduction,
        threads=1, chunk=CHUNK if mode == "stream" else None,
    )  # fmt: skip


def plans(cell: tuple) -> Iterator[tuple[str, Plan]]:
    """Yields a cell's plans for images on the host, page-locked, and on the device."""
    *options, pixels = cell
    dtype = np.dtype(np.uint8 if pixels else np.float32)
    with engine(*options) as e:
        yield "host", e.plan(BATCH, dtype)
        if options[2] == "stream":
            yield "pinned", e.plan(BATCH, dtype, (True, True))
        if options[1] == "cuda" and options[2] in ("resident", "stream"):
            yield "device", e._plans._build_on(9, BATCH, pixels)


def name_of(cell: tuple) -> str:
    *words, reduction, pixels = cell
    return " ".join([*words, *["reduction"] * reduction, "uint8" if pixels else "float32"])


def expected_bytes(cell: tuple, side: str) -> dict[str, int]:
    """Returns direction -> bytes that a pass over ``BATCH`` images has to copy."""
    network, device, mode, variant, _, pixels = cell
    convolutions = CONVOLUTIONS[network]
    images = BATCH * convolutions[0][0] * (1 if pixels else 4)
    probabilities = BATCH * CLASSES * 4
    padded = variant == "pad"
    if device == "cpu" or side == "device":
        return {}
    if mode == "transfer":  # only convolutions run on the GPU
        return {
            "h2d": 4 * BATCH * sum(one[padded] for one in convolutions),
            "d2h": 4 * BATCH * sum(one[2] for one in convolutions),
        }
    if (
        mode == "managed"
    ):  # images that no step on the host reads first are the caller's, not managed
        first_is_convolution = not pixels and not (padded and network == "cifar10")
        return {"h2d": images} if first_is_convolution else {}
    found = {"h2d": images, "d2h": probabilities}
    if mode == "stream" and side == "host":  # through page-locked memory
        found["h2h"] = images + probabilities
    return found


@pytest.fixture
def fake(monkeypatch):
    fake_cuda.install(monkeypatch)


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_steps_do_a_networks_work_once_and_copy_what_the_data_mode_says(fake, cell):
    network, device, mode, variant, _, pixels = cell
    for side, plan in plans(cell):
        steps = plan.steps
        assert sum(step.flops for step in steps) == BATCH * FLOPS[network], side
        copied: dict[str, int] = {}
        for step in steps:
            if step.kind == "copy":
                copied[step.direction] = copied.get(step.direction, 0) + step.bytes
        assert copied == expected_bytes(cell, side), side
        kernels = [step for step in steps if step.kind not in ("copy", "sync")]
        chunks = -(-BATCH // CHUNK) if mode == "stream" and side != "device" else 1
        names = ["network"]
        if variant != "fused":
            names = [layer.name for layer in workload.get(network).network.layers]
            padded = len(CONVOLUTIONS[network]) if variant == "pad" and network == "cifar10" else 0
            assert [step.kind for step in kernels].count("pad") == padded * chunks, side
            assert [step.kind for step in kernels].count("normalize") == pixels * chunks, side
        assert [s.name for s in kernels if s.kind not in ("pad", "normalize")] == names * chunks
        on_gpu = {step.kind for step in kernels if step.place == "cuda"}
        if mode in ("transfer", "managed"):
            assert on_gpu == {"conv"}, side
        else:
            assert all(step.place == device for step in kernels), side
        if side != "device":  # there the caller's stream orders what reads the outputs
            assert_waits(plan)


def assert_waits(plan: Plan) -> None:
    """Asserts that no step of the host, nor the caller, comes between the GPU's work and a wait for it."""
    working = False
    for step in plan.steps:
        if step.kind == "sync":
            working = False
        elif step.place == "cuda":
            working = True
        elif step.name != "images":  # the next chunk's images are staged beside the GPU's work
            assert not working, step.name
    assert not working


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_a_plan_for_a_gpu_computes_what_the_reference_does(fake, rng, cell):
    """Copies, placements and the memory that steps share, with a GPU's kernels played by the CPU's."""
    *options, pixels = cell
    with engine(*options) as e:
        shape = (5, *e.network.input_shape)
        images = rng.integers(0, 256, shape, dtype=np.uint8)
        if not pixels:
            images = (images / 128 - 1).astype(np.float32)
        wanted = reference.forward(e.network, e.weights, images)
        bound = tolerances.PROBABILITY
        tolerances.assert_close(e.predict(images, BATCH), wanted, bound)
